"""The draft vocabulary: the tokens that the target itself writes most often."""

from collections.abc import Iterable

import torch
from torch import Tensor


def count_tokens(samples: Iterable[tuple[Tensor, Tensor]], vocab_size: int) -> Tensor:
    """How often each token is written by the assistant.

    Args:
        samples: pairs of token ids [T] and loss mask [T] (bool).

    Returns:
        int64 [vocab_size].
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for token_ids, loss_mask in samples:
        counts += torch.bincount(token_ids[loss_mask].long(), minlength=vocab_size)
    return counts


def choose_vocabulary(counts: Tensor, size: int | None) -> Tensor:
    """The `size` most frequent tokens (ties: the lower id), sorted by id; all tokens where `size` is None.

    Tokens that never occur are not taken, so fewer than `size` may come back: a row that is never trained would only
    be read.

    Returns:
        int64 [at most size].
    """
    if size is None or size >= len(counts):
        return torch.arange(len(counts))
    order = torch.argsort(counts, descending=True, stable=True)[:size]
    return order[counts[order] > 0].sort().values


def coverage(counts: Tensor, target_ids: Tensor) -> float:
    """Share of the written tokens that the draft vocabulary can propose."""
    return (counts[target_ids].sum() / counts.sum().clamp(min=1)).item()
