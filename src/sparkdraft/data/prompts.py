"""Where prompts come from: the built-in ones, local JSONL files, and `datasets`.

A row is read in any of three forms: ShareGPT (`conversations` with `from`/`value`), OpenAI (`messages` with
`role`/`content`), or prompts alone (`turns`, a list, or `prompt`, a text). `kind` or `category` names its kind.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from sparkdraft.config import DataConfig, Source
from sparkdraft.errors import UserError

BUILTIN = files("sparkdraft.data") / "builtin"

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}

# The plain form is the most frequent one, as it is in benchmarks.
_SUMMARISE = (
    "Summarize: {text}",
    "Summarize: {text}",
    "Summarize: {text}",
    "Summarize: {text}",
    "Summarize the following article in three sentences.\n\n{text}",
    "{text}\n\nSummarize the text above in one short paragraph.",
    "Write a summary of this article:\n\n{text}",
    "What are the key points of this text?\n\n{text}",
    "{text}\n\nTL;DR",
    "Give me the gist of this in two sentences:\n\n{text}",
    "Please summarise the text below for someone in a hurry.\n\n{text}",
    "Text:\n{text}\n\nSummary:",
    "Condense the following into a short abstract.\n\n{text}",
    "{text}\n\nList the main facts of this text as bullet points.",
    "What is this text about? Answer briefly.\n\n{text}",
)
_ASK = (
    "{context}\n\nQuestion: {question}",
    "Context: {context}\n\nAnswer the question using the context above. {question}",
    "{context}\n\n{question}",
    "Read the passages and answer the question.\n\n{context}\n\nQuestion: {question}\nAnswer:",
    "Use only this information:\n{context}\n\n{question}",
    "Documents:\n\n{context}\n\nAnswer from these documents: {question}",
    "I found this text:\n\n{context}\n\nCan you tell me: {question}",
)


@dataclass(frozen=True)
class Prompt:
    """A conversation's user turns, and the answers where the source has some."""

    kind: str
    turns: tuple[str, ...]
    answers: tuple[str, ...] = ()
    system: str | None = None

    @property
    def id(self) -> str:
        """Hash of what is asked: the same prompt has the same id wherever it comes from."""
        return digest([self.system, *self.turns])


def digest(value: Any) -> str:
    """16 hexadecimal digits of a JSON-able value."""
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()[:16]


def load_prompts(config: DataConfig) -> tuple[list[Prompt], int]:
    """All prompts of all sources, each once, and how many exact duplicates were dropped.

    Raises:
        UserError: a source is missing, empty, or has a row of no known form (named with its line).
    """
    kept: dict[str, Prompt] = {}
    total = 0
    for source in config.sources:
        prompts = list(_read(source))
        if not prompts:
            raise UserError(f"data.sources: {source.name} holds no prompts.")
        if source.limit is not None:
            prompts = sorted(prompts, key=lambda prompt: prompt.id)[: source.limit]
        total += len(prompts)
        for prompt in prompts:
            kept.setdefault(prompt.id, prompt)
    return list(kept.values()), total - len(kept)


def is_held_out(prompt_id: str, config: DataConfig) -> bool:
    """Whether a prompt is never trained on: decided by its id alone, so by prompt and not by line."""
    return int(digest([prompt_id, config.seed]), 16) / 16**16 < config.held_out


def _read(source: Source) -> Iterator[Prompt]:
    if source.name == "builtin":
        return _builtin()
    path = Path(source.name).expanduser()
    if path.suffix in (".jsonl", ".json") or path.is_file():
        return _read_jsonl(path)
    return _read_dataset(source)


