"""What the CPU defaults rest on: the time of an optimiser step of the default run in float32 with AdamW, beside BF16,
Muon and `torch.compile`, in alternating rounds.

    python bench/cpu_defaults.py [--rounds 5]

Each case takes the same synthetic batch (512 tokens, draft vocabulary 8,192, 3 TTT steps); the figures are medians.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from memory import set_up
from sparkdraft.config import TrainConfig
from sparkdraft.training.optimisers import build_optimisers

TOKENS, VOCABULARY = 512, 8192
CASES = {"float32, AdamW": {}, "BF16": {"bf16": True}, "Muon": {"optimizer": "muon"}, "compile": {"compiled": True}}


def stepper(optimizer: str = "adamw", bf16: bool = False, compiled: bool = False) -> Callable[[], None]:
    """A function that does one optimiser step."""
    objective, make_batch = set_up(VOCABULARY)
    if compiled:
        objective.draft.compile()
    optimisers = build_optimisers(TrainConfig.model_validate({"optimizer": optimizer}), objective)
    batch = make_batch(TOKENS)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = objective(batch, float(TOKENS))[0]
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    steps = {name: stepper(**options) for name, options in CASES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # compilers, caches and workspaces warm up
        step()
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    first = statistics.median(next(iter(seconds.values())))
    for name, values in seconds.items():
        print(f"{name:16} {statistics.median(values):6.2f} s a step, {statistics.median(values) / first:5.2f} times")


if __name__ == "__main__":
    main()
