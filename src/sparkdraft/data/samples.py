"""The prepare stage: prompts to conversations to samples (token ids and loss mask)."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparkdraft.config import Config, DataConfig
from sparkdraft.data.prompts import Prompt, digest, is_held_out, load_prompts
from sparkdraft.data.regenerate import read_conversations, regenerate, settings_of_answers
from sparkdraft.data.template import Template
from sparkdraft.errors import UserError
from sparkdraft.files import disk_errors, read_json, remove, remove_leftovers, write_aside, write_json, write_text
from sparkdraft.run import Run
from sparkdraft.target import Target

CONVERSATIONS, TENSORS, INDEX = "conversations.jsonl", "samples.safetensors", "index.json"


@dataclass(frozen=True)
class Sample:
    """Token ids and loss mask of one conversation (or of one of its turns, where the template rewrites history)."""

    id: str
    kind: str
    split: str
    """`train` or `held_out`."""
    token_ids: Tensor
    """int32 [T]"""
    loss_mask: Tensor
    """bool [T]: what the assistant wrote, its end token included."""


def prepare(config: Config, run: Run) -> None:
    """Write samples/: conversations.jsonl, samples.safetensors, index.json.

    Raises:
        UserError: a source cannot be read, the target has no chat template, or most samples have nothing to train on.
    """
    target = Target.open(config.target)
    prompts, duplicates = load_prompts(config.data)
    inputs = {
        "data": config.data.model_dump(mode="json", exclude={"batch_size", "sources"}),
        "prompts": digest([[p.id, p.kind, *p.answers] for p in prompts]),
        "target": target.fingerprint,
        "dtype": str(target.dtype),
    }
    with run.stage("prepare", inputs) as stage:
        stage.needed |= not (run.samples / INDEX).is_file()
        if not stage.needed:
            Console(stderr=True).print("prepare: finished before, nothing has changed")
            return
        with disk_errors(run.samples):
            _start(run.samples, digest(settings_of_answers(target, config.data)))
            conversations = _conversations(prompts, target, config.data, run.samples / CONVERSATIONS)
            samples, dropped = make_samples(conversations, target, config.data)
            _check_split(samples, config.data)
            facts = {"prompts": len(prompts), "duplicates": duplicates, "dropped": dropped}
            facts |= _counts(samples, conversations)
            _save(samples, facts, run.samples)
        stage.facts.update(facts)
        _say(facts, samples)


def _start(directory: Path, answers: str) -> None:
    """Keep the answers that an earlier prepare got from the same target with the same settings (`answers` is their
    hash), whatever else has changed: they are the long part."""
    directory.mkdir(parents=True, exist_ok=True)
    remove_leftovers(directory)
    remove(directory / INDEX)
    marker = directory / "answers.json"
    if not marker.exists() or read_json(marker) != answers:
        remove(directory / CONVERSATIONS)
        write_json(marker, answers)


def _conversations(prompts: Sequence[Prompt], target: Target, config: DataConfig, path: Path) -> list[dict[str, Any]]:
    """Every prompt with its answers: the target's own, or those that the source holds."""
    Template(target.tokenizer, config.template_arguments)  # says at once if there is no template
    if config.regenerate:
        regenerate(prompts, target, config, path)
        found = read_conversations(path)
        return [found[prompt.id] for prompt in prompts]
    answered = [prompt for prompt in prompts if prompt.answers]
    if not answered:
        raise UserError("data.regenerate is false, but no row of data.sources holds an answer. Set it to true.")
    rows = [_given(prompt, config) for prompt in answered]
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return rows


def _given(prompt: Prompt, config: DataConfig) -> dict[str, Any]:
    """A conversation with the answers of its source, up to its last answer."""
    system = prompt.system or config.system_prompt
    messages = [{"role": "system", "content": system}] if system else []
    for turn, answer in zip(prompt.turns, prompt.answers, strict=False):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return {"id": prompt.id, "kind": prompt.kind, "messages": messages, "finish_reason": "stop"}


