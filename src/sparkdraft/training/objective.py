"""The training objective: unroll the draft over a batch, compare every step with the target."""

import torch
from torch import Tensor, nn

from sparkdraft.config import TTTConfig
from sparkdraft.drafts.counts import Counts
from sparkdraft.drafts.eagle3 import Eagle3Draft
from sparkdraft.drafts.ttt import UnrolledAttention, unroll
from sparkdraft.training.batches import Batch
from sparkdraft.training.losses import Teacher, fused_linear_loss


class Objective(nn.Module):
    """Draft plus loss as one module, so that a distributed wrapper sees a single forward pass."""

    draft_ids: Tensor
    teacher_weight: Tensor

    def __init__(self, draft: Eagle3Draft, teacher_rows: Tensor, ttt: TTTConfig, loss: str):
        """
        Args:
            draft: with its vocabulary and embeddings set.
            teacher_rows: [draft_vocab_size, target_hidden_size], the target's lm_head rows of the draft vocabulary.
            ttt: number of steps and their weights.
            loss: a key of `losses.LOSSES`.
        """
        super().__init__()
        self.draft, self.loss, self.weights = draft, loss, ttt.weights
        draft_ids = torch.full((draft.config.vocab_size,), -1, dtype=torch.int64)
        draft_ids[draft.target_ids.cpu()] = torch.arange(draft.config.draft_vocab_size)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.register_buffer("teacher_weight", teacher_rows, persistent=False)

    def forward(self, batch: Batch, normaliser: float) -> tuple[Tensor, Tensor]:
        """Unroll as many steps as the batch has rows for; steps beyond the trained ones weigh nothing.

        Args:
            batch: S draft steps, P positions.
            normaliser: number of trained positions that the optimiser step averages over, in all processes.

        Returns:
            loss: scalar, the sum of step weight * value over all valid terms / (sum of step weights * normaliser);
            hits bool [S, P]: the draft's choice is the target's. A target token outside the draft vocabulary is a miss.
        """
        steps = len(batch.rows)
        normed = unroll(self.draft, batch.token_ids, batch.aux, batch.spans, UnrolledAttention(batch.spans), steps)
        student = torch.stack([normed[step, batch.rows[step]] for step in range(steps)])
        teacher = Teacher(batch.final, self.teacher_weight, self.draft_ids[batch.argmax.clamp(min=0)])
        weights = torch.tensor((self.weights + [0.0] * steps)[:steps], device=student.device)
        weights = batch.valid * (weights / (sum(self.weights) * normaliser))[:, None]
        loss, _, guesses = fused_linear_loss(student, self.draft.lm_head.weight, teacher, weights, self.loss)
        hits = (guesses == teacher.label) & batch.valid
        return loss, hits


def walk(batch: Batch, hits: Tensor) -> Counts:
    """Decode the samples on paper: draft k = S tokens at a row, keep those before the first miss, go on after the token
    that the target adds. On samples that are the target's own greedy answers these are the counts that greedy
    speculative decoding has on them.

    Args:
        batch: with the rows of each position.
        hits: bool [S, P].
    """
    k, positions = hits.shape
    hits, first_rows = hits.cpu(), batch.rows[0].cpu()
    alive, run = torch.ones(positions, dtype=torch.bool), torch.zeros(positions, dtype=torch.int64)
    for step in range(k):  # the row that has position index j at step 0 has index j + s at step s
        left = max(0, positions - step)
        alive[:left] &= hits[step, step:]
        alive[left:] = False
        run += alive
    opens = torch.ones(positions + 1, dtype=torch.bool)  # positions that begin a stretch of the assistant's tokens
    opens[1:positions] = first_rows[1:] != first_rows[:-1] + 1
    counts, accepted, index = Counts(k), run.tolist(), 0
    while index < positions:
        counts.observe(accepted[index])
        following = index + accepted[index] + 1
        index = next((i for i in range(index + 1, following) if i >= positions or opens[i]), following)
    return counts
