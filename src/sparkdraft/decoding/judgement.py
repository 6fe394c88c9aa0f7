"""What an engine found out: answers with their counts, and speeds."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from sparkdraft.drafts.counts import Counts

TIMED = 8
"""Questions whose decoding is timed, one at a time, with and without the draft: `spread(questions, TIMED)`."""

Item = TypeVar("Item")


def spread(items: Sequence[Item], limit: int | None) -> list[Item]:
    """At most `limit` of them, evenly spaced."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[index * len(items) // limit] for index in range(limit)]


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
