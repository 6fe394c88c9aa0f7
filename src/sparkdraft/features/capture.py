"""The capture stage: run the target once over every sample and keep what a draft learns from.

Samples are sorted by length, longest first, so that a batch is nearly rectangular and memory faults show at once. They
are padded on the right: under a causal mask no real token sees the padding, so no attention mask is passed and the
fast causal kernels run. The lm_head is applied only where its result is kept.
"""

import hashlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sparkdraft.config import Config
from sparkdraft.data.samples import Sample, load_samples
from sparkdraft.errors import UserError
from sparkdraft.features.store import INDEX, Entry
from sparkdraft.features.taps import Taps
from sparkdraft.files import disk_errors, read_json, remove, remove_leftovers, sha256_file, write_aside, write_json
from sparkdraft.progress import progress_bar
from sparkdraft.run import Run
from sparkdraft.target import Target

LOGIT_BYTES = 64 << 20
"""Most bytes of full-vocabulary logits at a time."""


def capture(config: Config, run: Run) -> None:
    """Write the feature store of a run; a stopped capture goes on at its first unfinished shard.

    Raises:
        UserError: the samples are missing or not the target's, a layer does not exist, hidden states are zero or not
            finite, the disk is too small.
    """
    prepared = run.stage_record("prepare")
    samples = load_samples(run.samples)
    target = Target.open(config.target)
    layers = aux_layers(config.features.aux_layers, target.num_layers)
    inputs = {
        "features": config.features.model_dump(mode="json"),
        "aux_layers": layers,
        "prepare": prepared["fingerprint"],
        "samples": _digest(samples),
        "target": target.fingerprint,
        "target_dtype": str(target.dtype),
    }
    with run.stage("capture", inputs) as stage:
        # a shard that was deleted because it was damaged is made again
        stage.needed |= not _complete(run.features, stage.fingerprint)
        if not stage.needed:
            Console(stderr=True).print("capture: finished before, nothing has changed")
            return
        _check_samples(samples, target)
        with disk_errors(run.features):
            _Capture(config, run.features, target, layers, stage.fingerprint).write(samples)
        tokens = sum(len(sample.token_ids) for sample in samples)
        stage.facts.update(
            tokens=tokens, samples=len(samples), aux_layers=layers, index=sha256_file(run.features / INDEX)
        )