def _read_jsonl(path: Path) -> Iterator[Prompt]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        row = json.loads(line)
                    except json.JSONDecodeError as error:
                        raise UserError(f"{path}, line {number} is not valid JSON: {error}") from error
                    yield _prompt(row, path.stem, f"{path}, line {number}")
    except OSError as error:
        raise UserError(
            f"data.sources: {path} cannot be read ({error.strerror}). Give a .jsonl file, a `datasets` name or `builtin`."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error


def _read_dataset(source: Source) -> Iterator[Prompt]:
    import datasets

    try:
        if (Path(source.name) / "dataset_info.json").is_file():
            rows = datasets.load_from_disk(source.name)
        elif (Path(source.name) / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(source.name)[source.split]
        else:
            rows = datasets.load_dataset(source.name, split=source.split)
    except Exception as error:  # the library raises a dozen unrelated types
        raise UserError(
            f"data.sources: {source.name!r} is neither a file here nor a dataset that could be loaded "
            f"(split {source.split!r}; {type(error).__name__}: {error})."
        ) from error
    for number, row in enumerate(rows):
        yield _prompt(row, Path(source.name).name, f"{source.name}, row {number}")


def _prompt(row: Any, stem: str, place: str) -> Prompt:
    """One row of any of the three forms."""
    if not isinstance(row, dict):
        raise UserError(f"{place}: a row must be an object, not {type(row).__name__}.")
    kind = str(row.get("kind") or row.get("category") or stem)
    if row.get("conversations") or row.get("messages"):
        return _conversation(row.get("conversations") or row["messages"], kind, place)
    turns = row.get("turns") or row.get("prompt")
    turns = [turns] if isinstance(turns, str) else turns
    if not (isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns)):
        raise UserError(
            f"{place}: none of `conversations`, `messages`, `turns` and `prompt` holds a conversation; "
            f"the row has {sorted(map(str, row))}."
        )
    return Prompt(kind, tuple(turns))


def _conversation(messages: Any, kind: str, place: str) -> Prompt:
    """Turns of user and assistant in alternation, a system message before them if there is one."""
    roles, contents = [], []
    for message in messages if isinstance(messages, list) else [messages]:
        role = _ROLES.get(str(message.get("role") or message.get("from"))) if isinstance(message, dict) else None
        content = (message.get("content") or message.get("value")) if role else None
        if role is None or not isinstance(content, str):
            raise UserError(f"{place}: a message needs a role of {sorted(_ROLES)} and a text; got {str(message)[:80]}.")
        roles.append(role)
        contents.append(content)
    system = contents.pop(0) if roles[:1] == ["system"] else None
    roles = roles[1:] if system is not None else roles
    if not roles or any(role != ("user", "assistant")[i % 2] for i, role in enumerate(roles)):
        raise UserError(f"{place}: user and assistant must alternate, the user first; got {roles}.")
    return Prompt(kind, tuple(contents[0::2]), tuple(contents[1::2]), system)


def _builtin() -> Iterator[Prompt]:
    """The prompts written for this project: one file a kind, and passages from which summaries and questions are made."""
    for file in sorted(BUILTIN.iterdir(), key=lambda file: file.name):
        if file.name == "forms.json":
            yield from _filled(json.loads(file.read_text(encoding="utf-8")))
        if not file.name.endswith(".jsonl"):
            continue
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
        if file.name == "passages.jsonl":
            yield from _passages(rows)
        else:
            yield from (Prompt(file.name.removesuffix(".jsonl"), tuple(row["turns"])) for row in rows)


def _passages(rows: list[dict[str, Any]]) -> Iterator[Prompt]:
    """A summary of each passage, and two questions on it among up to two other passages; all choices by hash."""
    for number, row in enumerate(rows):
        choice = int(digest(row["text"]), 16)
        yield Prompt("summarising", (_SUMMARISE[choice % len(_SUMMARISE)].format(text=row["text"]),))
        for offset, question in enumerate(row["questions"][:2]):
            others = (choice >> (8 * (offset + 1))) % 3
            texts = [row["text"], *(rows[(number + 37 * (i + 1 + offset)) % len(rows)]["text"] for i in range(others))]
            texts.sort(key=digest)
            form = _ASK[(choice >> (4 * offset)) % len(_ASK)]
            yield Prompt("passages", (form.format(context="\n\n".join(texts), question=question),))


def _filled(written: dict[str, Any]) -> Iterator[Prompt]:
    """Forms ("Explain {concept} to {audience}.") with their slots filled from lists, `count` ways each, chosen by hash. A
    digit after a slot's name asks for another entry of the same list."""
    for form in written["forms"]:
        slots = {slot: written["lists"][slot.rstrip("0123456789")] for slot in re.findall(r"{(\w+)}", form["text"])}
        choices = (
            {slot: values[int(digest([form["text"], slot, n]), 16) % len(values)] for slot, values in slots.items()}
            for n in range(50 * form["count"])
        )
        texts = (form["text"].format(**choice) for choice in choices if len(set(choice.values())) == len(choice))
        for text in itertools.islice(dict.fromkeys(texts), form["count"]):
            yield Prompt(form["kind"], (text,))
