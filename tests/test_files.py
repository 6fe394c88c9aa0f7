"""Nothing half-written under a final name: errors, kills and full disks."""

import os
import subprocess
import sys

import pytest

from sparkdraft.errors import UserError
from sparkdraft.files import disk_errors, read_json, write_aside, write_json, write_text


def test_an_error_leaves_the_old_file_and_nothing_aside(tmp_path):
    write_text(tmp_path / "a.txt", "old")
    with pytest.raises(RuntimeError), write_aside(tmp_path / "a.txt") as aside:
        aside.write_text("new")
        raise RuntimeError
    assert (tmp_path / "a.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_directory_is_replaced_whole(tmp_path):
    for content in ("one", "two"):
        with write_aside(tmp_path / "d") as aside:
            aside.mkdir()
            (aside / content).write_text(content)
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["two"]


def test_broken_json_is_named(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(UserError, match=r"x\.json is not valid JSON"):
        read_json(tmp_path / "x.json")
    with pytest.raises(UserError, match="is missing"):
        read_json(tmp_path / "y.json")


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of one MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount a tmpfs")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


def test_a_full_disk_is_said_and_the_old_file_stays(tiny_disk):
    write_json(tiny_disk / "a.json", {"old": 1})
    with pytest.raises(UserError, match=r"disk that holds .*a\.json is full.*runs_dir"):
        write_json(tiny_disk / "a.json", "x" * (2 << 20))
    assert read_json(tiny_disk / "a.json") == {"old": 1}
    assert [path.name for path in tiny_disk.iterdir()] == ["a.json"]


def test_a_run_on_a_full_disk_ends_with_code_2(tiny_disk, small_config):
    (tiny_disk / "filler").write_bytes(b"x" * (1 << 20))
    command = [
        sys.executable,
        "-m",
        "sparkdraft.cli",
        "prepare",
        "--config",
        str(small_config),
        f"runs_dir={tiny_disk}/runs",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "is full" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_permission_is_said(tmp_path):
    with pytest.raises(UserError, match="cannot be written"), disk_errors(tmp_path):
        raise PermissionError(13, "Permission denied")
