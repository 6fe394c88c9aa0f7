"""Bytes of a real target, and of checkpoints made of a few tensors."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from sparkdraft.bandwidth.bytes import Bytes, count_bytes
from sparkdraft.config import TargetConfig
from sparkdraft.target import Target


@pytest.fixture
def draft(tmp_path):
    """4-byte tensors: 10 read once a block, 7 a step, the rest never or a row at a time."""
    shapes = {"fc.weight": 10, "midlayer.mlp.up_proj.weight": 4, "norm.weight": 1, "lm_head.weight": 2}
    other = {"embed_tokens.weight": 100}
    directory = tmp_path / "draft"
    directory.mkdir()
    tensors = {name: torch.zeros(size) for name, size in (shapes | other).items()}
    save_file(tensors | {"d2t": torch.zeros(9, dtype=torch.int64)}, directory / "model.safetensors")
    return directory


def checkpoint(directory, config: dict, tensors: dict[str, tuple[int, ...]]) -> Target:
    """A BF16 checkpoint that is only counted."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    made = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in tensors.items()}
    save_file(made, directory / "model.safetensors")
    return Target.open(TargetConfig(model=str(directory)))


def test_a_tied_dense_target_reads_all_its_parameters_once(target, target_model, draft):
    """SmolLM2-135M: 134,515,008 parameters in BF16, the embedding table being the output projection."""
    read = count_bytes(target, draft, 3)
    assert read.plain_token == 2 * sum(p.numel() for p in target_model.parameters()) == 2 * 134_515_008
    assert read == Bytes(read.plain_token, read.plain_token + 4 * 10, False, 4 * 7)


def test_an_untied_embedding_and_parts_beside_the_language_model_are_not_read(tmp_path, draft):
    tensors = {
        "model.embed_tokens.weight": (100,), "model.layers.0.mlp.up_proj.weight": (3,), "lm_head.weight": (5,),
        "model.visual.blocks.0.weight": (100,), "mtp.fc.weight": (100,),
    }  # fmt: skip
    target = checkpoint(tmp_path / "target", {"model_type": "llama"}, tensors)
    save_file({"layers.0.weight": torch.zeros(9)}, target.path / "consolidated.safetensors")
    assert count_bytes(target, draft, 3).plain_token == 2 * 8
    # a tied output projection that was written out is read once all the same
    tied = checkpoint(tmp_path / "tied", {"model_type": "llama", "tie_word_embeddings": True}, tensors)
    assert count_bytes(tied, draft, 3).plain_token == 2 * 8


def test_a_mixture_of_experts_reads_the_active_ones_and_estimates_their_union(tmp_path, draft):
    """8 experts of which 2 are active: k + 1 = 4 choices touch 1 - (3/4)^4 of them, if they are independent."""
    config = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    tensors = {"model.layers.0.mlp.experts.gate_up_proj": (8, 256), "model.layers.0.mlp.shared_expert.w": (16,)}
    read = count_bytes(checkpoint(tmp_path / "target", config, tensors), draft, 3)
    assert read.plain_token == 2 * (2 * 256 + 16)
    assert read.verify == 2 * round(8 * 256 * (1 - 0.75**4) + 16) + 4 * 10
    assert read.verify_estimated


def test_tokens_per_weight_read():
    """Acceptance length 2 at k = 3: 2 tokens for 1.1 + 3 * 0.05 plain tokens' bytes."""
    assert Bytes(1000, 1100, False, 50).tokens_per_weight_read(2.0, 3) == pytest.approx(2 / 1.25)


def test_the_flagship(tmp_path, draft, monkeypatch):
    """Qwen3.6-35B-A3B, of which transformers' defaults are the config: 2,946,429,568 parameters a token."""
    config = AutoConfig.for_model("qwen3_5_moe_text")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    target = checkpoint(tmp_path / "target", config.to_dict(), {"x": (1,)})
    sizes = [(name, 2 * parameter.numel()) for name, parameter in model.named_parameters()]
    monkeypatch.setattr("sparkdraft.bandwidth.bytes._sizes", lambda path: iter(sizes if path == target.path else ()))
    assert count_bytes(target, draft, 3).plain_token == 2 * 2_946_429_568
