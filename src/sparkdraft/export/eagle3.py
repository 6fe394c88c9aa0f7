"""The export stage: the best checkpoint as a draft directory that vLLM loads as it is, checked after writing."""

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sparkdraft.config import Config
from sparkdraft.drafts.eagle3 import WEIGHTS, Eagle3Draft
from sparkdraft.drafts.ttt import Span, UnrolledAttention, unroll
from sparkdraft.errors import UserError
from sparkdraft.features.store import FeatureStore
from sparkdraft.files import read_json, sha256_file, write_aside, write_json, write_text
from sparkdraft.run import Run, provenance
from sparkdraft.target import Target
from sparkdraft.training.checkpoints import Checkpoint

PROVENANCE = "sparkdraft.json"

# What vLLM needs to read; one that is absent costs acceptance without an error.
_REQUIRED = (
    "architectures", "draft_vocab_size", "vocab_size", "hidden_size", "head_dim", "num_attention_heads",
    "num_key_value_heads", "intermediate_size", "num_hidden_layers", "rms_norm_eps", "rope_parameters",
    "max_position_embeddings", "dtype", "eagle_aux_hidden_state_layer_ids", "target_hidden_size",
    "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
)  # fmt: skip


def export(config: Config, run: Run) -> None:
    """Write `draft/` from the checkpoint with the best held-out acceptance length.

    Raises:
        UserError: training is not finished, or the written draft does not equal the trained one.
    """
    record = run.stage_record("train")
    with run.stage("export", {"train": record["fingerprint"], "best": record["best"]}) as stage:
        if not stage.needed and (run.draft / WEIGHTS).is_file():
            Console(stderr=True).print("export: finished before, nothing has changed")
            return
        stage.needed = True
        checkpoint = Checkpoint(run.checkpoints / f"step-{record['best']['step']}")
        if not checkpoint.path.is_dir():
            raise UserError(f"{checkpoint.path}, the best checkpoint, is gone. Run train again.")
        trained = Eagle3Draft.load(checkpoint.path)
        target = Target.open(config.target)
        trained.set_embeddings(target.rows("embed").float())
        with write_aside(run.draft) as aside:
            aside.mkdir()
            trained.save(aside, getattr(torch, trained.config.dtype))
            facts = _facts(config, run, target, record, aside)
            write_json(aside / PROVENANCE, facts)
            write_text(aside / "README.md", model_card(facts))
            facts |= {"rounding": check(trained, aside, target, FeatureStore.open(run.features))}
        stage.facts.update(sha256=facts["sha256"], bytes=facts["bytes"], rounding=facts["rounding"])
        Console(stderr=True).print(f"export: {run.draft} ({facts['bytes'] / 1e6:.1f} MB)")


def check(trained: Eagle3Draft, directory: Path, target: Target, store: FeatureStore) -> float:
    """Reload a written draft and hold it against the trained module.

    Returns:
        the share of drafted tokens that rounding to the written dtype changed.

    Raises:
        UserError: a config key, a tensor or the logits are not what was trained.
    """
    written = read_json(directory / "config.json")
    missing = [key for key in _REQUIRED if key not in written]
    if missing:
        raise UserError(f"export: {directory}/config.json lacks {missing}; vLLM would assume other values.")
    if written["max_position_embeddings"] < target.config.max_position_embeddings:
        raise UserError(f"export: max_position_embeddings of {directory} is smaller than the target's.")
    loaded = Eagle3Draft.load(directory)
    loaded.embeddings = trained.embeddings
    dtype = getattr(torch, written["dtype"])
    for name, value in trained.state_dict().items():
        expected = value.to(dtype).to(value.dtype) if value.is_floating_point() else value
        if not torch.equal(expected, loaded.state_dict()[name]):
            raise UserError(f"export: {name} in {directory} is not what was trained. Run export again.")
    logits = [_logits(draft, store) for draft in (trained, loaded)]
    changed = (logits[0].argmax(-1) != logits[1].argmax(-1)).float().mean().item()
    if changed > 0.1:
        raise UserError(
            f"export: {changed:.0%} of the drafted tokens changed by rounding to {dtype}; the draft is unsound."
        )
    return changed


