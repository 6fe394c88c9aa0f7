"""Counts of drafting, as vLLM defines them; sums come before any ratio."""

from collections.abc import Iterable
from dataclasses import dataclass, field


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
