"""All stages of a run in order, as `train/eagle.py` does them under `accelerate launch`.

The target and the trainer do not fit side by side on one Spark, so every stage that holds the target is a process of
its own that has ended before the next stage starts. Only training and export run in this process. Nothing heavy is
imported before it is needed.
"""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from sparkdraft.config import Config
from sparkdraft.processes import end_with_parent, launched, own_environment
from sparkdraft.run import Run

PARENT = "SPARKDRAFT_PARENT"
"""Tells a stage's process who started it; it ends with that one, as two of them would not fit."""


def run_all(config: Config) -> None:
    """Prepare, capture, train, export, evaluate; what is finished and unchanged is skipped.

    With several processes the first one does every stage but training, in which all take part.

    Raises:
        UserError, Stopped: from training and export.
        SystemExit: a stage's process failed (its message was shown), with its exit code; or a signal came.
    """
    if launched():
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


def _use_all_cores() -> None:
    """Undo OMP_NUM_THREADS=1, which the launchers set where nothing is set; torch reads it when it is imported."""
    if launched() and os.environ.get("OMP_NUM_THREADS") == "1":
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // processes))


def _run_stage(stage: str, run: Run) -> None:
    """Run one stage in a process of its own and wait for it; Ctrl-C and SIGTERM (a SystemExit here) are passed on.

    Raises:
        SystemExit: the process failed, or a signal came.
    """
    command = [sys.executable, "-m", "sparkdraft.cli", stage, "--config", str(run.path / "config.yaml")]
    # a group of its own, so that Ctrl-C reaches it once: from here
    process = subprocess.Popen(command, env=own_environment() | {PARENT: str(os.getpid())}, process_group=0)
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