@torch.no_grad()
def _logits(draft: Eagle3Draft, store: FeatureStore) -> torch.Tensor:
    """Logits of three draft steps over the longest held-out sample of at most 512 tokens."""
    entry = max(store.entries, key=lambda e: (e.split == "held_out" and e.length <= 512, e.length <= 512, e.length))
    sample = store.load(entry)
    spans = [Span(0, 0, len(sample.token_ids))]
    return draft.logits(unroll(draft, sample.token_ids.long(), sample.aux.float(), spans, UnrolledAttention(spans), 3))


def _facts(config: Config, run: Run, target: Target, train: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Where the draft comes from, for its card and for whoever loads it."""
    prepare = run.stage_record("prepare")
    draft_config = read_json(directory / "config.json")
    return {
        "name": config.name,
        "target": {"name": target.name, "fingerprint": target.fingerprint},
        "data": {key: value for key, value in prepare.items() if key not in ("fingerprint", "finished", "seconds")},
        "training": {
            "loss": config.train.loss, "ttt_steps": config.ttt.steps, "optimizer": config.train.optimizer,
            "steps": train["steps"], "tokens": train["tokens"], "best": train["best"],
            "vocabulary_coverage": train["vocabulary_coverage"], "parameters": train["parameters"],
        },
        "draft_vocab_size": draft_config["draft_vocab_size"],
        "aux_layers": draft_config["eagle_aux_hidden_state_layer_ids"],
        "dtype": draft_config["dtype"],
        "sha256": sha256_file(directory / WEIGHTS),
        "bytes": (directory / WEIGHTS).stat().st_size,
        "k": config.evaluate.k,
        **provenance(),
    }  # fmt: skip


def serve_line(target: str, draft: str, k: int) -> str:
    """The command that serves a target with an EAGLE-3 draft."""
    speculative = json.dumps({"method": "eagle3", "model": draft, "num_speculative_tokens": k})
    return f"vllm serve {target} --speculative-config '{speculative}'"


def model_card(facts: dict[str, Any]) -> str:
    """README.md of the draft directory."""
    training, best = facts["training"], facts["training"]["best"]
    rates = "\n".join(f"| {i} | {rate:.3f} |" for i, rate in enumerate(best["acceptance_rate_per_position"], 1))
    return f"""---
library_name: vllm
tags: [eagle3, speculative-decoding]
---
# {facts["name"]}

An EAGLE-3 draft of **{facts["target"]["name"]}**, trained by sparkdraft {facts["versions"]["sparkdraft"]}.

    {serve_line(facts["target"]["name"], "THIS_DIRECTORY", facts["k"])}

| | |
| --- | --- |
| parameters | {training["parameters"]:,} ({facts["dtype"]}, {facts["bytes"] / 1e6:.1f} MB) |
| draft vocabulary | {facts["draft_vocab_size"]:,} tokens, {training["vocabulary_coverage"]:.1%} of what the target wrote |
| auxiliary layers | {facts["aux_layers"]} |
| training | {training["steps"]:,} steps, {training["tokens"]:,} tokens, loss {training["loss"]}, {training["ttt_steps"]} TTT steps |
| data | {json.dumps(facts["data"])} |
| target fingerprint | `{facts["target"]["fingerprint"]}` |
| weights sha256 | `{facts["sha256"]}` |
| source | sparkdraft at git {facts["git_revision"]} |

## Acceptance

Greedy, k = {len(best["acceptance_rate_per_position"])}, on held-out samples, counted at training: acceptance length
**{best["acceptance_length"]:.2f}**. What a real vLLM reaches is in the run's report.

| position | acceptance rate |
| --- | --- |
{rates}
"""
