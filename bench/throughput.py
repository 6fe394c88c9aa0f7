"""Training throughput and acceptance beside speculators 0.9.0, on one CPU machine, in alternating rounds.

    python bench/throughput.py prepare          # both trainers' inputs, and a virtual environment for speculators
    python bench/throughput.py run --rounds 3   # alternate; prints and writes bench/out/throughput.json

Both train the same draft (one Llama layer, draft vocabulary 8,192, 3 TTT steps) of the default target on the same
captured samples in float32 with AdamW, speculators with sdpa attention and eager losses, and a sequence budget of 1,024
tokens a step. speculators pads every step to 1,024 tokens and counts them; its figure here is that count over the time
between its logged steps, so padding is in its favour. Ours counts real tokens. After each round both drafts are judged
by the same code: greedy decoding on paper over held-out samples.

speculators is driven from outside: no file of it is edited. Its trainer calls accelerator functions that a CPU lacks,
and `--max-steps` does not stop it, so the driver replaces the former and this script ends the process.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from sparkdraft.config import Config, load_config
from sparkdraft.data.samples import prepare
from sparkdraft.drafts.counts import Counts
from sparkdraft.drafts.eagle3 import Eagle3Config, Eagle3Draft
from sparkdraft.features.capture import capture
from sparkdraft.features.store import FeatureStore
from sparkdraft.files import write_json
from sparkdraft.run import Run
from sparkdraft.target import Target
from sparkdraft.training.batches import load_batch
from sparkdraft.training.objective import Objective, walk

OUT = Path("bench/out")
DRIVER = Path(__file__).with_name("speculators_driver.py")
BUDGET, VOCABULARY, STEPS, LAYERS = 1024, 8192, 3, [2, 15, 27]
PACKAGES = (
    "datasets<=5.1.0", "httpx", "aiohttp", "click", "huggingface-hub", "loguru<=0.7.3", "openai>=2", "protobuf", "psutil",
    "pydantic-settings>=2", "rich", "safetensors", "tqdm<=4.70.1", "transformers<=5.19.0", "typer>=0.12",
)  # fmt: skip


def base_config(name: str, *overrides: str) -> Config:
    settings = [
        f"runs_dir={OUT}",
        f"name={name}",
        "data.sources=[{name: builtin, limit: 300}]",
        "features.dtype=float32",
    ]
    return load_config(Path("configs/smollm2-135m-eagle3.yaml"), [*settings, *overrides])


def prepare_all() -> None:
    """Capture 300 samples once, with the state before the final norm beside the usual ones (speculators wants it)."""
    config = base_config("both", f"features.aux_layers={[*LAYERS, 30]}")
    run = Run.open(config)
    prepare(config, run)
    capture(config, run)
    store = FeatureStore.open(run.features)
    write_for_speculators(store, Target.open(config.target).vocab_size)
    ours = base_config("ours")
    run = Run.open(ours)
    prepare(ours, run)
    capture(ours, run)
    environment = OUT / "venv"
    if not (environment / "bin" / "speculators").exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        pip = [environment / "bin" / "pip", "install", "-q"]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, *PACKAGES], check=True)
        subprocess.run([*pip, "--no-deps", "speculators==0.9.0", "hs-connectors==0.9.0"], check=True)


def write_for_speculators(store: FeatureStore, vocab_size: int) -> None:
    """A `datasets` directory and one file of hidden states a row, in the order of its rows; the frequencies of tokens."""
    import datasets
    from safetensors.torch import save_file

    states = OUT / "speculators" / "hidden_states"
    shutil.rmtree(states.parent, ignore_errors=True)
    states.mkdir(parents=True)
    rows, frequencies = [], torch.zeros(vocab_size, dtype=torch.int64)
    for number, entry in enumerate(e for e in store.entries if e.split == "train" and e.length <= BUDGET):
        sample = store.load(entry)
        hidden = sample.aux.reshape(entry.length, len(store.aux_layers), -1)
        save_file(
            {"token_ids": sample.token_ids, "hidden_states": hidden.contiguous()}, states / f"hs_{number}.safetensors"
        )
        mask = sample.loss_mask.long()
        rows.append({"input_ids": sample.token_ids.tolist(), "loss_mask": mask.tolist(), "seq_len": entry.length})
        frequencies += torch.bincount(sample.token_ids[sample.loss_mask], minlength=len(frequencies))
    data = OUT / "speculators" / "data"
    datasets.Dataset.from_list(rows).with_format("torch").save_to_disk(data)
    torch.save({token: int(count) for token, count in enumerate(frequencies) if count}, data / "token_freq.pt")


def run_speculators(round_: int, steps: int) -> tuple[float, float, Path]:
    """Train until `steps` are logged and its epoch is saved: tokens/s, peak GiB, checkpoint directory."""
    save = OUT / "speculators" / f"out-{round_}"
    shutil.rmtree(save, ignore_errors=True)
    target = Target.open(base_config("ours").target)
    command = [
        OUT / "venv" / "bin" / "python", DRIVER, "--verifier-name-or-path", target.path, "--speculator-type", "eagle3",
        "--data-path", OUT / "speculators" / "data", "--hidden-states-path", OUT / "speculators" / "hidden_states",
        "--on-missing", "raise", "--save-path", save, "--draft-vocab-size", VOCABULARY, "--num-layers", 1,
        "--ttt-steps", STEPS, "--draft-attn-impl", "sdpa", "--loss-implementation", "eager",
        "--hidden-states-dtype", "float32", "--target-layer-ids", *LAYERS, "--total-seq-len", BUDGET,
        "--num-workers", 0, "--train-data-ratio", 0.99, "--epochs", 50, "--log-freq", 1, "--optimizer", "adamw",
        "--lr", "1e-3", "--scheduler-type", "cosine", "--scheduler-warmup-ratio", 0.1,
    ]  # fmt: skip
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    peak = Peak(process.pid)
    times = []
    assert process.stdout
    for line in process.stdout:
        if line.startswith("{") and "train" in (entry := json.loads(line)):
            times.append(entry["t"])
        if len(times) >= steps and list(save.glob("*/model.safetensors")):
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    times = times[3:steps]
    saved = [path.parent for path in save.glob("*/model.safetensors") if path.parent.name.isdigit()]
    checkpoints = sorted(saved, key=lambda path: int(path.name))
    return BUDGET * (len(times) - 1) / (times[-1] - times[0]), peak.stop(), checkpoints[-1]


def run_ours(round_: int, steps: int) -> tuple[float, float, Path]:
    """Train the same number of steps of about the same number of tokens: tokens/s, peak GiB, checkpoint directory."""
    store = FeatureStore.open(OUT / "ours" / "features")
    train = [entry for entry in store.entries if entry.split == "train"]
    trained = round(BUDGET * sum(e.trained for e in train) / sum(e.length for e in train))
    overrides = [
        f"train.steps={steps}",
        f"train.tokens_per_batch={trained}",
        "train.log_every=1",
        f"train.seed={round_}",
    ]
    config = base_config("ours", *overrides, "train.evaluate_every=100000", "train.save_every=100000")
    run = Run.open(config)
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    manifest = run.manifest
    manifest["stages"].pop("train", None)
    write_json(run.path / "manifest.json", manifest)
    command = [sys.executable, "-m", "sparkdraft.cli", "train", "--config", run.path / "config.yaml"]
    process = subprocess.Popen([str(part) for part in command], stderr=subprocess.DEVNULL)
    peak = Peak(process.pid)
    process.wait()
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    rates = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line][3:]
    return statistics.harmonic_mean(rates), peak.stop(), run.checkpoints / f"step-{steps}"


class Peak:
    """The highest resident memory of a process, sampled."""

    def __init__(self, pid: int):
        self.pid, self.highest, self.done = pid, 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while not self.done.wait(0.05):
            try:
                pages = Path(f"/proc/{self.pid}/statm").read_text().split()
            except OSError:
                return
            # anonymous memory: mapped feature files are the page cache's
            self.highest = max(self.highest, (int(pages[1]) - int(pages[2])) * 4096)

    def stop(self) -> float:
        self.done.set()
        self.thread.join()
        return self.highest / 2**30


def load_theirs(checkpoint: Path, target: Target) -> Eagle3Draft:
    """A speculators checkpoint as our draft."""
    from safetensors.torch import load_file

    raw = json.loads((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    config = Eagle3Config.of(base_config("ours").draft, target, LAYERS, len(tensors["d2t"]))
    layer = raw["transformer_layer_config"]
    config = config.model_copy(
        update={
            "norm_before_residual": raw["norm_before_residual"],
            "intermediate_size": layer["intermediate_size"],
            "num_attention_heads": layer["num_attention_heads"],
            "num_key_value_heads": layer["num_key_value_heads"],
        }
    )
    draft = Eagle3Draft(config)
    draft.load_state_dict({name: value for name, value in tensors.items() if name in draft.state_dict()})
    return draft


@torch.no_grad()
def acceptance_length(draft: Eagle3Draft, store: FeatureStore, target: Target) -> float:
    """Greedy decoding on paper over the held-out samples, k = 3."""
    draft.set_embeddings(target.rows("embed").float())
    config = base_config("ours")
    objective = Objective(draft, target.rows("lm_head", draft.target_ids).float(), config.ttt, "kl").eval()
    parts = []
    for entry in store.entries:
        if entry.split == "held_out":
            batch = load_batch(store, [entry], STEPS, torch.float32)
            parts.append(walk(batch, objective(batch, 1.0)[1]))
    return Counts.total(STEPS, parts).acceptance_length


def compare(rounds: int, steps: int) -> None:
    store = FeatureStore.open(OUT / "ours" / "features")
    target = Target.open(base_config("ours").target)
    results: list[dict[str, Any]] = []
    for round_ in range(rounds):
        for name, run, load in (
            ("speculators", run_speculators, lambda path: load_theirs(path, target)),
            ("sparkdraft", run_ours, Eagle3Draft.load),
        ):
            start = time.time()
            rate, memory, checkpoint = run(round_, steps)
            length = acceptance_length(load(checkpoint), store, target)
            results.append(
                {
                    "round": round_,
                    "trainer": name,
                    "tokens_per_second": rate,
                    "peak_gib": memory,
                    "acceptance_length": length,
                }
            )
            print(f"round {round_} {name:12} {rate:7.0f} tok/s  peak {memory:5.2f} GiB  acceptance length {length:.3f}  "
                  f"({time.time() - start:.0f} s)", flush=True)  # fmt: skip
    medians = {
        name: statistics.median(r["tokens_per_second"] for r in results if r["trainer"] == name)
        for name in ("speculators", "sparkdraft")
    }
    print(f"median: {medians}, ratio {medians['sparkdraft'] / medians['speculators']:.2f}")
    (OUT / "throughput.json").write_text(json.dumps(results, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["prepare", "run"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    if arguments.action == "prepare":
        prepare_all()
    else:
        compare(arguments.rounds, arguments.steps)


if __name__ == "__main__":
    main()
