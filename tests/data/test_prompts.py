"""Sources of prompts: every form, what is wrong with a row, duplicates, the split."""

import json
import re
from collections import Counter

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdraft.config import DataConfig, Source
from sparkdraft.data.prompts import BUILTIN, Prompt, is_held_out, load_prompts
from sparkdraft.errors import UserError

FORMS = [
    {
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "Hi"},
            {"from": "gpt", "value": "Hello"},
        ]
    },
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
        ]
    },
]


def config_of(*names) -> DataConfig:
    return DataConfig(sources=[Source(name=str(name)) for name in names])


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("row", FORMS)
def test_conversations_of_either_form_are_the_same(tmp_path, row):
    (prompt,), _ = load_prompts(config_of(write(tmp_path / "chat.jsonl", [row])))
    assert prompt == Prompt("chat", ("Hi",), ("Hello",), "Be brief.")


def test_prompts_alone_and_kinds(tmp_path):
    rows = [{"prompt": "One", "category": "a"}, {"turns": ["Two", "Three"], "kind": "b"}, {"prompt": "Four"}]
    prompts, _ = load_prompts(config_of(write(tmp_path / "mine.jsonl", rows)))
    assert [(p.turns, p.kind) for p in prompts] == [(("One",), "a"), (("Two", "Three"), "b"), (("Four",), "mine")]


def test_a_dataset_on_disk(tmp_path):
    datasets.Dataset.from_list([{"prompt": "One"}, {"prompt": "Two"}]).save_to_disk(tmp_path / "set")
    prompts, _ = load_prompts(config_of(tmp_path / "set"))
    assert [p.turns for p in prompts] == [("One",), ("Two",)]


def test_exact_duplicates_are_dropped_and_counted(tmp_path):
    one = write(tmp_path / "a.jsonl", [{"prompt": "One"}, {"prompt": "Two"}, {"prompt": "One"}])
    other = write(tmp_path / "b.jsonl", [{"prompt": "Two"}, {"prompt": "Three"}])
    prompts, duplicates = load_prompts(config_of(one, other))
    assert [p.turns[0] for p in prompts] == ["One", "Two", "Three"]
    assert duplicates == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{broken", "line 1 is not valid JSON"),
        ('{"prompt": "x"}\n[1]\n', "line 2: a row must be an object"),
        ('{"text": "x"}\n', r"line 1: none of .*the row has \['text'\]"),
        ('{"turns": []}\n', "line 1: none of"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}\n', "user and assistant must alternate"),
        ('{"messages": [{"role": "alien", "content": "x"}]}\n', "a message needs a role"),
        ("", "holds no prompts"),
    ],
)
def test_bad_rows_are_named(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        load_prompts(config_of(path))
    assert "bad.jsonl" in str(caught.value)


@pytest.mark.parametrize("name", ["/nowhere/x.jsonl", "no-such-owner/no-such-dataset"])
def test_a_missing_source_is_named(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=name):
        load_prompts(config_of(name))


def test_limit_takes_the_same_ones_whatever_the_order(tmp_path):
    rows = [{"prompt": f"Prompt {n}"} for n in range(40)]
    chosen = []
    for name, order in (("a", rows), ("b", rows[::-1])):
        path = write(tmp_path / f"{name}.jsonl", order)
        prompts, _ = load_prompts(DataConfig(sources=[Source(name=str(path), limit=7)]))
        chosen.append({p.turns for p in prompts})
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 7


@given(st.lists(st.text(min_size=1), min_size=1, max_size=3), st.floats(0.01, 0.99), st.integers(0, 5))
def test_the_split_depends_on_the_prompt_alone(turns, share, seed):
    config = DataConfig(held_out=share, seed=seed)
    one, other = Prompt("a", tuple(turns)), Prompt("b", tuple(turns), ("answer",))
    assert is_held_out(one.id, config) == is_held_out(other.id, config)


def test_the_builtin_prompts():
    """At least 1,500 in at least ten kinds, none twice, some with two turns, and the split has about its share."""
    prompts, duplicates = load_prompts(DataConfig())
    kinds = Counter(p.kind for p in prompts)
    assert len(prompts) >= 1500
    assert len([kind for kind, count in kinds.items() if count >= 50]) >= 10
    assert duplicates == 0
    assert sum(len(p.turns) > 1 for p in prompts) > 50
    assert 0.03 < sum(is_held_out(p.id, DataConfig()) for p in prompts) / len(prompts) < 0.07


def test_passages_stand_before_their_question(tmp_path, monkeypatch):
    """As retrieval gives them: one to three passages, the asked one among them, in several phrasings, each time the same."""
    rows = [
        {"title": f"T{n}", "text": f"Passage <{n}>.", "questions": [f"What is {n}{q}?" for q in "abc"]}
        for n in range(90)
    ]
    write(tmp_path / "passages.jsonl", rows)
    monkeypatch.setattr("sparkdraft.data.prompts.BUILTIN", tmp_path)
    prompts, _ = load_prompts(DataConfig())
    assert prompts == load_prompts(DataConfig())[0]
    summaries = [p.turns[0] for p in prompts if p.kind == "summarising"]
    assert all(row["text"] in text for row, text in zip(rows, summaries, strict=True))
    assert len({text.replace(row["text"], "") for row, text in zip(rows, summaries, strict=True)}) >= 8
    asked = [p.turns[0] for p in prompts if p.kind == "passages"]
    counts = Counter()
    for row, pair in zip(rows, zip(asked[::2], asked[1::2], strict=True), strict=True):
        for text, question in zip(pair, row["questions"], strict=False):
            assert 0 <= text.index(row["text"]) < text.index(question)
            counts[sum(other["text"] in text for other in rows)] += 1
    assert set(counts) == {1, 2, 3}


def test_forms_are_filled_as_often_as_they_say():
    """Every slot filled, no text twice, no entry beside itself."""
    written = json.loads((BUILTIN / "forms.json").read_text(encoding="utf-8"))
    texts = [prompt.turns[0] for prompt in load_prompts(DataConfig())[0]]
    assert not [text for form in written["forms"] for text in texts if text == form["text"]]
    for form in written["forms"]:
        pattern = "(.+)".join(map(re.escape, re.split(r"{\w+}", form["text"])))
        assert sum(bool(re.fullmatch(pattern, text)) for text in texts) >= form["count"]
