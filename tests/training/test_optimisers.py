"""Muon against torch's own, which orthogonalises in BF16."""

import pytest
import torch

from sparkdraft.training.optimisers import Muon, orthogonalise


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_muon_steps_as_torchs_does(shape):
    generator = torch.Generator().manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(shape, generator=generator))
    theirs = torch.nn.Parameter(ours.detach().clone())
    start = ours.detach().clone()
    optimisers = [
        Muon([ours], lr=0.01, weight_decay=0.1),
        torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ]
    for _ in range(5):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        for optimiser in optimisers:
            optimiser.step()
    moved = (ours - start).norm()
    assert moved > 0.05
    assert (ours - theirs).norm() < 0.03 * moved


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_an_orthogonalised_matrix_has_singular_values_about_one(shape):
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape, generator=torch.Generator().manual_seed(0))))
    assert 0.6 < values.min() <= values.max() < 1.3
