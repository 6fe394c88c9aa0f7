"""Writing files so that nothing half-written ever stands under a final name."""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparkdraft.errors import UserError


def sync(path: Path) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, a quota or a missing permission into a message that says which place and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"The disk that holds {path} is full. Free space there, or set `runs_dir` to another disk, and start "
                "again: what was finished is kept."
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise UserError(
                f"{path} cannot be written ({error.strerror}). Mend its permissions or set `runs_dir`."
            ) from error
        raise
    except Exception as error:
        # safetensors wraps the operating system's error in its own
        if "No space left on device" in str(error):
            raise UserError(
                f"The disk that holds {path} is full. Free space there, or set `runs_dir` to another disk, and start "
                "again: what was finished is kept."
            ) from error
        raise


@contextlib.contextmanager
def write_aside(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; on success flush it and rename it to `path`, on failure remove it.

    The caller creates the temporary path, as a file or as a directory. A directory at `path` is replaced.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.parent / f".{path.name}.{os.getpid()}.tmp"
    remove(aside)
    try:
        with disk_errors(path):
            yield aside
            for inner in sorted(aside.rglob("*")) if aside.is_dir() else ():
                _publish(inner)
            _publish(aside)
            if aside.is_dir() and path.exists():
                old = path.parent / f".{path.name}.{os.getpid()}.old.tmp"
                path.rename(old)
                aside.rename(path)
                remove(old)
            else:
                os.replace(aside, path)
            sync(path.parent)
    finally:
        remove(aside)


def _publish(path: Path) -> None:
    """Flush a file, and give it the permissions that the user's umask asks for: safetensors makes files that nobody else
    can read, such as the account that a server runs under."""
    if path.is_file():
        umask = os.umask(0)
        os.umask(umask)
        path.chmod(0o666 & ~umask)
    sync(path)


def remove(path: Path) -> None:
    """Remove a file or a directory tree, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(directory: Path) -> None:
    """Remove what killed writers left aside in a directory (see `write_aside`); a living one's is not touched."""
    for leftover in directory.glob(".*.tmp"):
        owner = re.search(r"[.-](\d+)(\.old)?\.tmp$", leftover.name)
        if owner is None or not Path(f"/proc/{owner[1]}").exists() or int(owner[1]) == os.getpid():
            remove(leftover)


def write_text(path: Path, text: str) -> None:
    with write_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; a missing or broken one is the user's to mend.

    Raises:
        UserError: the file is missing or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} is not valid JSON ({error}). Restore it or delete it and run its stage again."
        ) from error


def read_jsonl(path: Path) -> list[Any]:
    """The rows of a JSONL file that this program appends to; none where there is no file. A last line without an end was
    torn by a kill and is left out.

    Raises:
        UserError: another line is no JSON.
    """
    if not path.is_file():
        return []
    # not splitlines: U+2028 and its like are text
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path} holds a line that is not valid JSON ({error}). Delete it and run its stage again."
        ) from error


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hash of a JSON-able value, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
