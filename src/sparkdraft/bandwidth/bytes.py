"""Bytes that decoding reads, counted from the safetensors headers, and tokens per weight read.

Decoding one token reads every weight once, but for the embedding table (one row) and the experts that are not active;
a tied output projection is read whole. This is the part that a report needs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from sparkdraft.target import Target

_DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2}  # others: one byte


@dataclass(frozen=True)
class Bytes:
    """Bytes read."""

    plain_token: int
    """By the target, for one token without a draft."""
    verify: int
    """For the k + 1 tokens of a block: by the target, and by the fusion of its states, which a block reads once."""
    verify_estimated: bool
    """Whether `verify` rests on an assumption (a mixture of experts: distinct experts of independent uniform choices)."""
    draft_step: int
    """By the draft, for one step."""

    def tokens_per_weight_read(self, acceptance_length: float, k: int) -> float:
        """acceptance length / ((verify + k * draft step) / plain token): above 1, the draft pays for its own bytes."""
        return acceptance_length * self.plain_token / (self.verify + k * self.draft_step)


def count_bytes(target: Target, draft: Path, k: int) -> Bytes:
    """Count a target and an EAGLE-3 draft directory.

    Args:
        target: dense, or a mixture of experts whose config says how many are active.
        draft: a draft directory.
        k: speculative tokens.
    """
    sizes = dict(_sizes(target.path))
    tied = not any("lm_head" in name for name in sizes)
    read = {name: size for name, size in sizes.items() if _read_when_decoding(name, tied)}
    total = sum(read.values())
    experts = sum(size for name, size in read.items() if ".experts." in name)
    count = getattr(target.config, "num_experts", None) or getattr(target.config, "num_local_experts", None) or 1
    active = getattr(target.config, "num_experts_per_tok", None) or count
    share = active / count
    union = 1 - (1 - share) ** (k + 1)  # expected share of experts that k+1 independent uniform choices touch
    plain = total - experts + round(experts * share)
    verify = total - experts + round(experts * union) if experts else plain
    step = once = 0
    for name, size in _sizes(draft):
        if name.startswith(("fc", "input_norm")):
            once += size
        elif name not in ("d2t", "t2d", "embed_tokens.weight"):
            step += size
    return Bytes(plain, verify + once, bool(experts), step)


def _read_when_decoding(name: str, tied: bool) -> bool:
    """Not the vision tower, not the MTP head, and the embedding table only where it is the output projection too."""
    if name.startswith(("visual", "model.visual", "mtp", "vision", "model.vision")):
        return False
    return "embed_tokens" not in name or tied


def _sizes(directory: Path) -> Iterator[tuple[str, int]]:
    """Name and bytes of every tensor, from the headers; `consolidated*.safetensors` are second copies of a checkpoint."""
    for file in sorted(directory.glob("*.safetensors")):
        if file.name.startswith("consolidated"):
            continue
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                part = tensors.get_slice(name)
                yield name, math.prod(part.get_shape()) * _DTYPE_BYTES.get(part.get_dtype(), 1)
