"""Losses between the target's and the draft's next-token distributions over the draft vocabulary.

p is the target's distribution renormalised over the draft vocabulary (so tv and lk see the acceptance rate inside it),
q = softmax(z) the draft's. Each loss is a
function that turns logits into values and gradients:

    kl   KL(p || q) = sum_v p log(p / q)             EAGLE-3 (Li et al. 2025); gradient q - p
    ce   -log q(argmax of the target)                greedy decoding's hard labels; gradient q - onehot
    tv   1 - sum_v min(p, q)                         1 - acceptance rate of rejection sampling (Leviathan et al. 2023, 3.2)
    lk   -log sum_v min(p, q)                        LK loss (Samarin et al. 2026, arXiv 2602.23881): the gradient of tv,
                                                     divided by the acceptance rate so that it does not vanish early

`fused_linear_loss` joins lm_head and loss: logits exist only for a chunk of rows at a time, and their gradients are
taken at once, so memory has no term in vocabulary x tokens and nothing is computed twice.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_BYTES = 48 * 2**20
"""Size of one float32 chunk of logits; a handful of such chunks is alive at once."""


@dataclass(frozen=True)
class Truth:
    """The target's distributions of n positions, from which every step's loss of these positions is taken."""

    p: Tensor
    """float32 [n, V]"""
    entropy: Tensor
    """[n], of p, in nats"""
    label: Tensor
    """int64 [n]: draft id of the target's choice, -1 where the draft vocabulary lacks it"""

    @classmethod
    def of(cls, logits: Tensor, label: Tensor) -> "Truth":
        log_p = torch.log_softmax(logits, -1, dtype=torch.float32)
        p = log_p.exp()
        return cls(p, -torch.linalg.vecdot(p, log_p), label)


Loss = Callable[[Tensor, Truth], tuple[Tensor, Tensor]]
"""(logits z [n, V], truth) -> (value [n], gradient by z [n, V])."""


def kl(z: Tensor, truth: Truth) -> tuple[Tensor, Tensor]:
    log_q = torch.log_softmax(z, -1, dtype=torch.float32)
    value = -truth.entropy - torch.linalg.vecdot(truth.p, log_q)
    return value, log_q.exp_().sub_(truth.p)


def ce(z: Tensor, truth: Truth) -> tuple[Tensor, Tensor]:
    log_q = torch.log_softmax(z, -1, dtype=torch.float32)
    inside = truth.label >= 0  # the target's choice is in the draft vocabulary; else nothing can be learnt from it
    index = truth.label.clamp(min=0)[:, None]
    value = -log_q.gather(-1, index)[:, 0] * inside
    gradient = log_q.exp_()
    gradient.scatter_add_(-1, index, torch.full_like(index, -1, dtype=gradient.dtype))
    return value, gradient.mul_(inside[:, None])


def tv(z: Tensor, truth: Truth) -> tuple[Tensor, Tensor]:
    q = torch.softmax(z, -1, dtype=torch.float32)
    slope = -(q < truth.p).to(q.dtype)  # d value / d q
    value = 1 - torch.minimum(truth.p, q).sum(-1)
    return value, q.mul_(slope - torch.linalg.vecdot(q, slope)[:, None])


def lk(z: Tensor, truth: Truth) -> tuple[Tensor, Tensor]:
    distance, gradient = tv(z, truth)
    overlap = (1 - distance).clamp(min=1e-6)
    return -overlap.log(), gradient.div_(overlap[:, None])


LOSSES: dict[str, Loss] = {"kl": kl, "ce": ce, "tv": tv, "lk": lk}


@dataclass(frozen=True)
class Teacher:
    """What the target says at P positions, seen through the draft vocabulary of V tokens."""

    hidden: Tensor
    """[P, target_hidden_size], after the final norm."""
    weight: Tensor
    """[V, target_hidden_size], the target's lm_head rows of the draft vocabulary."""
    label: Tensor
    """int64 [P]: the target's argmax over ITS vocabulary as a draft id, or -1 where the draft vocabulary lacks it."""


class _FusedLinearLoss(torch.autograd.Function):
    """Value of the weighted sum, and its gradients by `student` and `weight`, chunk by chunk in the forward pass."""

    @staticmethod
    def forward(ctx, student, weight, teacher: Teacher, weights, loss: Loss, need: bool):
        steps, positions, _ = student.shape
        chunk = max(1, CHUNK_BYTES // (4 * len(weight)))
        grad_student = torch.empty_like(student if need else student[:0])
        grad_weight = torch.zeros(weight.shape if need else (0,), dtype=torch.float32, device=weight.device)
        values = student.new_empty((steps, positions), dtype=torch.float32)
        guesses = teacher.label.new_empty((steps, positions))
        matmul_dtype = _matmul_dtype(student)
        cast = weight.to(matmul_dtype)
        cast_teacher = teacher.weight.to(matmul_dtype)
        for start in range(0, positions, chunk):
            part = slice(start, start + chunk)
            truth = Truth.of(teacher.hidden[part].to(matmul_dtype) @ cast_teacher.T, teacher.label[part])
            for step in range(steps):
                x = student[step, part].to(matmul_dtype)
                z = x @ cast.T
                guesses[step, part] = z.argmax(-1)
                values[step, part], gradient = loss(z, truth)
                if need:
                    gradient = gradient.mul_(weights[step, part, None]).to(matmul_dtype)
                    grad_student[step, part] = (gradient @ cast).to(student.dtype)
                    if matmul_dtype == torch.float32:
                        grad_weight.addmm_(gradient.T, x)
                    else:
                        grad_weight += gradient.T @ x
        ctx.save_for_backward(grad_student, grad_weight)
        ctx.mark_non_differentiable(values, guesses)
        return (values * weights).sum(), values, guesses

    @staticmethod
    def backward(ctx, grad, _values, _guesses):
        grad_student, grad_weight = ctx.saved_tensors
        return grad_student * grad, grad_weight * grad, None, None, None, None


def _matmul_dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


def fused_linear_loss(
    student: Tensor, weight: Tensor, teacher: Teacher, weights: Tensor, loss: str
) -> tuple[Tensor, Tensor, Tensor]:
    """lm_head and loss over all draft steps at once; the teacher's part of a chunk is computed once for all steps.

    Args:
        student: [S, P, H]: what the lm_head reads at step s for the target position P.
        weight: [V, H], the draft's lm_head.
        teacher: the target at the P positions.
        weights: float32 [S, P], the weight of each term (0 leaves it out).
        loss: a key of `LOSSES`.

    Returns:
        scalar sum of weights * values; values [S, P] (detached); the draft's argmax as draft ids, int64 [S, P].
    """
    return _FusedLinearLoss.apply(student, weight, teacher, weights, LOSSES[loss], torch.is_grad_enabled())