def make_samples(
    conversations: Sequence[dict[str, Any]], target: Target, config: DataConfig
) -> tuple[list[Sample], int]:
    """Tokenise and mask; also how many sequences were dropped because nothing in them is trained on.

    Raises:
        UserError: more than half were dropped, so that the template or the length limit must be wrong.
    """
    template = Template(target.tokenizer, config.template_arguments)
    samples, dropped = [], 0
    for row in conversations:
        split = "held_out" if is_held_out(row["id"], config) else "train"
        encoded = template.encode(row["messages"], row["finish_reason"] == "stop", config.max_length)
        for number, sequence in enumerate(encoded):
            if not any(sequence.loss_mask):
                dropped += 1
                continue
            name = row["id"] if len(encoded) == 1 else f"{row['id']}.{number}"
            ids, mask = torch.tensor(sequence.token_ids, dtype=torch.int32), torch.tensor(sequence.loss_mask)
            samples.append(Sample(name, row["kind"], split, ids, mask))
        dropped += not encoded
    if dropped > len(samples):
        raise UserError(
            f"{dropped} of {dropped + len(samples)} samples hold nothing to train on: the answers are empty, lie beyond "
            f"data.max_length ({config.max_length} tokens), or the chat template of {target.path} does not show them. "
            "Look at samples/conversations.jsonl of the run, raise data.max_length, or mend the template."
        )
    return samples, dropped


def _check_split(samples: Sequence[Sample], config: DataConfig) -> None:
    for split in ("train", "held_out"):
        if not any(sample.split == split for sample in samples):
            raise UserError(
                f"data.held_out: of {len(samples)} samples none is in the split {split!r} at a share of {config.held_out}. "
                "Add prompts, or change data.held_out or data.seed."
            )


def _counts(samples: Sequence[Sample], conversations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "samples": len(samples),
        "held_out": sum(sample.split == "held_out" for sample in samples),
        "tokens": sum(len(sample.token_ids) for sample in samples),
        "trained_tokens": sum(int(sample.loss_mask.sum()) for sample in samples),
        "finish_reasons": dict(Counter(row["finish_reason"] for row in conversations)),
        "kinds": len({sample.kind for sample in samples}),
    }


def _save(samples: Sequence[Sample], facts: dict[str, Any], directory: Path) -> None:
    """The tensors, flat with offsets, then the index that makes them complete."""
    lengths = torch.tensor([0, *(len(sample.token_ids) for sample in samples)])
    tensors = {
        "token_ids": torch.cat([sample.token_ids for sample in samples]),
        "loss_mask": torch.cat([sample.loss_mask for sample in samples]).to(torch.uint8),
        "offsets": lengths.cumsum(0),
    }
    with write_aside(directory / TENSORS) as aside:
        save_file(tensors, aside)
    rows = [{"id": sample.id, "kind": sample.kind, "split": sample.split} for sample in samples]
    write_json(directory / INDEX, {**facts, "samples": rows})


def load_samples(directory: Path) -> list[Sample]:
    """All samples of a finished prepare stage.

    Raises:
        UserError: the files are missing or damaged.
    """
    rows = read_json(directory / INDEX)["samples"]
    try:
        tensors = load_file(directory / TENSORS)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{directory / TENSORS} cannot be read ({error}). Delete {directory} and run prepare again."
        ) from error
    offsets = tensors["offsets"].tolist()
    return [
        Sample(**row, token_ids=tensors["token_ids"][start:end], loss_mask=tensors["loss_mask"][start:end].bool())
        for row, start, end in zip(rows, offsets[:-1], offsets[1:], strict=True)
    ]


def _say(facts: dict[str, Any], samples: Sequence[Sample]) -> None:
    table = Table("kind", "samples", "tokens", "trained", title="Samples")
    for kind in sorted({sample.kind for sample in samples}):
        mine = [sample for sample in samples if sample.kind == kind]
        tokens, trained = (
            sum(int(x) for x in values)
            for values in ([len(s.token_ids) for s in mine], [s.loss_mask.sum() for s in mine])
        )
        table.add_row(Text(kind), f"{len(mine):,}", f"{tokens:,}", f"{trained:,}")
    console = Console(stderr=True, soft_wrap=True)
    console.print(table)
    console.print(
        f"prepare: {facts['prompts']:,} prompts ({facts['duplicates']} duplicates dropped), {facts['samples']:,} samples "
        f"({facts['dropped']} dropped, {facts['held_out']} held out), {facts['trained_tokens']:,} of {facts['tokens']:,} tokens trained"
    )