def aux_layers(requested: Sequence[int] | None, num_layers: int) -> list[int]:
    """The auxiliary layer ids: id i is the residual stream after i decoder layers, 0 the embedding.

    None takes vLLM's default (2, n//2, n-3), or three that exist where the target has fewer than 7 layers.

    Raises:
        UserError: an id is beyond the last layer, or the ids do not rise (vLLM sorts them, so the order would be lost).
    """
    if requested is None:
        return [2, num_layers // 2, num_layers - 3] if num_layers >= 7 else sorted({0, num_layers // 2, num_layers})
    ids = list(requested)
    if not ids or max(ids) > num_layers:
        raise UserError(
            f"features.aux_layers: {ids} must name layers from 0 (the embedding) to {num_layers}, the target's last."
        )
    if ids != sorted(set(ids)):
        raise UserError(f"features.aux_layers: {ids} must rise, each id once, as vLLM takes them: {sorted(set(ids))}.")
    return ids


def _digest(samples: Sequence[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(f"{sample.id} {sample.kind} {sample.split} {len(sample.token_ids)} ".encode())
        digest.update(sample.token_ids.numpy().tobytes())
        digest.update(sample.loss_mask.numpy().tobytes())
    return digest.hexdigest()


def _check_samples(samples: Sequence[Sample], target: Target) -> None:
    if not samples:
        raise UserError("The run has no samples. Add prompts to data.sources and run prepare again.")
    longest = getattr(target.config, "max_position_embeddings", None)
    for sample in samples:
        if int(sample.token_ids.max()) >= target.vocab_size or int(sample.token_ids.min()) < 0:
            raise UserError(
                f"Sample {sample.id} holds token ids outside the target's vocabulary of {target.vocab_size}: it was "
                "made with another tokenizer. Run prepare again."
            )
        if longest and len(sample.token_ids) > longest:
            raise UserError(
                f"Sample {sample.id} has {len(sample.token_ids)} tokens; the target takes {longest}. Lower "
                "data.max_length and run prepare again."
            )


def _complete(directory: Path, fingerprint: str) -> bool:
    """Whether the finished store of this fingerprint stands there, every shard in full length."""
    if not (directory / INDEX).is_file():
        return False
    index = read_json(directory / INDEX)
    files = [(directory / shard["file"], shard["bytes"]) for shard in index["shards"]]
    return index["fingerprint"] == fingerprint and all(
        path.is_file() and path.stat().st_size == size for path, size in files
    )


class _Capture:
    """One capture: what it needs to know, shard by shard."""

    def __init__(self, config: Config, directory: Path, target: Target, layers: list[int], fingerprint: str):
        self.settings, self.directory, self.target = config.features, directory, target
        self.layers, self.fingerprint = layers, fingerprint
        self.dtype: torch.dtype = getattr(torch, config.features.dtype)

    def write(self, samples: Sequence[Sample]) -> None:
        shards = {f"shard-{n:05}": shard for n, shard in enumerate(_shards(samples, self.settings.tokens_per_shard))}
        self._clean(set(shards))
        records = {name: record for name in shards if (record := self._finished(name))}
        missing = [name for name in shards if name not in records]
        self._check_disk([sample for name in missing for sample in shards[name]])
        with progress_bar() as bar:
            total = sum(map(_tokens, shards.values()))
            done = sum(_tokens(shards[name]) for name in records)
            task = bar.add_task("capture", total=total, completed=done, detail="")
            probe = _Probe(self.target, self.layers) if missing else None
            start = time.perf_counter()

            def advance(tokens: int) -> None:
                rate = (bar.tasks[0].completed + tokens - done) / (time.perf_counter() - start)
                bar.update(task, advance=tokens, detail=f"{rate:.0f} tok/s")

            for name in missing:
                assert probe
                records[name] = self._write_shard(name, shards[name], probe, advance)
        self._write_index(samples, shards, records)

    def _clean(self, names: set[str]) -> None:
        """Remove what killed writers left, and shards of other inputs (they hold the place that is needed)."""
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.directory)
        remove(self.directory / INDEX)
        for path in sorted(self.directory.glob("shard-*")):
            if path.stem not in names or not self._finished(path.stem):
                remove(path)

    def _finished(self, name: str) -> dict[str, Any] | None:
        """The record of a shard that was written in full from the same inputs."""
        path, beside = self.directory / f"{name}.safetensors", self.directory / f"{name}.json"
        record = read_json(beside) if path.is_file() and beside.is_file() else None
        same = record and record["fingerprint"] == self.fingerprint and record["bytes"] == path.stat().st_size
        return record if same else None

    def _check_disk(self, samples: Sequence[Sample]) -> None:
        token = (len(self.layers) + 1) * self.target.hidden_size * self.dtype.itemsize + 8 + 1 + 8
        needed, free = _tokens(samples) * token, shutil.disk_usage(self.directory).free
        if needed > free:
            raise UserError(
                f"The features need {needed / 1e9:.2f} GB in {self.directory} ({_tokens(samples)} tokens of {token} "
                f"bytes) and {free / 1e9:.2f} GB are free. Free space, set `runs_dir` to another disk, or take less "
                "data (data.sources, data.max_length)."
            )

    def _write_shard(
        self, name: str, samples: Sequence[Sample], probe: "_Probe", advance: Callable[[int], None]
    ) -> dict[str, Any]:
        offsets = [0, *itertools.accumulate(len(sample.token_ids) for sample in samples)]
        tensors = {
            "token_ids": torch.cat([sample.token_ids for sample in samples]).long(),
            "loss_mask": torch.cat([sample.loss_mask for sample in samples]),
            "aux": torch.empty(offsets[-1], len(self.layers) * self.target.hidden_size, dtype=self.dtype),
            "final": torch.empty(offsets[-1], self.target.hidden_size, dtype=self.dtype),
            "teacher_argmax": torch.full((offsets[-1],), -1, dtype=torch.int64),
            "offsets": torch.tensor(offsets),
        }
        places = map(slice, offsets[:-1], offsets[1:])
        for batch in _batches(samples, self.settings.tokens_per_batch):
            for sample, states in zip(batch, probe.run(batch), strict=True):
                self._fill(tensors, next(places), sample, states, probe)
            advance(_tokens(batch))
        path = self.directory / f"{name}.safetensors"
        with write_aside(path) as aside:
            save_file(tensors, aside)
            record = {
                "file": path.name,
                "fingerprint": self.fingerprint,
                "sha256": sha256_file(aside),
                "bytes": aside.stat().st_size,
                "tokens": offsets[-1],
            }
        write_json(self.directory / f"{name}.json", record)
        return record

    def _fill(
        self, tensors: dict[str, Tensor], place: slice, sample: Sample, states: list[Tensor], probe: "_Probe"
    ) -> None:
        """Put one sample's states, each [T, H] (at every auxiliary layer, then after the final norm), into a shard."""
        stored = [state.to(self.dtype).cpu() for state in states]
        for layer, state, kept in zip([*self.layers, None], states, stored, strict=True):
            self._check_states(sample, layer, state, kept)
        tensors["aux"][place] = torch.cat(stored[:-1], dim=-1)
        tensors["final"][place] = stored[-1]
        positions = torch.nonzero(sample.loss_mask[1:])[:, 0]
        choices = probe.teacher(states[-1][positions.to(states[-1].device)])
        tensors["teacher_argmax"][place.start + positions] = choices.cpu()

    def _check_states(self, sample: Sample, layer: int | None, state: Tensor, stored: Tensor) -> None:
        """Refuse what would be trained on for hours: states that are zero, NaN or infinite."""
        peaks = stored.abs().amax(-1)  # one a token; NaN propagates
        finite = peaks.isfinite()
        if bool((finite & (peaks > 0)).all()):
            return
        where = f"Sample {sample.id}: the target's hidden states " + (
            "after the final norm" if layer is None else f"after {layer} layers"
        )
        if bool(finite.all()):
            token = int((peaks == 0).nonzero()[0])
            raise UserError(
                f"{where} are all zero at token {token}. Its weights are damaged or were not loaded: check "
                f"{self.target.path}."
            )
        if bool(state.isfinite().all()):
            raise UserError(
                f"{where} do not fit into {self.settings.dtype}. Set features.dtype to bfloat16 or float32."
            )
        raise UserError(
            f"{where} hold NaN or infinity. The likely cause is an overflow in {self.target.dtype}: set target.dtype "
            f"to bfloat16 or float32. If it is not that, the weights in {self.target.path} are damaged."
        )

    def _write_index(
        self, samples: Sequence[Sample], shards: dict[str, list[Sample]], records: dict[str, dict[str, Any]]
    ) -> None:
        entries: dict[str, dict[str, Any]] = {}
        for name, group in shards.items():
            offset = 0
            for sample in group:
                length, trained = len(sample.token_ids), int(sample.loss_mask.sum())
                entry = Entry(sample.id, sample.kind, sample.split, length, trained, records[name]["file"], offset)
                entries[sample.id] = vars(entry)
                offset += length
        index = {
            "fingerprint": self.fingerprint,
            "target": self.target.name,
            "target_fingerprint": self.target.fingerprint,
            "aux_layers": self.layers,
            "hidden_size": self.target.hidden_size,
            "dtype": self.settings.dtype,
            "shards": [records[name] for name in shards],
            "entries": [entries[sample.id] for sample in samples],
        }
        write_json(self.directory / INDEX, index)


class _Probe:
    """The target's decoder, with the residual stream in front of chosen layers kept as it passes."""

    def __init__(self, target: Target, layers: Sequence[int]):
        self.model = target.load_model()
        self.decoder: nn.Module = self.model.get_decoder()
        self.head: nn.Module = self.model.get_output_embeddings()
        self.rows = max(1, LOGIT_BYTES // (target.vocab_size * (4 + self.head.weight.element_size())))
        self.taps = Taps(self.decoder, layers)
        self._check_head()

    @torch.inference_mode()
    def run(self, batch: Sequence[Sample]) -> Iterator[list[Tensor]]:
        """For each sample of T tokens its states, each [T, H]: at every auxiliary layer, then after the final norm."""
        token_ids = pad_sequence([sample.token_ids.long() for sample in batch], batch_first=True)
        final = self.decoder(input_ids=token_ids.to(self.model.device), use_cache=False).last_hidden_state
        states = [*self.taps.take(), final]
        for row, sample in enumerate(batch):
            yield [state[row, : len(sample.token_ids)] for state in states]

    @torch.inference_mode()
    def teacher(self, final: Tensor) -> Tensor:
        """The target's choice (int64 [P]) at P final states [P, H]."""
        return torch.cat([self.head(rows).argmax(-1) for rows in final.split(self.rows)])

    @torch.inference_mode()
    def _check_head(self) -> None:
        """Refuse a target whose logits are more than lm_head times final state (soft caps, scales): training would
        imitate another model."""
        token_ids = torch.arange(8, device=self.model.device)[None]
        logits = self.model(input_ids=token_ids, use_cache=False).logits.float()
        ours = self.head(self.decoder(input_ids=token_ids, use_cache=False).last_hidden_state).float()
        if (logits - ours).abs().max() > 1e-3 * logits.abs().max():
            raise UserError(
                f"target.model: {type(self.model).__name__} changes its logits after the lm_head (a soft cap or a "
                "scale); no draft can be trained for such a target here."
            )


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample.token_ids) for sample in samples)


def _shards(samples: Sequence[Sample], tokens_per_shard: int) -> list[list[Sample]]:
    """Samples by length, longest first, in groups of about that many tokens."""
    ordered = sorted(samples, key=lambda sample: -len(sample.token_ids))
    ends = itertools.accumulate(len(sample.token_ids) for sample in ordered)
    numbered = [((end - 1) // tokens_per_shard, sample) for end, sample in zip(ends, ordered, strict=True)]
    return [[sample for _, sample in group] for _, group in itertools.groupby(numbered, key=lambda pair: pair[0])]


def _batches(samples: Sequence[Sample], tokens_per_batch: int) -> Iterator[list[Sample]]:
    """Neighbours in a shard, as many as fit when padded to the first and longest."""
    batch: list[Sample] = []
    for sample in samples:
        if batch and (len(batch) + 1) * len(batch[0].token_ids) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch
