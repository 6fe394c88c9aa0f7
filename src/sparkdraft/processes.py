"""Processes that sparkdraft starts: what they inherit, and that they end with the one that started them."""

import ctypes
import os
import signal
import sys

# What accelerate and torchrun set for the processes of a training.
_LAUNCHER = ("ACCELERATE_", "TORCHELASTIC_", "FSDP_", "MASTER_", "KMP_", "OMP_NUM_THREADS")
_LAUNCHER_NAMES = {f"{group}{name}" for group in ("", "LOCAL_", "GROUP_", "ROLE_") for name in ("RANK", "WORLD_SIZE")}


def launched() -> bool:
    """Whether accelerate or torchrun started this process."""
    return any(name.startswith(("ACCELERATE_", "TORCHELASTIC_")) for name in os.environ)


def own_environment() -> dict[str, str]:
    """This environment without what a launcher set: a process on its own may use every core."""
    if not launched():
        return dict(os.environ)
    return {n: v for n, v in os.environ.items() if not n.startswith(_LAUNCHER) and n not in _LAUNCHER_NAMES}


def end_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM to this process when the one that started it dies (PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(1)
