"""The command line: exit codes, and what is said on standard error."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from sparkdraft.cli import STAGES, app, exit_code
from sparkdraft.errors import Stopped, UserError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def config(tmp_path):
    """A run in a directory of its own."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"name": "small", "runs_dir": str(tmp_path / "runs")}))
    return path


def call(*arguments) -> tuple[int, str]:
    """In this process: exit code and standard error, line ends and all."""
    result = CliRunner().invoke(app, list(map(str, arguments)))
    return result.exit_code, result.stderr


def spawn(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("program", [["-m", "sparkdraft.cli", "prepare"], ["train/eagle.py"]])
def test_a_wrong_key_ends_with_2_and_one_message(program, config):
    result = spawn(*program, "--config", config, "train.step=5")
    assert result.returncode == 2
    assert "unknown key 'train.step'; did you mean 'steps'" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (config.parent / "runs").exists()


@pytest.mark.parametrize("stage", STAGES)
def test_a_missing_config_file_ends_every_stage_with_2(stage, tmp_path):
    code, said = call(stage, "--config", tmp_path / "nowhere.yaml")
    assert code == 2
    assert f"{tmp_path / 'nowhere.yaml'} cannot be read" in said


@pytest.mark.parametrize(("stage", "before"), [*zip(list(STAGES)[1:], STAGES, strict=False), ("report", "evaluate")])
def test_a_stage_out_of_order_names_the_one_to_run_first(stage, before, config):
    code, said = call(stage, "--config", config)
    assert code == 2, said
    assert re.search(f"no finished stage '{before}'.*sparkdraft {before} --config", said), said


def test_help_names_every_stage_and_loads_nothing_heavy():
    result = spawn("-X", "importtime", "-m", "sparkdraft.cli", "--help")
    assert result.returncode == 0
    assert all(stage in result.stdout for stage in [*STAGES, "report", "responses", "doctor"])
    assert not re.search(r"\| +(torch|transformers|datasets|vllm)$", result.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("mend [this] one"), 2, "mend [this] one\n"),
        (Stopped("go on"), 0, "go on\n"),
        (KeyboardInterrupt(), 130, "Interrupted"),
        (ValueError("a fault of ours"), 1, "ValueError: a fault of ours"),
    ],
)
def test_every_kind_of_end_has_its_exit_code(error, code, said, capsys):
    def action():
        raise error

    assert exit_code(action) == code
    shown = capsys.readouterr().err
    assert said in shown
    assert ("Traceback" in shown) == (code == 1)


def test_a_long_message_is_not_broken_into_lines(capsys):
    message = "the path /" + "/".join(["directory"] * 60) + " is wrong"

    def action():
        raise UserError(message)

    exit_code(action)
    assert message in capsys.readouterr().err


def test_sigterm_cleans_up(tmp_path):
    program = f"""
import sys, time
from pathlib import Path
from sparkdraft.cli import exit_code
from sparkdraft.files import write_aside
def action():
    with write_aside(Path({str(tmp_path / "result")!r})) as aside:
        aside.write_text("half")
        print("writing", flush=True)
        time.sleep(60)
sys.exit(exit_code(action))
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def rows(*arguments) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout


def test_doctor_is_content_here(config):
    code, table = rows("--config", config)
    assert code == 0, table
    for check in ("python", "torch", "transformers", "vllm", "torchvision", "CPU cores", "memory", "disk", "target"):
        assert check in table


def test_doctor_names_a_target_that_is_not_there(config, tmp_path):
    (tmp_path / "empty").mkdir()
    code, table = rows("--config", config, f"target.model={tmp_path / 'empty'}")
    assert code == 1
    assert re.search(r"fix +target", table)


def test_doctor_names_a_torchvision_of_another_torch(config, tmp_path, monkeypatch):
    package = tmp_path / "site" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    code, table = rows("--config", config)
    assert code == 1
    assert re.search(r"fix +torchvision.*nms does not exist", table), table
    assert "pip uninstall torchvision" in " ".join(table.split())
