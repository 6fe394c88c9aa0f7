"""The exported directory: complete, equal to what was trained, refused when it is not, and loaded by a real vLLM."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparkdraft.config import DraftConfig
from sparkdraft.decoding.evaluate import evaluate
from sparkdraft.drafts.eagle3 import WEIGHTS, Eagle3Config, Eagle3Draft
from sparkdraft.errors import UserError
from sparkdraft.export.eagle3 import check, export
from sparkdraft.features.store import FeatureStore
from sparkdraft.files import read_json
from sparkdraft.training.checkpoints import Checkpoint
from sparkdraft.training.loop import train

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@pytest.fixture
def trained(captured_copy):
    config, run = captured_copy()
    train(config, run)
    return config, run


def test_export_is_the_best_checkpoint_in_the_targets_dtype(trained, target):
    config, run = trained
    export(config, run)
    best = Checkpoint(run.checkpoints / f"step-{run.stage_record('train')['best']['step']}")
    ours, theirs = load_file(run.draft / WEIGHTS), load_file(best.path / WEIGHTS)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value.to(torch.bfloat16) if value.is_floating_point() else value)
    written = read_json(run.draft / "config.json")
    assert written["rope_parameters"] == target.config.rope_parameters
    assert written["max_position_embeddings"] == target.config.max_position_embeddings
    assert written["vocab_size"] == target.vocab_size
    assert written["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    card = (run.draft / "README.md").read_text()
    assert "vllm serve" in card
    assert read_json(run.draft / "sparkdraft.json")["sha256"] in card
    export(config, run)  # again: nothing to do
    (run.draft / WEIGHTS).unlink()
    export(config, run)
    assert (run.draft / WEIGHTS).is_file()


@pytest.mark.parametrize("fault", ["config", "tensor", "missing"])
def test_a_written_draft_that_differs_is_refused(trained, target, fault):
    config, run = trained
    export(config, run)
    draft = Eagle3Draft.load(run.checkpoints / f"step-{run.stage_record('train')['best']['step']}")
    draft.set_embeddings(target.rows("embed").float())
    if fault == "config":
        written = read_json(run.draft / "config.json")
        del written["norm_output"]
        (run.draft / "config.json").write_text(json.dumps(written))
    else:
        tensors = load_file(run.draft / WEIGHTS)
        if fault == "tensor":
            tensors["fc.weight"][0, 0] += 1
        else:
            del tensors["fc.weight"]
        save_file(tensors, run.draft / WEIGHTS)
    with pytest.raises(
        UserError, match={"config": "norm_output", "tensor": "fc.weight", "missing": "fc.weight"}[fault]
    ):
        check(draft, run.draft, target, FeatureStore.open(run.features))


def test_kills_leave_no_half_draft(trained):
    """SIGKILL at random moments of the export: what stands under the final name is whole or absent."""
    _, run = trained
    command = [sys.executable, "-m", "sparkdraft.cli", "export", "--config", str(run.path / "config.yaml")]
    dice = random.Random(time.time_ns())
    for _ in range(3):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
        time.sleep(dice.uniform(3.0, 8.0))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if run.draft.exists():
            Eagle3Draft.load(run.draft)
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    Eagle3Draft.load(run.draft)
    assert not list(run.path.rglob("*.tmp"))


def test_every_flag_survives_the_way_through_the_files(tmp_path, target):
    """Flags, layer type, several layers, full vocabulary: what is loaded computes what was saved."""
    cases = [dict.fromkeys(FLAGS, False) | {flag: True} for flag in FLAGS]
    cases += [{"layer_type": "qwen3", "num_layers": 2}, {"intermediate_size": 32, "num_key_value_heads": 1}]
    for number, case in enumerate(cases):
        settings = DraftConfig(**case)
        size = target.vocab_size if number == 0 else 300
        draft = Eagle3Draft(Eagle3Config.of(settings, target, [2, 15, 27], size))
        draft.set_vocabulary(torch.arange(size))
        draft.initialise(target, torch.Generator().manual_seed(number))
        directory = tmp_path / str(number)
        directory.mkdir()
        draft.save(directory)
        loaded = Eagle3Draft.load(directory)
        assert loaded.config == draft.config
        assert all(torch.equal(a, loaded.state_dict()[name]) for name, a in draft.state_dict().items())


@pytest.mark.parametrize(("layers", "kv_heads"), [(1, None), (1, 9), (2, None), (3, 9)])
def test_the_warm_start_repeats_the_targets_last_layers(target, target_model, layers, kv_heads):
    """fc lets the last auxiliary state pass; blocks with the target's last layers and norm on it give its logits."""
    settings = DraftConfig(num_layers=layers, num_key_value_heads=kv_heads)
    draft = Eagle3Draft(Eagle3Config.of(settings, target, [2, 15, target.num_layers - layers], target.vocab_size))
    draft.set_vocabulary(torch.arange(target.vocab_size))
    draft.initialise(target, torch.Generator())
    draft.set_embeddings(target.rows("embed").float())
    ids = target.tokenizer("The capital of France is Paris, and the capital of Italy is", return_tensors="pt")[
        "input_ids"
    ]
    with torch.no_grad():
        output = target_model(ids, output_hidden_states=True)
        aux = torch.cat([output.hidden_states[layer][0] for layer in draft.config.aux_layers], -1)

        def causal(_layer, q, k, v):
            heads = [x.transpose(0, 1) for x in (q, k, v)]
            return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(
                0, 1
            )

        _, normed = draft(draft.embed(ids[0]), draft.combine(aux), torch.arange(ids.shape[1]), causal)
        assert torch.allclose(draft.logits(normed), output.logits[0], atol=2e-3, rtol=1e-3)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "overrides", [[], [f"draft.{flag}=true" for flag in FLAGS], ["draft.layer_type=qwen3", "draft.num_layers=2"]]
)
def test_a_real_vllm_loads_every_kind_and_counts_what_the_reference_counts(captured_copy, overrides):
    """A trained draft of each shape: vLLM's acceptance equals the reference decoder's, so no flag is lost on the way."""
    lengths = []
    for engine in ("reference", "vllm"):
        config, run = captured_copy(
            *overrides, "train.steps=60", f"evaluate.engine={engine}", "evaluate.baseline=false"
        )
        train(config, run)
        export(config, run)
        evaluate(config, run)
        report = read_json(run.report / "report.json")
        assert report["engine"] == engine
        lengths.append(report["overall"]["acceptance_length"])
    assert lengths[0] == pytest.approx(lengths[1], rel=0.01)
    assert lengths[0] > 1
