"""On-policy answers: the target itself answers every user turn, many conversations side by side.

Answers are appended to a JSONL file, flushed to the disk as they end, one line a conversation:

    {"id", "kind", "messages": [{"role", "content"}, ...], "finish_reason": "stop" | "length", "tokens"}

A stopped generation goes on with the prompts that have no line yet. Answers that ship with the package are taken where
they were made by the same target with the same settings.
"""

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from sparkdraft.config import Config, DataConfig
from sparkdraft.data.prompts import BUILTIN, Prompt, digest, load_prompts
from sparkdraft.data.template import Message, Template
from sparkdraft.files import read_jsonl, remove, write_json, write_text
from sparkdraft.progress import progress_bar
from sparkdraft.run import provenance
from sparkdraft.target import Target

PREFILL_TOKENS = 16384
"""Most prompt tokens that one batch starts with; longer prompts get smaller batches."""


@dataclass
class _Conversation:
    """A prompt on its way through its turns."""

    prompt: Prompt
    messages: list[Message]
    turn: int = 0
    tokens: int = 0

    def line(self, finished: bool) -> str:
        return json.dumps(
            {
                "id": self.prompt.id,
                "kind": self.prompt.kind,
                "messages": self.messages,
                "finish_reason": "stop" if finished else "length",
                "tokens": self.tokens,
            },
            ensure_ascii=False,
        )


def regenerate(prompts: Sequence[Prompt], target: Target, config: DataConfig, out: Path) -> None:
    """Answer every prompt that `out` has no line of; shipped answers are taken first.

    Raises:
        UserError: the chat template refuses a prompt.
    """
    _cut_torn_line(out)
    # a prompt that there was no room for is tried again: data.max_length may have been raised
    done = {
        name
        for name, row in read_conversations(out).items()
        if row["messages"][-1]["content"] or row["finish_reason"] == "stop"
    }
    shipped = shipped_answers(target, config)
    wanted = [prompt for prompt in prompts if prompt.id not in done]
    with out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(shipped[p.id], ensure_ascii=False) + "\n" for p in wanted if p.id in shipped)
        _flush(file)
        missing = [prompt for prompt in wanted if prompt.id not in shipped]
        if missing:
            _Regeneration(target, config, file).run(missing, total=len(prompts))


def read_conversations(path: Path) -> dict[str, dict[str, Any]]:
    """The finished conversations of a file by their id."""
    return {row["id"]: row for row in read_jsonl(path)}


def _cut_torn_line(path: Path) -> None:
    """End a file after its last whole line, so that the next one does not grow onto what a kill left."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def settings_of_answers(target: Target, config: DataConfig) -> dict[str, Any]:
    """Everything that an answer depends on, besides its prompt."""
    names = ("max_new_tokens", "temperature", "top_p", "system_prompt", "template_arguments", "seed")
    values = {name: getattr(config, name) for name in names}
    if not config.temperature:  # greedy: nothing is drawn
        values |= {"top_p": 1.0, "seed": 0}
    return {"target": target.fingerprint, "dtype": str(target.dtype), **values}


def shipped_answers(target: Target, config: DataConfig) -> dict[str, dict[str, Any]]:
    """The package's ready-made answers, if this target with these settings made them."""
    folder = BUILTIN / "responses"
    record = folder / f"{target.name}.json"
    if not record.is_file() or json.loads(record.read_text())["settings"] != settings_of_answers(target, config):
        return {}
    return read_conversations(Path(str(folder / f"{target.name}.jsonl")))


def ship(config: Config, directory: Path) -> None:
    """Answer the built-in prompts and write the two files that ship with the package, with their provenance.

    What ships already and was made by the same target with the same settings is kept; delete it to make it anew.
    """
    target = Target.open(config.target)
    prompts, _ = load_prompts(DataConfig())
    directory.mkdir(parents=True, exist_ok=True)
    working = directory / f"{target.name}.part"
    regenerate(prompts, target, config.data, working)
    rows = read_conversations(working)
    lines = [json.dumps(rows[prompt.id], ensure_ascii=False) + "\n" for prompt in prompts]
    write_text(directory / f"{target.name}.jsonl", "".join(lines))
    write_json(
        directory / f"{target.name}.json",
        {
            "settings": settings_of_answers(target, config.data),
            "target_name": target.name,
            "conversations": len(lines),
            "sha256": digest(lines),
            "command": f"sparkdraft responses --out DIRECTORY data.max_new_tokens={config.data.max_new_tokens}",
            **provenance(),
        },
    )
    remove(working)


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


