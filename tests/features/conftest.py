"""Runs whose samples are prepared from written conversations, so that nothing is generated."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sparkdraft.config import Config
from sparkdraft.data.samples import prepare
from sparkdraft.run import Run

WORDS = (
    "the",
    "river",
    "draft",
    "reads",
    "weights",
    "once",
    "and",
    "then",
    "guesses",
    "tokens",
    "while",
    "memory",
    "waits",
)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    """A run directory after `prepare`: 14 conversations of about 60 to 250 tokens, some of two turns."""
    directory = tmp_path_factory.mktemp("prepared")
    source, rng = directory / "conversations.jsonl", random.Random(7)
    with source.open("w") as file:
        for number in range(14):
            messages = []
            for _ in range(rng.choice([1, 1, 2])):
                messages.append(
                    {"role": "user", "content": f"{number}? " + " ".join(rng.choices(WORDS, k=rng.randint(5, 30)))}
                )
                messages.append(
                    {"role": "assistant", "content": " ".join(rng.choices(WORDS, k=rng.randint(5, 90))) + "."}
                )
            file.write(json.dumps({"messages": messages}) + "\n")
    config = _config(directory, {}).model_copy(update={"data": _data(source)})
    prepare(config, Run.open(config))
    return directory / "small"


def _data(source: Path):
    return Config.model_validate(
        {"name": "a", "data": {"sources": [str(source)], "regenerate": False, "held_out": 0.2}}
    ).data


def _config(runs: Path, groups: dict) -> Config:
    return Config.model_validate({"name": "small", "runs_dir": str(runs)} | groups)


@pytest.fixture(scope="session")
def hybrid_target(tmp_path_factory, target) -> Path:
    """A small random Qwen3.5: gated DeltaNet layers and full attention, whose states must not see right padding."""
    path = tmp_path_factory.mktemp("hybrid")
    config = AutoConfig.for_model(
        "qwen3_5_text", vocab_size=target.vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    target.tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def open_run(prepared, hybrid_target, tmp_path) -> Callable[..., Run]:
    """Open a copy of the prepared run, in `runs` (None: one directory a test); the small target unless one is given."""

    def start(runs: Path | None = None, target: dict | None = None, **features) -> Run:
        runs = runs or tmp_path / "runs"
        target = {"model": str(hybrid_target)} if target is None else target
        if not (runs / "small").exists():
            shutil.copytree(prepared, runs / "small")
        return Run.open(_config(runs, {"features": features, "target": target}))

    return start
