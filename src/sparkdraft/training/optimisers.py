"""AdamW and Muon, and the learning rate of each step."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sparkdraft.config import TrainConfig

Optimiser = torch.optim.Optimizer


def build_optimisers(config: TrainConfig, module: nn.Module) -> list[Optimiser]:
    """AdamW for everything, or Muon (Jordan 2024; moments orthogonalised by Newton-Schulz) for the matrices inside the
    layers and AdamW for the rest (norms, lm_head), as its author recommends. Norm weights are never decayed."""
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    inner = [p for name, p in trained if config.optimizer == "muon" and p.dim() == 2 and "lm_head" not in name]
    taken = {id(p) for p in inner}
    groups = [
        {"params": [p for _, p in trained if id(p) not in taken and p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for _, p in trained if id(p) not in taken and p.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.learning_rate, betas=config.betas, fused=True
    )
    if not inner:
        return [adamw]
    return [adamw, Muon(inner, lr=config.learning_rate, weight_decay=config.weight_decay)]


class Muon(Optimiser):
    """Momentum, orthogonalised (Jordan 2024), and scaled to the size of AdamW's updates (Liu et al. 2025, arXiv 2502.16982,
    2.2) so that both take one learning rate. torch.optim.Muon is the same, but orthogonalises in BF16 wherever it
    runs, which on a CPU without BF16 units takes 30 times as long."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.0, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffer = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(buffer, group["momentum"]))  # Nesterov's look ahead
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


def orthogonalise(matrix: Tensor) -> Tensor:
    """About U V^T of a matrix U S V^T, by five quintic Newton-Schulz iterations (coefficients of Jordan 2024)."""
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)  # the spectral norm is at most 1 then
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """The rate of optimiser step `step` (from 0) of `steps`: linear warm-up, then

    cosine: from the full rate to `final_rate` of it along half a cosine (Loshchilov & Hutter 2017)
    wsd: constant, then linear to `final_rate` of it over the last `decay_fraction` (Hu et al. 2024, MiniCPM)
    """
    warmup = min(config.warmup_steps, steps // 2)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "cosine":
        done = (step - warmup) / max(1, steps - warmup)
        share = config.final_rate + (1 - config.final_rate) * 0.5 * (1 + math.cos(math.pi * done))
    else:
        start = steps - max(1, round(config.decay_fraction * steps))
        share = 1 - (1 - config.final_rate) * max(0.0, (step - start) / (steps - start))
    return config.learning_rate * share


def set_learning_rate(optimisers: list[Optimiser], rate: float) -> None:
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = rate


def pack_state(optimisers: list[Optimiser]) -> dict[str, Tensor]:
    """The optimisers' state as flat named tensors (numbers as 0-d tensors); groups are rebuilt from the config."""
    return {
        f"{number}.{index}.{key}": torch.as_tensor(value).detach().cpu().contiguous()
        for number, optimiser in enumerate(optimisers)
        for index, state in optimiser.state_dict()["state"].items()
        for key, value in state.items()
    }


def unpack_state(optimisers: list[Optimiser], tensors: dict[str, Tensor]) -> None:
    """Put back what `pack_state` made."""
    states: list[dict[int, dict[str, Any]]] = [{} for _ in optimisers]
    for name, tensor in tensors.items():
        number, index, key = name.split(".", 2)
        states[int(number)].setdefault(int(index), {})[key] = tensor
    for optimiser, state in zip(optimisers, states, strict=True):
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
