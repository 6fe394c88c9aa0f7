"""Counts of drafting, as vLLM defines them; sums come before any ratio."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

TIMED = 8
"""Questions whose decoding is timed, one at a time, with and without the draft: `spread(questions, TIMED)`."""

Item = TypeVar("Item")


def spread(items: Sequence[Item], limit: int | None) -> list[Item]:
    """At most `limit` of them, evenly spaced."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[index * len(items) // limit] for index in range(limit)]


@dataclass
class Counts:
    """What decoding some prompts gave."""

    k: int
    prompts: int = 0
    drafts: int = 0
    """Blocks of k tokens that the target verified."""
    accepted_per_position: list[int] = field(default_factory=list)
    """Drafts whose first i tokens were all accepted, i = 1 to k."""
    emitted: int = 0
    """Tokens in the answers."""

    def __post_init__(self) -> None:
        self.accepted_per_position = self.accepted_per_position or [0] * self.k

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens emitted a target pass, bonus token included: 1 + accepted / drafts; 1 to k + 1."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        return [count / self.drafts if self.drafts else 0.0 for count in self.accepted_per_position]

    def observe(self, accepted: int) -> None:
        """Count one verified block."""
        self.drafts += 1
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    @classmethod
    def total(cls, k: int, parts: Iterable["Counts"]) -> "Counts":
        whole = cls(k)
        for part in parts:
            whole.prompts += part.prompts
            whole.drafts += part.drafts
            whole.emitted += part.emitted
            whole.accepted_per_position = [
                a + b for a, b in zip(whole.accepted_per_position, part.accepted_per_position, strict=True)
            ]
        return whole


@dataclass
class Answer:
    """One question's answer and its counts."""

    id: str
    kind: str
    token_ids: list[int]
    counts: Counts


@dataclass
class Speed:
    """Single-stream decoding of a few questions: what a person at a Spark feels."""

    tokens: int
    seconds: float

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens += tokens
        self.seconds += seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Judgement:
    """Everything that an engine found out; written to counts.json, from which reports are made."""

    engine: str
    k: int
    dtype: str
    max_new_tokens: int
    answers: list[Answer]
    speed: Speed
    baseline: Speed | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "Judgement":
        answers = [Answer(**{**row, "counts": Counts(**row["counts"])}) for row in raw["answers"]]
        speeds = {name: Speed(**raw[name]) if raw[name] else None for name in ("speed", "baseline")}
        return cls(**{**raw, "answers": answers, **speeds})

    def by_kind(self) -> dict[str, Counts]:
        """Counts of each kind of prompt, in the order of their first appearance."""
        kinds = dict.fromkeys(answer.kind for answer in self.answers)
        return {kind: Counts.total(self.k, (a.counts for a in self.answers if a.kind == kind)) for kind in kinds}

    def timed(self) -> Counts:
        """Counts of the questions whose decoding was timed."""
        return Counts.total(self.k, (answer.counts for answer in spread(self.answers, TIMED)))

    def overall(self) -> Counts:
        return Counts.total(self.k, (answer.counts for answer in self.answers))
