"""The feature store: what the target produced for every sample, in memory-mapped safetensors shards.

    store = FeatureStore.open(run.features)
    store.verify()                            # checksums, once a process
    features = store.load(store.entries[0])   # views of the mapped file, nothing is copied

A directory of `shard-NNNNN.safetensors`, each with a record beside it (`shard-NNNNN.json`: fingerprint, checksum) that
lets a stopped capture go on, and an `index.json` that is written last. In a shard the samples stand one after the
other; N is its number of tokens, A of auxiliary layers, H the hidden size:

    token_ids int64 [N]   loss_mask bool [N]   aux [N, A*H]   final [N, H]   offsets int64 [samples + 1]
    teacher_argmax int64 [N]
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparkdraft.errors import UserError
from sparkdraft.files import read_json, sha256_file

INDEX = "index.json"
TENSORS = ("token_ids", "loss_mask", "aux", "final", "teacher_argmax", "offsets")


@dataclass(frozen=True)
class Entry:
    """Where one sample stands."""

    id: str
    kind: str
    split: str
    length: int
    trained: int
    """Tokens under the loss mask."""
    shard: str
    offset: int
    """Its first token in the shard."""


@dataclass(frozen=True)
class Features:
    """One sample of T tokens, in the dtype of the store."""

    token_ids: Tensor
    """int64 [T]"""
    loss_mask: Tensor
    """bool [T]: tokens that the assistant wrote."""
    aux: Tensor
    """[T, A*H]: the residual stream at the auxiliary layers, one after the other."""
    final: Tensor
    """[T, H]: after the final norm."""
    teacher_argmax: Tensor
    """int64 [T]: the target's choice at position t (for token t+1); -1 where loss_mask[t+1] is off."""


class FeatureStore:
    """A finished capture, opened for reading."""

    def __init__(self, directory: Path, index: dict[str, Any]):
        self.directory, self._index = directory, index
        self.entries = [Entry(**entry) for entry in index["entries"]]
        self.aux_layers: list[int] = index["aux_layers"]
        self.hidden_size: int = index["hidden_size"]
        self.target_fingerprint: str = index["target_fingerprint"]
        self._tensors = {shard["file"]: self._map(shard) for shard in index["shards"]}

    @classmethod
    def open(cls, directory: Path) -> "FeatureStore":
        """Map every shard; sizes and headers are checked here, contents by `verify` and `load`.

        Raises:
            UserError: there is no finished store, or a shard is missing, cut short or not what the index says.
        """
        if not (directory / INDEX).is_file():
            raise UserError(f"{directory} holds no finished feature store. {_mend(directory)}")
        return cls(directory, read_json(directory / INDEX))

    def _map(self, shard: dict[str, Any]) -> dict[str, Tensor]:
        path = self.directory / shard["file"]
        size = path.stat().st_size if path.is_file() else 0
        if size != shard["bytes"]:
            raise self._damaged(path, f"it has {size} bytes and should have {shard['bytes']}")
        try:
            with safe_open(path, framework="pt") as file:
                # a mapped tensor: pages are read when they are touched, and no file stays open
                tensors = {name: file.get_tensor(name) for name in TENSORS}
        except SafetensorError as error:
            raise self._damaged(path, str(error)) from error
        width = len(self.aux_layers) * self.hidden_size
        if tensors["aux"].shape != (shard["tokens"], width) or len(tensors["final"]) != shard["tokens"]:
            raise self._damaged(path, "its tensors have other shapes than the index says")
        return tensors

    def _damaged(self, path: Path, why: str) -> UserError:
        return UserError(
            f"The feature shard {path} is damaged: {why}. Delete it and make it again. {_mend(self.directory)}"
        )

    def verify(self) -> None:
        """Compare every shard with its checksum (reads the whole store).

        Raises:
            UserError: names the first damaged shard.
        """
        shards = self._index["shards"]
        with ThreadPoolExecutor() as pool:
            sums = pool.map(lambda shard: sha256_file(self.directory / shard["file"]), shards)
            for shard, found in zip(shards, _tracked(sums, len(shards)), strict=True):
                if found != shard["sha256"]:
                    pool.shutdown(cancel_futures=True)
                    raise self._damaged(self.directory / shard["file"], "its checksum is not the one in the index")

    def tokens(self, entry: Entry) -> tuple[Tensor, Tensor]:
        """Token ids (int64 [T]) and loss mask (bool [T]) alone."""
        tensors, place = self._tensors[entry.shard], slice(entry.offset, entry.offset + entry.length)
        return tensors["token_ids"][place], tensors["loss_mask"][place]

    def load(self, entry: Entry) -> Features:
        """The features of one sample, as views of the mapped file.

        Raises:
            UserError: a hidden state is NaN or infinite.
        """
        tensors, place = self._tensors[entry.shard], slice(entry.offset, entry.offset + entry.length)
        features = Features(**{name: tensors[name][place] for name in TENSORS if name != "offsets"})
        for name in ("aux", "final"):
            lowest, highest = getattr(features, name).aminmax()  # NaN propagates; faster than isfinite over all
            if not (lowest.isfinite() & highest.isfinite()):
                why = f"the {name} states of sample {entry.id} hold NaN or infinity"
                raise self._damaged(self.directory / entry.shard, why)
        return features


def _mend(directory: Path) -> str:
    return f"Run: sparkdraft capture --config {directory.parent / 'config.yaml'}"


def _tracked(items: Iterator[str], total: int) -> Iterator[str]:
    return iter(track(items, "check features", total, console=Console(stderr=True), transient=True))
