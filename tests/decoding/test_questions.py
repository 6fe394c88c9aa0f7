"""Questions files and held-out prompts."""

import json

import pytest

from sparkdraft.decoding.judgement import spread
from sparkdraft.decoding.questions import Question, held_out_questions, load_questions
from sparkdraft.errors import UserError
from sparkdraft.files import read_json

ROWS = [{"question_id": n, "category": "ab"[n % 2], "turns": [f"Question {n}?", "And then?"]} for n in range(6)]


def test_spec_bench_form(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    questions = load_questions(path, None)
    assert questions[1] == Question("1", "b", (("user", "Question 1?"),))
    assert [q.id for q in load_questions(path, 3)] == ["0", "2", "4"]
    assert spread(questions, 100) == questions


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no questions"),
        ("{", "line 1 is not valid JSON"),
        ('{"turns": [""]}', "line 1: a question needs"),
        ("[]", "line 1"),
    ],
)
def test_bad_files_are_named(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        load_questions(path, None)
    with pytest.raises(UserError, match=r"nowhere\.jsonl cannot be read"):
        load_questions(tmp_path / "nowhere.jsonl", None)


def test_held_out_questions_are_those_that_were_not_trained_on(captured):
    rows = read_json(captured.samples / "index.json")["samples"]
    expected = {row["id"] for row in rows if row["split"] == "held_out"}
    questions = held_out_questions(captured, None)
    assert {question.id for question in questions} == expected
    assert all(role == "user" for question in questions for role, _ in question.messages)
