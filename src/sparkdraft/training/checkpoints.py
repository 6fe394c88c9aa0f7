"""Checkpoints: the draft, and everything that a bit-exact continuation needs. Safetensors and JSON only."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sparkdraft.drafts.eagle3 import Eagle3Draft
from sparkdraft.errors import UserError
from sparkdraft.files import read_json, remove, remove_leftovers, write_aside, write_json
from sparkdraft.training.optimisers import Optimiser, pack_state, unpack_state

STATE = "state.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A directory `step-N`: a draft directory plus optimiser and RNG state and progress."""

    path: Path

    @property
    def step(self) -> int:
        return int(self.path.name.removeprefix("step-"))

    @property
    def progress(self) -> dict[str, Any]:
        return read_json(self.path / "progress.json")

    def restore(self, draft: Eagle3Draft, optimisers: list[Optimiser]) -> None:
        """Load weights, optimiser and RNG state.

        Raises:
            UserError: the checkpoint is damaged.
        """
        try:
            state = load_file(self.path / STATE)
            saved = Eagle3Draft.load(self.path)
        except (OSError, SafetensorError, UserError) as error:
            raise UserError(
                f"The checkpoint {self.path} is damaged ({error}). Delete it: training goes on from the one before."
            ) from error
        draft.load_state_dict(saved.state_dict())
        torch.set_rng_state(state.pop("rng"))
        unpack_state(optimisers, state)


def save_checkpoint(
    directory: Path, step: int, draft: Eagle3Draft, optimisers: list[Optimiser], progress: dict[str, Any]
) -> Checkpoint:
    """Write `directory/step-N` aside and rename it; a kill at any moment leaves the ones before untouched."""
    path = directory / f"step-{step}"
    with write_aside(path) as aside:
        aside.mkdir()
        draft.save(aside)
        save_file(pack_state(optimisers) | {"rng": torch.get_rng_state()}, aside / STATE)
        write_json(aside / "progress.json", progress)
    return Checkpoint(path)


def checkpoints(directory: Path) -> list[Checkpoint]:
    """All finished checkpoints, oldest first."""
    remove_leftovers(directory)
    return sorted((Checkpoint(path) for path in directory.glob("step-*")), key=lambda c: c.step)


def claim(directory: Path, metrics: Path, fingerprint: str) -> None:
    """Make `directory` hold checkpoints of the settings with this fingerprint alone. Those of other settings move, with
    their metrics, to a directory beside it, from which they return when their settings do."""

    def beside(of: str) -> Path:
        return directory.with_name(f"{directory.name}-{of[:8]}")

    found = checkpoints(directory)
    if found and (theirs := found[-1].progress["fingerprint"]) != fingerprint:
        if metrics.exists():
            metrics.rename(directory / metrics.name)
        remove(beside(theirs))
        directory.rename(beside(theirs))
    if beside(fingerprint).exists():
        remove(directory)
        beside(fingerprint).rename(directory)
    if (directory / metrics.name).exists():  # also where a kill came between the steps above
        (directory / metrics.name).rename(metrics)


def prune(directory: Path, keep: int, best: int | None) -> None:
    """Delete all but the newest `keep` checkpoints and the best one."""
    for checkpoint in checkpoints(directory)[:-keep]:
        if checkpoint.step != best:
            remove(checkpoint.path)
