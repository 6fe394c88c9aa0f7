"""A target seen from outside: rows and layers as the model holds them, and what is said of a bad one."""

import shutil

import pytest
import torch

from sparkdraft.config import TargetConfig
from sparkdraft.errors import UserError
from sparkdraft.target import Target


def test_rows_and_layers_are_the_models(target, target_model):
    state = target_model.state_dict()
    ids = torch.tensor([0, 5, 49151])
    for part in ("embed", "lm_head"):  # tied
        assert torch.equal(target.rows(part, ids).float(), state["model.embed_tokens.weight"][ids])
    assert torch.equal(target.final_norm().float(), state["model.norm.weight"])
    layer = target.layer_tensors(29)
    assert torch.equal(layer["mlp.down_proj.weight"].float(), state["model.layers.29.mlp.down_proj.weight"])
    assert len(layer) == 9
    assert target.eos_token_ids == {2}


def test_the_fingerprint_follows_weights_and_tokenizer(target, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(target.path, copy)
    same = Target.open(TargetConfig(model=str(copy)))
    assert same.fingerprint == target.fingerprint
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"\x01" * 8)
    assert Target.open(TargetConfig(model=str(copy))).fingerprint != target.fingerprint


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / "config.json").unlink(), r"holds no config\.json"),
        (lambda path: (path / "model.safetensors").unlink(), r"holds no \.safetensors"),
        (lambda path: (path / "config.json").write_text("{}"), "config of .* cannot be read"),
        (lambda path: (path / "model.safetensors").write_bytes(b"x" * 50), "is damaged"),
    ],
)
def test_a_bad_checkpoint_is_named(target, tmp_path, spoil, message):
    copy = tmp_path / "copy"
    shutil.copytree(target.path, copy)
    spoil(copy)
    with pytest.raises(UserError, match=message):
        bad = Target.open(TargetConfig(model=str(copy)))
        _ = bad.config
        bad.rows("embed")


def test_an_unknown_name_is_said(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="neither a directory here nor a model"):
        Target.open(TargetConfig(model="no-such-owner/no-such-model"))
