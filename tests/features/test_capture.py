"""Capture against the plain forward pass of transformers, and what it does when something is in its way."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sparkdraft.config import TargetConfig
from sparkdraft.data.samples import load_samples
from sparkdraft.errors import UserError
from sparkdraft.features import capture as module
from sparkdraft.features.capture import aux_layers, capture
from sparkdraft.features.store import FeatureStore
from sparkdraft.files import read_json
from sparkdraft.target import Target


@torch.no_grad()
def reference(model, sample, layers):
    """One sample alone, eager attention, every hidden state kept; after the last layer by a hook of its own."""
    last = []
    hook = model.get_decoder().layers[-1].register_forward_hook(lambda _m, _a, out: last.append(out))
    out = model(input_ids=sample.token_ids.long()[None], output_hidden_states=True, use_cache=False)
    hook.remove()
    n = model.config.get_text_config().num_hidden_layers
    aux = [last[0] if layer == n else out.hidden_states[layer] for layer in layers]
    return torch.cat(aux, -1)[0], out.hidden_states[-1][0], out.logits[0].float()


def assert_close(found, expected):
    """Every row within 1e-4 of its length."""
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 1e-4


def compare(run, model, layers):
    """Every sample of the store against the reference."""
    samples = load_samples(run.samples)
    store = FeatureStore.open(run.features)
    assert [(e.id, e.kind, e.split, e.length) for e in store.entries] == [
        (s.id, s.kind, s.split, len(s.token_ids)) for s in samples
    ]
    assert store.aux_layers == list(layers)
    for sample, entry in zip(samples, store.entries, strict=True):
        features = store.load(entry)
        aux, final, logits = reference(model, sample, layers)
        assert torch.equal(features.token_ids, sample.token_ids.long())
        assert torch.equal(features.loss_mask, sample.loss_mask)
        assert entry.trained == sample.loss_mask.sum() > 0
        for found, expected in zip(features.aux.chunk(len(layers), -1), aux.chunk(len(layers), -1), strict=True):
            assert_close(found, expected)
        assert_close(features.final, final)
        kept = torch.cat([sample.loss_mask[1:], torch.tensor([False])])
        assert torch.equal(features.teacher_argmax, torch.where(kept, logits.argmax(-1), -1))


@pytest.fixture(scope="session")
def eager_model():
    return Target.open(TargetConfig()).load_model(attention="eager")


def test_features_are_those_of_the_plain_forward_pass(open_run, eager_model):
    run = open_run(target={}, dtype="float32", tokens_per_shard=500)
    capture(run.config, run)
    assert len(list(run.features.glob("*.safetensors"))) > 2
    compare(run, eager_model, (2, 15, 27))
    facts = run.stage_record("capture")
    assert facts["aux_layers"] == [2, 15, 27]
    assert facts["tokens"] == sum(len(sample.token_ids) for sample in load_samples(run.samples))


def test_right_padding_is_exact_for_linear_attention_and_after_the_last_layer(open_run):
    run = open_run(dtype="float32", aux_layers=[0, 3, 4])
    capture(run.config, run)
    compare(run, Target.open(run.config.target).load_model(attention="eager"), (0, 3, 4))


def store_bytes(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_killed_capture_goes_on_to_the_same_bytes(open_run, tmp_path):
    whole = open_run(target={}, tokens_per_shard=300)
    killed = open_run(tmp_path / "killed", target={}, tokens_per_shard=300)
    capture(whole.config, whole)
    expected = store_bytes(whole.features)
    shards = sum(name.endswith(".safetensors") for name in expected)
    rng = random.Random(time.time_ns())
    until, wait = rng.randint(1, shards - 2), rng.uniform(0, 0.2)
    command = [sys.executable, "-m", "sparkdraft.cli", "capture", "--config", str(killed.path / "config.yaml")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while len(list(killed.features.glob("shard-*.json"))) < until and process.poll() is None:
        time.sleep(0.01)
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    with pytest.raises(UserError, match="no finished feature store"):
        FeatureStore.open(killed.features)
    kept = {
        path: path.stat().st_ino
        for path in killed.features.glob("shard-*.safetensors")
        if path.with_suffix(".json").exists()
    }
    capture(killed.config, killed)
    found = store_bytes(killed.features)
    assert found == expected
    assert all(path.stat().st_ino == inode for path, inode in kept.items()), "a finished shard was made again"


def test_a_finished_capture_is_not_done_again_and_a_deleted_shard_alone_is(open_run, monkeypatch):
    run = open_run(tokens_per_shard=500)
    capture(run.config, run)
    before = store_bytes(run.features)
    with monkeypatch.context() as patch:
        patch.setattr(Target, "load_model", lambda _self: pytest.fail("the target was loaded"))
        capture(run.config, run)
    victim = sorted(run.features.glob("*.safetensors"))[1]
    victim.unlink()
    times = {path: path.stat().st_mtime_ns for path in run.features.glob("*.safetensors")}
    capture(run.config, run)
    assert store_bytes(run.features) == before
    assert all(path.stat().st_mtime_ns == at for path, at in times.items())


def test_shards_of_other_settings_are_not_taken(open_run, tmp_path):
    run = open_run(tokens_per_shard=300)
    capture(run.config, run)
    other = open_run(tokens_per_shard=300, aux_layers=[1, 2])
    (other.features / "index.json").unlink()
    capture(other.config, other)
    fresh = open_run(tmp_path / "fresh", tokens_per_shard=300, aux_layers=[1, 2])
    capture(fresh.config, fresh)
    assert store_bytes(other.features) == store_bytes(fresh.features)


def breaking(monkeypatch, layer: int, change):
    """Have the target's decoder layer put out `change(states)`."""
    load = Target.load_model

    def broken(self):
        model = load(self)
        model.get_decoder().layers[layer].register_forward_hook(lambda _m, _a, out: change(out))
        return model

    monkeypatch.setattr(Target, "load_model", broken)


