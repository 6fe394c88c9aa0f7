"""What is trained on at which step: a plan fixed by seed, and the packing of samples into a batch.

The plan depends on nothing but the feature store, the seed and the number of processes, so the position in the data is
the step number alone: a resumed run reads on where it stopped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sparkdraft.drafts.ttt import Span
from sparkdraft.errors import UserError
from sparkdraft.features.store import Entry, Features, FeatureStore


@dataclass(frozen=True)
class Batch:
    """Packed samples: N rows, P target positions to be predicted, S draft steps."""

    token_ids: Tensor
    """int64 [N]"""
    aux: Tensor
    """[N, F]"""
    spans: list[Span]
    final: Tensor
    """[P, target_hidden_size]: the target's final state at each position p that predicts token p+1."""
    argmax: Tensor
    """int64 [P]: the target's choice there."""
    rows: Tensor
    """int64 [S, P]: which live row predicts position p at step s."""
    valid: Tensor
    """bool [S, P]: whether that row exists and all the tokens from it to the predicted one are the assistant's."""

    def to(self, device: torch.device) -> "Batch":
        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return Batch(
            move(self.token_ids), move(self.aux), self.spans, move(self.final),
            move(self.argmax), move(self.rows), move(self.valid),
        )  # fmt: skip


def collate(samples: Sequence[Features], steps: int, dtype: torch.dtype) -> Batch:
    """Pack samples. With x the tokens, a row t drafts only if the assistant wrote x[t+1], as when serving; it predicts
    x[t+2+s] at step s, for which the teacher is the target at position p = t+1+s.

        tokens    x0   x1   x2   x3   x4        mask 0 0 1 1 1: the assistant wrote x2, x3, x4
        row            t=1  t=2                 x2 is known at row 1, which predicts x3 (p=2), x4 (p=3)
        position            p=2  p=3
    """
    spans, finals, argmaxes, rows, valids = [], [], [], [], []
    start = live = 0
    for sample in samples:
        mask = sample.loss_mask
        length = len(mask)
        positions = torch.nonzero(mask[1:-1] & mask[2:])[:, 0] + 1  # p: x[p] was drafted from, x[p+1] is predicted
        first = int(positions[0]) - 1 if len(positions) else length - 1
        spans.append(Span(start, start + first, start + length))
        written = torch.cumsum((~mask).long(), 0)  # constant over a stretch of the assistant's tokens
        for_steps, ok = [], []
        for step in range(steps):
            row = positions - 1 - step
            ok.append(
                (row >= first)
                & (written[(row + 1).clamp(min=0)] == written[positions + 1])
                & mask[(row + 1).clamp(min=0)]
            )
            for_steps.append((row - first).clamp(min=0) + live)
        rows.append(torch.stack(for_steps))
        valids.append(torch.stack(ok))
        finals.append(sample.final[positions])
        argmaxes.append(sample.teacher_argmax[positions])
        start, live = start + length, live + length - first
    return Batch(
        token_ids=torch.cat([sample.token_ids for sample in samples]).long(),
        aux=torch.cat([sample.aux for sample in samples]).to(dtype),
        spans=spans,
        final=torch.cat(finals).to(dtype),
        argmax=torch.cat(argmaxes).long(),
        rows=torch.cat(rows, 1),
        valid=torch.cat(valids, 1),
    )


class Plan:
    """Which entries each process trains on at each optimiser step."""

    def __init__(self, entries: Sequence[Entry], tokens_per_batch: int, group: int, seed: int):
        """
        Args:
            entries: the training samples.
            tokens_per_batch: trained positions in a batch; a longer sample is a batch of its own.
            group: batches of one optimiser step: processes x gradient accumulation.
            seed: of the shuffles.

        Raises:
            UserError: there is nothing to train on.
        """
        self.entries = [entry for entry in entries if entry.trained > 1]
        if not self.entries:
            raise UserError(
                "The feature store holds no training sample with trained tokens. Add data and run prepare again."
            )
        self.tokens_per_batch, self.group, self.seed = tokens_per_batch, group, seed
        self.batches_per_epoch = len(self._epoch(0))

    def steps_of(self, epochs: float) -> int:
        return max(1, math.ceil(epochs * self.batches_per_epoch / self.group))

    @lru_cache(maxsize=2)  # noqa: B019 (one plan lives as long as the process)
    def _epoch(self, epoch: int) -> list[list[Entry]]:
        """The batches of an epoch; padded to the number of epoch 0 by starting over, or cut to it."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.entries), generator=generator).tolist()
        batches: list[list[Entry]] = [[]]
        filled = 0
        for index in order:
            entry = self.entries[index]
            if batches[-1] and filled + entry.trained > self.tokens_per_batch:
                batches.append([])
                filled = 0
            batches[-1].append(entry)
            filled += entry.trained
        if epoch and len(batches) != self.batches_per_epoch:
            batches = (batches * 2)[: self.batches_per_epoch]
        return batches

    def step(self, step: int) -> list[list[Entry]]:
        """The `group` batches of optimiser step `step` (from 0)."""
        numbers = range(step * self.group, (step + 1) * self.group)
        return [self._epoch(n // self.batches_per_epoch)[n % self.batches_per_epoch] for n in numbers]


def load_batch(store: FeatureStore, entries: Sequence[Entry], steps: int, dtype: torch.dtype) -> Batch:
    return collate([store.load(entry) for entry in entries], steps, dtype)
