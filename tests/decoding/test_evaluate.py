"""Judging: what is refused before anything is decoded, the reports of a judgement, and the script around it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sparkdraft.config import EvaluateConfig
from sparkdraft.decoding.evaluate import check_draft, judge
from sparkdraft.decoding.questions import Question
from sparkdraft.errors import UserError
from sparkdraft.files import read_json

SCRIPT = Path(__file__).parents[2] / "eval" / "acceptance.py"
FEW = EvaluateConfig(engine="reference", max_new_tokens=12)


def question(text: str, number: int = 0) -> Question:
    return Question(str(number), "ab"[number % 2], (("user", text),))


@pytest.fixture
def changed(warm_draft, tmp_path):
    """A function that gives the draft's directory with other entries in its config.json; None removes one."""

    def make(**entries) -> Path:
        config = read_json(warm_draft / "config.json") | entries
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        (tmp_path / "model.safetensors").touch()
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"target_num_layers": 32}, "another target.*layers 32 against 30"),
        ({"vocab_size": 1000, "target_hidden_size": 64}, "another target.*hidden size 64.*vocabulary 1000"),
        ({"target_hidden_size": None, "hidden_size": 64}, "another target.*hidden size 64"),
        ({"draft_vocab_size": None}, "is no EAGLE-3 draft"),
    ],
)
def test_a_draft_of_another_target_is_refused(target, changed, entries, message):
    with pytest.raises(UserError, match=message):
        check_draft(target, changed(**entries))


def test_a_directory_that_is_no_draft_is_refused(target, changed, tmp_path):
    with pytest.raises(UserError, match=r"holds no config\.json"):
        check_draft(target, tmp_path)
    (changed() / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds no model\.safetensors"):
        check_draft(target, tmp_path)


def test_a_draft_that_records_less_of_its_target_is_taken(target, changed):
    check_draft(target, changed(target_num_layers=None, target_hidden_size=None))


def test_a_question_without_room_for_its_answer_is_named(target, warm_draft, tmp_path):
    questions = [question("Hi"), question("word " * 8180, 1)]
    with pytest.raises(UserError, match=r"Question 1 has .* do not fit into the 8192 positions"):
        judge(target, warm_draft, questions, FEW, {}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_judging_writes_the_reports(target, warm_draft, tmp_path):
    """The reference engine end to end: counts.json, report.json, report.md, report.html."""
    questions = [question("Hi"), question("Name a fruit.", 1)]
    report = judge(target, warm_draft, questions, FEW, {}, tmp_path / "out")
    assert read_json(tmp_path / "out" / "report.json") == report
    assert report["overall"]["prompts"] == 2
    assert set(report["suites"]) == {"a", "b"}
    assert report["tokens_per_second"]["ratio"] > 0
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".md", ".html"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--questions", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--questions", "nowhere.jsonl", "--k", "0"], "0 is not a positive number"),
        (["--questions", "nowhere.jsonl", "--limit", "-1"], "-1 is not a positive number"),
    ],
)
def test_the_script_ends_with_2_where_the_input_is_wrong(warm_draft, tmp_path, arguments, message):
    command = [sys.executable, SCRIPT, "--draft", warm_draft, "--out", tmp_path / "out", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "out").exists()
