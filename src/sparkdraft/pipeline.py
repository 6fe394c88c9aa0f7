"""All stages of a run in order, as `train/eagle.py` does them under `accelerate launch`.

The target and the trainer do not fit side by side on one Spark, so every stage that holds the target is a process of
its own that has ended before the next stage starts. Only training and export run in this process. Nothing heavy is
imported before it is needed.
"""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from sparkdraft.config import Config
from sparkdraft.run import Run

PARENT = "SPARKDRAFT_PARENT"
"""Tells a stage's process who started it; it ends with that one, as two of them would not fit."""

# What accelerate and torchrun set for the processes of a training.
_LAUNCHER = ("ACCELERATE_", "TORCHELASTIC_", "FSDP_", "MASTER_", "KMP_", "OMP_NUM_THREADS")
_LAUNCHER_NAMES = {f"{group}{name}" for group in ("", "LOCAL_", "GROUP_", "ROLE_") for name in ("RANK", "WORLD_SIZE")}


def run_all(config: Config) -> None:
    """Prepare, capture, train, export, evaluate; what is finished and unchanged is skipped.

    With several processes the first one does every stage but training, in which all take part.

    Raises:
        UserError, Stopped: from training and export.
        SystemExit: a stage's process failed (its message was shown), with its exit code; or a signal came.
    """
    if _launched():
        end_with_parent(os.getppid())  # `accelerate launch` dies of SIGTERM without passing it on
    _use_all_cores()
    run = open_run(config)
    if not _first():
        while not _ready(run).exists():
            time.sleep(1)
        _train(config, run)
        return
    for stage in ("prepare", "capture"):
        _run_stage(stage, run)
    _ready(run).touch()
    _train(config, run)
    from sparkdraft.export.eagle3 import export

    export(config, run)
    _run_stage("evaluate", run)


def _train(config: Config, run: Run) -> None:
    from sparkdraft.training.loop import train

    train(config, run)
    _free_memory()


def open_run(config: Config) -> Run:
    """Open a run; of several processes only the first one writes there."""
    return Run.open(config) if _first() else Run(config, Path(config.runs_dir) / config.name)


def _first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _ready(run: Run) -> Path:
    """A file that says that the features are there, to the processes of this launch: they have one parent. The next
    `Run.open` removes it, as it does every leftover."""
    return run.path / f".ready-{os.getppid()}.tmp"


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM to this process when the one that started it dies (PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(1)


def _launched() -> bool:
    return any(name.startswith(("ACCELERATE_", "TORCHELASTIC_")) for name in os.environ)


def _use_all_cores() -> None:
    """Undo OMP_NUM_THREADS=1, which the launchers set where nothing is set; torch reads it when it is imported."""
    if _launched() and os.environ.get("OMP_NUM_THREADS") == "1":
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // processes))


def _stage_environment() -> dict[str, str]:
    """This environment without what a launcher set: a stage is one process on its own and may use every core."""
    environment = dict(os.environ)
    if _launched():
        environment = {
            name: value
            for name, value in environment.items()
            if not name.startswith(_LAUNCHER) and name not in _LAUNCHER_NAMES
        }
    return environment | {PARENT: str(os.getpid())}


def _run_stage(stage: str, run: Run) -> None:
    """Run one stage in a process of its own and wait for it; Ctrl-C and SIGTERM (a SystemExit here) are passed on.

    Raises:
        SystemExit: the process failed, or a signal came.
    """
    command = [sys.executable, "-m", "sparkdraft.cli", stage, "--config", str(run.path / "config.yaml")]
    # a group of its own, so that Ctrl-C reaches it once: from here
    process = subprocess.Popen(command, env=_stage_environment(), process_group=0)
    try:
        code = process.wait()
    except (KeyboardInterrupt, SystemExit) as stop:
        process.send_signal(signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM)
        process.wait()
        raise SystemExit(130 if isinstance(stop, KeyboardInterrupt) else stop.code) from None
    if code < 0:
        hint = (
            " Most likely memory ran out: lower data.batch_size or features.tokens_per_batch."
            if code == -signal.SIGKILL
            else ""
        )
        message = f"{stage}: its process was ended by {signal.Signals(-code).name}.{hint}"
        Console(stderr=True, soft_wrap=True).print(message, style="red")
        raise SystemExit(1)
    if code:
        raise SystemExit(code)
