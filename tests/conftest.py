"""Shared parts of the tests: the real target, and a small run of it that is captured once."""

import json
import shutil
from pathlib import Path

import pytest

from sparkdraft.config import Config, TargetConfig, load_config
from sparkdraft.run import Run
from sparkdraft.target import Target

ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "Name three fruits.": "Three fruits are apples, bananas and oranges.",
    "Why is the sky blue?": "The sky is blue because air scatters blue light more than red light.",
    "Say hello.": "Hello! How can I help you today?",
    "What is 2 + 3?": "2 + 3 equals 5.",
    "Who wrote Hamlet?": "Hamlet was written by William Shakespeare around the year 1600.",
    "What do bees make?": "Bees make honey, which they store in their hives for the winter.",
    "Define gravity.": "Gravity is the force by which a planet draws objects toward its center.",
    "Name a primary colour.": "Red is a primary colour.",
    "What is ice?": "Ice is water that has frozen into a solid.",
    "Where do penguins live?": "Penguins live mostly in the Southern Hemisphere, many of them in Antarctica.",
    "What is a noun?": "A noun is a word that names a person, a place, a thing or an idea.",
}

SMALL = """
name: small
data:
  regenerate: false
  held_out: 0.25
features:
  dtype: float32
  tokens_per_shard: 200
draft:
  vocab_size: 100
  intermediate_size: 64
train:
  steps: 12
  warmup_steps: 2
  tokens_per_batch: 24
  evaluate_every: 5
  save_every: 3
  log_every: 1
"""


@pytest.fixture(scope="session")
def target() -> Target:
    """SmolLM2-135M-Instruct."""
    return Target.open(TargetConfig())


@pytest.fixture(scope="session")
def target_model(target):
    """The target's weights in float32, shared by the tests that only read them."""
    return target.load_model()


@pytest.fixture(scope="session")
def small_config(tmp_path_factory) -> Path:
    """The config file of a run of a dozen conversations whose answers are kept."""
    directory = tmp_path_factory.mktemp("small")
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in ANSWERS.items()
    ]
    source = directory / "conversations.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = directory / "small.yaml"
    file.write_text(SMALL.replace("data:\n", f"runs_dir: {directory}/runs\ndata:\n  sources: [{source}]\n"))
    return file


@pytest.fixture(scope="session")
def captured(small_config, target) -> Run:
    """That run, prepared and captured. Tests work on copies of it (`captured_copy`)."""
    from sparkdraft.data.samples import prepare
    from sparkdraft.features.capture import capture

    config = load_config(small_config)
    run = Run.open(config)
    prepare(config, run)
    capture(config, run)
    return run


@pytest.fixture
def captured_copy(captured, tmp_path):
    """A function that gives a fresh copy of the captured run, with overrides: (config, run)."""

    def make(*overrides: str, name: str = "small") -> tuple[Config, Run]:
        settings = [f"runs_dir={tmp_path}", f"name={name}", *overrides]
        config = load_config(captured.path / "config.yaml", settings)
        if not (tmp_path / name).exists():
            shutil.copytree(captured.path, tmp_path / name)
        return config, Run.open(config)

    return make
