"""Each loss against its formula written out and differentiated by autograd."""

import pytest
import torch

from sparkdraft.training import losses
from sparkdraft.training.losses import Teacher, Truth, fused_linear_loss


def formula(kind: str, z: torch.Tensor, p: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    q = z.softmax(-1)
    if kind == "kl":
        return (p * (p / q).log()).sum(-1)
    if kind == "ce":
        return torch.where(label >= 0, -q.log().gather(-1, label.clamp(min=0)[:, None])[:, 0], 0.0)
    overlap = torch.minimum(p, q).sum(-1)
    return 1 - overlap if kind == "tv" else -overlap.log()


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    teacher = Teacher(make(7, 6), make(11, 6), torch.tensor([0, 3, -1, 10, 5, -1, 2]))
    weights = make(3, 7).abs()
    weights[1, 2] = 0
    return make(3, 7, 5), make(11, 5), teacher, weights


@pytest.mark.parametrize("kind", ["kl", "ce", "tv", "lk"])
@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_fused_loss_equals_the_formula(problem, kind, chunk_rows, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * 11 * chunk_rows)
    student, weight, teacher, weights = problem
    student.requires_grad_()
    weight.requires_grad_()
    total, values, guesses = fused_linear_loss(student, weight, teacher, weights, kind)
    (2 * total).backward()
    ours = student.grad.clone(), weight.grad.clone()
    student.grad = weight.grad = None
    logits = student @ weight.T
    p = (teacher.hidden @ teacher.weight.T).softmax(-1)
    expected = torch.stack([formula(kind, z, p, teacher.label) for z in logits])
    (2 * (expected * weights).sum()).backward()
    assert torch.allclose(values, expected, atol=1e-5)
    assert torch.allclose(total, (expected * weights).sum(), atol=1e-5)
    assert torch.equal(guesses, logits.argmax(-1))
    assert torch.allclose(ours[0], student.grad, atol=1e-5)
    assert torch.allclose(ours[1], weight.grad, atol=1e-5)


def test_losses_are_zero_for_the_teacher_itself_and_never_negative():
    generator = torch.Generator().manual_seed(1)
    z, other = 3 * torch.randn(2, 40, 9, generator=generator)
    truth = Truth.of(z, z.argmax(-1))
    for kind in ("kl", "tv", "lk"):
        assert losses.LOSSES[kind](z, truth)[0].abs().max() < 1e-5
        assert losses.LOSSES[kind](other, truth)[0].min() > 0


def test_a_point_mass_turns_lk_into_cross_entropy():
    z, label = torch.randn(5, 8), torch.tensor([1, 2, 3, 0, 7])
    truth = Truth.of(torch.where(torch.nn.functional.one_hot(label, 8) == 1, 0.0, -1e4), label)
    for a, b in zip(losses.lk(z, truth), losses.ce(z, truth), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_no_gradient_is_kept_without_need(problem):
    student, weight, teacher, weights = problem
    weight.requires_grad_()
    with torch.no_grad():
        total, _, _ = fused_linear_loss(student, weight, teacher, weights, "kl")
    assert not total.requires_grad
