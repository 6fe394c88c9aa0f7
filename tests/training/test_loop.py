"""The training stage: it learns, it resumes bit by bit, it stops well, and several processes are one."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sparkdraft.errors import UserError
from sparkdraft.training.checkpoints import checkpoints
from sparkdraft.training.loop import train

TRAIN = [sys.executable, "-m", "sparkdraft.cli", "train"]


def command(run, *overrides: str) -> list[str]:
    return [*TRAIN, "--config", str(run.path / "config.yaml"), *overrides]


def final_state(run) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint: weights, optimiser, RNG."""
    last = checkpoints(run.checkpoints)[-1]
    return {
        f"{file.name}:{name}": value
        for file in sorted(last.path.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def metrics(run) -> list[dict]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def losses(run) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in metrics(run) if "loss" in line]


@pytest.fixture
def undisturbed(captured_copy):
    config, run = captured_copy(name="undisturbed")
    train(config, run)
    return run


def test_training_lowers_the_loss_and_reports_held_out_acceptance(captured_copy):
    config, run = captured_copy("train.steps=60", "train.evaluate_every=20")
    train(config, run)
    values = [loss for _, loss in losses(run)]
    assert sum(values[-5:]) < 0.5 * sum(values[:5])
    held_out = [line for line in metrics(run) if "held_out_acceptance_length" in line]
    assert [line["step"] for line in held_out] == [20, 40, 60]
    best = run.stage_record("train")["best"]
    assert best["acceptance_length"] == max(line["held_out_acceptance_length"] for line in held_out)
    assert (run.checkpoints / f"step-{best['step']}").is_dir()
    rates = best["acceptance_rate_per_position"]
    assert rates == sorted(rates, reverse=True)
    assert best["acceptance_length"] == pytest.approx(1 + sum(rates))


@pytest.mark.parametrize("changes", [["train.optimizer=muon"], ["train.gradient_accumulation=2", "train.schedule=wsd"]])
def test_resume_after_stopping_is_bit_exact(captured_copy, changes):
    """SIGTERM ends the step, saves, exits 0 and says how to go on; the continuation equals an undisturbed run."""
    config, whole = captured_copy(*changes, name="whole")
    train(config, whole)
    _, run = captured_copy(*changes, name="stopped")
    process = subprocess.Popen(command(run), stderr=subprocess.PIPE, text=True)
    while not run.metrics.exists() or len(run.metrics.read_text().splitlines()) < 4:
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "goes on" in said
    assert "train" not in run.manifest["stages"]
    subprocess.run(command(run), check=True, stderr=subprocess.DEVNULL)
    assert_equal(final_state(whole), final_state(run))
    assert losses(whole) == losses(run)


def test_kills_at_any_moment_change_nothing(captured_copy, undisturbed):
    _, run = captured_copy(name="killed")
    dice = random.Random(time.time_ns())
    for attempt in range(30):
        process = subprocess.Popen(command(run), stderr=subprocess.DEVNULL, start_new_session=True)
        # the first kills fall into the start, later ones into steps and checkpoints
        moment = dice.uniform(2.0, 9.0)
        try:
            process.wait(timeout=moment if attempt < 4 else 120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        else:
            assert process.returncode == 0
            break
    assert_equal(final_state(undisturbed), final_state(run))
    assert losses(undisturbed) == losses(run)
    assert not list(run.path.rglob("*.tmp"))


def test_two_processes_are_one_with_twice_the_batches(captured_copy):
    config, one = captured_copy("train.gradient_accumulation=2", name="one")
    train(config, one)
    _, two = captured_copy(name="two")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--mixed_precision", "no", "--num_machines", "1", "--dynamo_backend", "no", "--main_process_port", "0"]
    subprocess.run([*launch, "-m", "sparkdraft.cli", *command(two)[3:]], check=True, capture_output=True)
    ours, theirs = dict(losses(one)), dict(losses(two))
    assert ours.keys() == theirs.keys()
    for step in ours:
        assert ours[step] == pytest.approx(theirs[step], rel=1e-4)
    assert [line["held_out_acceptance_length"] for line in metrics(one) if "held_out_acceptance_length" in line] == [
        line["held_out_acceptance_length"] for line in metrics(two) if "held_out_acceptance_length" in line
    ]


def test_other_settings_start_anew(captured_copy):
    config, run = captured_copy()
    train(config, run)
    config, run = captured_copy("train.learning_rate=0.0005")
    train(config, run)
    assert losses(run)[0][0] == 1
    train(config, run)  # finished before
    assert len(losses(run)) == 12


def test_settings_that_return_find_their_training_again(captured_copy):
    """What was trained under other settings stands aside and is not lost."""
    config, run = captured_copy()
    train(config, run)
    before, weights = losses(run), checkpoints(run.checkpoints)[-1].path / "model.safetensors"
    expected = weights.read_bytes()
    train(*captured_copy("train.learning_rate=0.0005"))
    assert weights.read_bytes() != expected
    train(*captured_copy())
    assert (losses(run), weights.read_bytes()) == (before, expected)


def test_a_damaged_checkpoint_is_named(captured_copy):
    config, run = captured_copy("train.steps=3")
    train(config, run)
    manifest = run.manifest
    del manifest["stages"]["train"]
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    file = checkpoints(run.checkpoints)[-1].path / "state.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"step-3 is damaged.*Delete it"):
        train(config, run)


def test_a_rate_that_explodes_is_said(captured_copy):
    config, run = captured_copy("train.learning_rate=1e30", "train.max_grad_norm=null", "train.warmup_steps=0")
    with pytest.raises(UserError, match=r"no longer finite.*learning_rate"):
        train(config, run)


def test_trackers_write_their_files(captured_copy, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config, run = captured_copy("train.trackers=[tensorboard, wandb]", "train.steps=2")
    monkeypatch.chdir(run.path)
    train(config, run)
    assert list(run.path.rglob("events.out.tfevents*"))
    assert list(Path(run.path).rglob("*.wandb"))
