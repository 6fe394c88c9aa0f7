"""Peak memory of one training step (3 TTT steps, forward and backward) over sequence length and draft vocabulary.

    python bench/memory.py [--out bench/out/memory.json]

Each case runs in a process of its own on one synthetic sample of the default target's shape, whose tokens are all
trained; the figure is the peak resident set during the step minus what was resident before it. A straight line through
the origin means that nothing in the step is quadratic in length; equal slopes for different vocabularies mean that no
term is vocabulary x tokens.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sparkdraft.config import DraftConfig, TargetConfig, TTTConfig
from sparkdraft.drafts.eagle3 import Eagle3Config, Eagle3Draft
from sparkdraft.features.store import Features
from sparkdraft.target import Target
from sparkdraft.training.batches import Batch, collate
from sparkdraft.training.objective import Objective

LENGTHS, VOCABULARIES = (512, 1024, 2048, 4096, 8192), (4096, 16384)


def resident() -> int:
    """Bytes resident now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def set_up(vocabulary: int) -> tuple[Objective, Callable[[int], Batch]]:
    """The objective of a fresh draft of the default target, and what makes a batch of one random sample."""
    target = Target.open(TargetConfig())
    hidden = target.hidden_size
    draft = Eagle3Draft(Eagle3Config.of(DraftConfig(), target, [2, 15, 27], vocabulary))
    draft.set_vocabulary(torch.arange(vocabulary))
    draft.initialise(None, torch.Generator().manual_seed(0))
    draft.set_embeddings(target.rows("embed").float())

    def batch(tokens: int) -> Batch:
        ids, mask = torch.randint(0, vocabulary, (tokens,)), torch.ones(tokens, dtype=torch.bool)
        sample = Features(ids, mask, torch.randn(tokens, 3 * hidden), torch.randn(tokens, hidden), ids)
        return collate([sample], 3, torch.float32)

    return Objective(draft, torch.randn(vocabulary, hidden), TTTConfig(steps=3), "kl"), batch


def measure(length: int, vocabulary: int) -> dict[str, float]:
    """Peak resident bytes that one step adds."""
    objective, make_batch = set_up(vocabulary)

    def step(tokens: int) -> float:
        batch = make_batch(tokens)
        start = time.perf_counter()
        objective(batch, float(tokens))[0].backward()
        return time.perf_counter() - start

    step(64)  # gradients, threads and workspaces exist from here on
    before, peak, done = resident(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    seconds = step(length)
    done.set()
    watcher.join()
    return {"length": length, "vocabulary": vocabulary, "mib": (peak[0] - before) / 2**20, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/out/memory.json"))
    parser.add_argument("--case", type=int, nargs=2, metavar=("LENGTH", "VOCABULARY"), help="run this case alone")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(*arguments.case)))
        return
    results = []
    for vocabulary in VOCABULARIES:
        for length in LENGTHS:
            command = [sys.executable, __file__, "--case", str(length), str(vocabulary)]
            line = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
            results.append(json.loads(line))
            one = results[-1]
            per_token = one["mib"] / length * 1024
            print(
                f"vocabulary {vocabulary:>6}, length {length:>5}: {one['mib']:7.0f} MiB, {per_token:5.0f} KiB a token"
            )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