class _Regeneration:
    """One pass over prompts that lack an answer."""

    def __init__(self, target: Target, config: DataConfig, file: Any):
        self.config, self.file = config, file
        self.template = Template(target.tokenizer, config.template_arguments)
        self.generator = Generator(target, config)

    def run(self, prompts: Sequence[Prompt], total: int) -> None:
        """Turn by turn: all first answers, then all second ones, and so on."""
        waiting = [_Conversation(prompt, self._opening(prompt)) for prompt in prompts]
        start, tokens = time.perf_counter(), 0
        with progress_bar() as bar:
            task = bar.add_task("regenerate", total=total, completed=total - len(waiting), detail="")
            while waiting:
                waiting, round_ = [], waiting
                for conversation, answer, finished in self._answer(round_):
                    tokens += len(answer)
                    if finished and conversation.turn < len(conversation.prompt.turns):
                        waiting.append(conversation)
                    else:
                        self.file.write(conversation.line(finished) + "\n")
                        _flush(self.file)
                        bar.advance(task)
                    bar.update(task, detail=f"{tokens / (time.perf_counter() - start):.0f} tok/s")

    def _opening(self, prompt: Prompt) -> list[Message]:
        system = prompt.system or self.config.system_prompt
        return [{"role": "system", "content": system}] if system else []

    def _answer(self, conversations: list[_Conversation]) -> Iterator[tuple[_Conversation, list[int], bool]]:
        """The next answer of each conversation, as they end."""
        for conversation in conversations:
            turn = conversation.prompt.turns[conversation.turn]
            conversation.messages.append({"role": "user", "content": turn})
        prompts = [self.template.prompt(conversation.messages) for conversation in conversations]
        names = [f"{c.prompt.id}.{c.turn}.{self.config.seed}" for c in conversations]
        for index, answer, finished in self.generator.generate(prompts, names):
            conversation = conversations[index]
            text = str(
                self.template.tokenizer.decode(answer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            )
            text = text if finished else text.rstrip("\ufffd")  # a character that was cut in its middle
            conversation.messages.append({"role": "assistant", "content": text})
            conversation.turn += 1
            conversation.tokens += len(answer)
            yield conversation, answer, finished


class Generator:
    """Batched decoding: rows of like length start together, and leave the batch when they end."""

    def __init__(self, target: Target, config: DataConfig):
        self.target, self.config = target, config
        self.ends = torch.tensor(sorted(target.eos_token_ids), device=target.device)

    @cached_property
    def model(self) -> PreTrainedModel:
        return self.target.load_model()

    def generate(self, prompts: Sequence[list[int]], names: Sequence[str]) -> Iterator[tuple[int, list[int], bool]]:
        """Answer token lists.

        Args:
            prompts: token ids; those that leave no room (in the target's context for an answer, or in a sample for any
                of it) are given none, so that their samples are counted as dropped.
            names: what each prompt's draws are seeded by, so that they depend on neither order nor batch.

        Yields:
            index into `prompts`, the new token ids (end token included), whether the end token was written.
        """
        context = getattr(self.target.config, "max_position_embeddings", None) or math.inf
        room = min(context - self.config.max_new_tokens, self.config.max_length - 1)
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        while order and len(prompts[order[0]]) > room:
            yield order.pop(0), [], False
        while order:
            size = min(self.config.batch_size, max(1, PREFILL_TOKENS // len(prompts[order[0]])))
            batch, order = order[:size], order[size:]
            yield from self._decode([prompts[index] for index in batch], [names[index] for index in batch], batch)

    @torch.inference_mode()
    def _decode(
        self, prompts: list[list[int]], names: list[str], indices: list[int]
    ) -> Iterator[tuple[int, list[int], bool]]:
        device, width = self.target.device, max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        draws = [torch.Generator().manual_seed(int(digest(name), 16) % 2**63) for name in names]
        answers: list[list[int]] = [[] for _ in prompts]
        rows = list(range(len(prompts)))
        for _ in range(self.config.max_new_tokens):
            logits = self.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
            ).logits[:, -1]
            tokens = self._choose(logits, [draws[row] for row in rows])
            ended = torch.isin(tokens, self.ends)
            for row, token in zip(rows, tokens.tolist(), strict=True):
                answers[row].append(token)
            going = (~ended).nonzero()[:, 0]
            yield from (
                (indices[row], answers[row], True) for row, end in zip(rows, ended.tolist(), strict=True) if end
            )
            rows = [rows[i] for i in going.tolist()]
            if not rows:
                return
            if len(rows) < len(tokens):
                cache.reorder_cache(going)  # type: ignore[arg-type]  # unlike batch_select_indices, linear attention's states know it too
                mask, positions, tokens = mask[going], positions[going], tokens[going]
            ids, positions = tokens[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        yield from ((indices[row], answers[row], False) for row in rows)

    def _choose(self, logits: Tensor, draws: list[torch.Generator]) -> Tensor:
        """The next token of each row, [B, V] -> int64 [B]: the likeliest, or drawn with temperature and top-p."""
        if not self.config.temperature:
            return logits.argmax(-1)
        probabilities = torch.softmax(logits.float() / self.config.temperature, -1)
        ordered, tokens = probabilities.sort(-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= self.config.top_p] = 0
        uniform = torch.tensor([torch.rand((), generator=draw).item() for draw in draws], device=logits.device)
        cumulative = ordered.cumsum(-1)
        choice = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)
        return tokens.gather(-1, choice.clamp(max=tokens.shape[-1] - 1))[:, 0]
