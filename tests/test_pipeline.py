"""All stages in order: what the stages' processes inherit, and how the end of one ends the run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
LAUNCHED = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "TORCHELASTIC_RUN_ID": "1",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
    "OMP_NUM_THREADS": "1",
}

# A pipeline whose stages are a script of ours instead of sparkdraft.cli, and whose training only notes that it ran.
DRIVER = """
import os, sys, types
from pathlib import Path
for name in ("training.loop", "export.eagle3"):
    kind = name.partition(".")[0].replace("training", "train")
    def note(config, run, kind=kind):
        with open(run.path.parents[1] / "stages", "a") as file:
            file.write(f"{kind} {os.environ.get('RANK', '-')} {os.environ.get('OMP_NUM_THREADS', '-')}\\n")
    sys.modules["sparkdraft." + name] = types.ModuleType(name)
    setattr(sys.modules["sparkdraft." + name], kind, note)
from sparkdraft import pipeline
from sparkdraft.cli import exit_code
from sparkdraft.config import load_config
sys.executable = sys.argv[2]
sys.exit(exit_code(lambda: pipeline.run_all(load_config(Path(sys.argv[1])))))
"""


@pytest.fixture
def run(tmp_path):
    """Start a pipeline whose stages are the given shell script, which gets `-m sparkdraft.cli STAGE ...`."""
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({"name": "small", "runs_dir": str(tmp_path / "runs")}))

    def start(script: str, launcher: str | None = None, **environment: str) -> subprocess.Popen:
        stage = tmp_path / "stage"
        stage.write_text(f"#!/bin/bash\ncd {tmp_path}\n{script}\n")
        stage.chmod(0o755)
        command = [sys.executable, "-c", DRIVER, str(config), str(stage)]
        if launcher:
            command = [sys.executable, "-c", launcher, *command]
        return subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.PIPE, text=True)

    return start


def wait_for(path: Path) -> str:
    deadline = time.time() + 30
    while time.time() < deadline:
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.02)
    raise AssertionError(f"{path} did not appear")


def test_stages_run_in_order(run, tmp_path):
    assert run("echo $3 >> stages").wait(60) == 0
    done = [line.split()[0] for line in (tmp_path / "stages").read_text().splitlines()]
    assert done == ["prepare", "capture", "train", "export", "evaluate"]
    assert "name: small" in (tmp_path / "runs" / "small" / "config.yaml").read_text()


def test_of_two_processes_one_does_the_stages_and_both_train(run, tmp_path):
    script = "sleep 0.3; echo $3 >> stages"
    second = run(script, **LAUNCHED | {"RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    first = run(script, **LAUNCHED | {"LOCAL_WORLD_SIZE": "2"})
    assert (first.wait(60), second.wait(60)) == (0, 0)
    done = (tmp_path / "stages").read_text().splitlines()
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert done[:2] == ["prepare", "capture"]
    assert sorted(done[2:]) == sorted([f"train 0 {threads}", f"train 1 {threads}", f"export 0 {threads}", "evaluate"])


@pytest.mark.parametrize("code", [1, 2, 130])
def test_a_failing_stage_ends_the_run_with_its_code_and_no_word_of_ours(run, code, tmp_path):
    process = run(f"echo $3 >> stages; exit {code}")
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said == ""
    assert (tmp_path / "stages").read_text() == "prepare\n"


def test_a_killed_stage_is_named(run):
    process = run("kill -KILL $$")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "prepare: its process was ended by SIGKILL" in said and "memory" in said


def test_a_stage_inherits_nothing_of_the_launcher(run, tmp_path):
    run("env > environment; exit 3", **LAUNCHED, HF_HOME="/kept").communicate(timeout=60)
    names = dict(line.partition("=")[::2] for line in (tmp_path / "environment").read_text().splitlines())
    assert not LAUNCHED.keys() & names.keys()
    assert names["HF_HOME"] == "/kept"


def test_without_a_launcher_the_users_thread_count_is_kept(run, tmp_path):
    run("env > environment; exit 3", OMP_NUM_THREADS="1").communicate(timeout=60)
    assert "OMP_NUM_THREADS=1" in (tmp_path / "environment").read_text().splitlines()


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "TERM"), (signal.SIGINT, "INT")])
def test_a_signal_is_passed_on_and_the_stage_waited_for(run, number, name, tmp_path):
    process = run(
        f"trap 'sleep 0.3; echo {name} > ended; exit 1' {name}\necho $$ > started\nwhile :; do sleep 0.05; done"
    )
    wait_for(tmp_path / "started")
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    assert (tmp_path / "ended").read_text() == f"{name}\n"


def gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(process: int) -> None:
    deadline = time.time() + 30
    while not gone(process):
        assert time.time() < deadline, "it outlived the one that started it"
        time.sleep(0.02)


def test_a_stage_ends_when_its_pipeline_is_killed(run, tmp_path):
    """The stage enters through the real command line."""
    waits = "import sys, time, sparkdraft.cli as c; c.app = lambda: (print('up', flush=True), time.sleep(60)); c.main()"
    process = run(f'exec {sys.executable} -c "{waits}" > up')
    wait_for(tmp_path / "up")
    stage = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    process.kill()
    process.wait()
    wait_until_gone(stage)


def test_a_run_ends_when_its_launcher_is_killed(run, tmp_path):
    """As `accelerate launch` does at SIGTERM: it dies and says nothing to its process."""
    launcher = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    process = run(
        "trap 'echo TERM > ended; exit 1' TERM\necho $$ > started\nwhile :; do sleep 0.05; done", launcher, **LAUNCHED
    )
    stage = int(wait_for(tmp_path / "started"))
    process.kill()
    process.wait()
    wait_until_gone(stage)
    assert (tmp_path / "ended").read_text() == "TERM\n"


def test_the_script_stops_at_a_wrong_target(tmp_path):
    (tmp_path / "empty").mkdir()
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({"name": "small", "runs_dir": str(tmp_path / "runs")}))
    command = [sys.executable, "train/eagle.py", "--config", str(config), f"target.model={tmp_path / 'empty'}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2, result.stderr
    assert "holds no config.json" in result.stderr
    assert "Traceback" not in result.stderr
