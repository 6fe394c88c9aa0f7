"""What a draft is judged on: questions files, and the prompts that a run held out."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdraft.data.regenerate import read_conversations
from sparkdraft.data.samples import CONVERSATIONS, INDEX
from sparkdraft.data.template import Message, Template
from sparkdraft.decoding.judgement import spread
from sparkdraft.errors import UserError
from sparkdraft.files import read_json
from sparkdraft.run import Run


@dataclass(frozen=True)
class Question:
    """One chat turn to be answered."""

    id: str
    kind: str
    messages: tuple[tuple[str, str], ...]
    """(role, content) up to and with the user turn."""

    def tokens(self, template: Template) -> list[int]:
        """The prompt as the target's chat template gives it to serving."""
        chat: list[Message] = [{"role": role, "content": content} for role, content in self.messages]
        return template.prompt(chat)


def load_questions(path: Path, limit: int | None) -> list[Question]:
    """Read a questions file: JSONL in Spec-Bench's form (`question_id`, `category`, `turns`); the first turn is asked.
    With a limit, the questions are spread over the file, so that every category keeps its share.

    Raises:
        UserError: the file is missing, empty, or has a line of another form (named).
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # other line separators are text
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The questions file {path} cannot be read: {error}") from error
    questions = [_question(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise UserError(f"The questions file {path} holds no questions.")
    return spread(questions, limit)


def _question(line: str, place: str) -> Question:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place} is not valid JSON: {error}") from error
    turns = row.get("turns") if isinstance(row, dict) else None
    if not (isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0].strip()):
        raise UserError(f"{place}: a question needs `turns`, a list whose first entry is a text.")
    return Question(str(row.get("question_id", place)), str(row.get("category", "all")), (("user", turns[0]),))


def held_out_questions(run: Run, limit: int | None) -> list[Question]:
    """The prompts of a run that were never trained on, up to their first user turn.

    Raises:
        UserError: the run held nothing out.
    """
    rows = read_json(run.samples / INDEX)["samples"]
    names = {row["id"].partition(".")[0] for row in rows if row["split"] == "held_out"}
    questions = []
    for name, row in read_conversations(run.samples / CONVERSATIONS).items():
        if name in names:
            opening = []
            for message in row["messages"]:
                opening.append((message["role"], message["content"]))
                if message["role"] == "user":
                    break
            questions.append(Question(name, row["kind"], tuple(opening)))
    if not questions:
        raise UserError(
            "The run held no prompts out. Set evaluate.questions to a questions file, or raise data.held_out."
        )
    return spread(sorted(questions, key=lambda question: question.kind), limit)