@pytest.mark.parametrize(
    ("change", "settings", "said"),
    [
        (lambda states: states * 0, {}, "after 2 layers are all zero at token 0"),
        (lambda states: states.index_fill(1, torch.tensor([7]), 0.0), {}, "after 2 layers are all zero at token 7"),
        (lambda states: states * float("inf"), {}, "after 2 layers hold NaN or infinity.*set target.dtype"),
        (
            lambda states: states * 1e6,
            {"dtype": "float16"},
            "after 2 layers do not fit into float16.*bfloat16 or float32",
        ),
    ],
)
def test_states_that_teach_nothing_are_refused(change, settings, said, open_run, monkeypatch):
    breaking(monkeypatch, 1, change)
    run = open_run(**settings)
    with pytest.raises(UserError, match=said) as error:
        capture(run.config, run)
    longest = max(load_samples(run.samples), key=lambda sample: len(sample.token_ids))
    assert longest.id in str(error.value)
    assert not list(run.features.iterdir())


def test_a_target_that_caps_its_logits_is_refused(open_run, tmp_path, target):
    config = AutoConfig.for_model(
        "gemma2", vocab_size=target.vocab_size, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, final_logit_softcapping=0.1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "capped")
    run = open_run(target={"model": str(tmp_path / "capped")})
    with pytest.raises(UserError, match="changes its logits after the lm_head"):
        capture(run.config, run)


def test_layers_and_tokens_that_the_target_does_not_have(open_run, hybrid_target):
    run = open_run(aux_layers=[2, 5])
    with pytest.raises(UserError, match=r"features\.aux_layers: \[2, 5\] .* to 4"):
        capture(run.config, run)
    config = read_json(hybrid_target / "config.json")
    for key, value, said in [
        ("max_position_embeddings", 40, "the target takes 40"),
        ("vocab_size", 50, "vocabulary of 50"),
    ]:
        small = run.path.parent / key
        shutil.copytree(hybrid_target, small)
        module.write_json(small / "config.json", config | {key: value})
        run = open_run(target={"model": str(small)})
        with pytest.raises(UserError, match=said):
            capture(run.config, run)


def test_auxiliary_layers():
    assert aux_layers(None, 30) == [2, 15, 27]
    for layers in range(1, 200):
        chosen = aux_layers(None, layers)
        assert chosen == sorted(set(chosen)) and chosen[0] >= 0 and chosen[-1] <= layers
        assert len(chosen) == 3 or layers == 1
    for wrong in ([], [3, 2], [2, 2], [2, 9]):
        with pytest.raises(UserError, match=r"features\.aux_layers"):
            aux_layers(wrong, 8)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_too_small_is_refused_before_the_target_is_loaded(open_run, small_disk, monkeypatch):
    monkeypatch.setattr(Target, "load_model", lambda _self: pytest.fail("the target was loaded"))
    run = open_run(small_disk, dtype="float32")
    with pytest.raises(UserError, match=r"need \d+\.\d+ GB in .* and 0\.00 GB are free"):
        capture(run.config, run)


def test_a_disk_that_fills_up_keeps_what_was_finished(open_run, small_disk, tmp_path, monkeypatch):
    run = open_run(small_disk, tokens_per_shard=150, dtype="float32")
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40))  # type: ignore[attr-defined]
        with pytest.raises(UserError, match=f"The disk that holds {small_disk}.* is full"):
            capture(run.config, run)
    names = {path.name for path in run.features.iterdir()}
    assert names and "index.json" not in names
    assert all(name.startswith("shard-") for name in names)
    kept = store_bytes(run.features)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    capture(run.config, run)
    whole = open_run(tmp_path / "whole", tokens_per_shard=150, dtype="float32")
    capture(whole.config, whole)
    assert store_bytes(run.features) == store_bytes(whole.features)
    assert kept.items() <= store_bytes(run.features).items()
