"""The prepare stage: what it stores, what it drops, when it refuses, and how it goes on."""

import json

import pytest
import torch

from sparkdraft.config import Config, DataConfig, Source
from sparkdraft.data import samples as module
from sparkdraft.data.prompts import is_held_out, load_prompts
from sparkdraft.data.samples import load_samples, make_samples, prepare
from sparkdraft.errors import UserError
from sparkdraft.files import read_json
from sparkdraft.run import Run

QUESTIONS = [f"What is {n} + 1?" for n in range(24)]


def conversation(question: str, answer: str, kind: str = "sums") -> dict:
    return {"kind": kind, "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture
def opened(tmp_path):
    """A function that gives (config, run) for rows of conversations, with settings of the data."""

    def make(rows: list[dict], **settings) -> tuple[Config, Run]:
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataConfig(sources=[Source(name=str(source))], **{"regenerate": False, "held_out": 0.3, **settings})
        config = Config(name="run", runs_dir=str(tmp_path), data=data)
        return config, Run.open(config)

    return make


ROWS = [conversation(question, f"It is {n + 1}.", "odd" if n % 2 else "even") for n, question in enumerate(QUESTIONS)]


def test_samples_come_back_as_they_were_made(opened, target):
    config, run = opened([*ROWS, ROWS[0]])
    prepare(config, run)
    samples = load_samples(run.samples)
    prompts, _ = load_prompts(config.data)
    assert [sample.id for sample in samples] == [prompt.id for prompt in prompts]
    for sample, prompt in zip(samples, prompts, strict=True):
        assert (sample.token_ids.dtype, sample.loss_mask.dtype) == (torch.int32, torch.bool)
        assert target.tokenizer.decode(sample.token_ids[sample.loss_mask]) == f"{prompt.answers[0]}<|im_end|>"
        assert (sample.kind, sample.split == "held_out") == (prompt.kind, is_held_out(prompt.id, config.data))
    index = read_json(run.samples / "index.json")
    assert (index["prompts"], index["duplicates"], index["dropped"]) == (len(ROWS), 1, 0)
    assert index["finish_reasons"] == {"stop": len(ROWS)}
    assert index["tokens"] == sum(len(sample.token_ids) for sample in samples)
    assert index["trained_tokens"] == sum(int(sample.loss_mask.sum()) for sample in samples)
    assert 0 < index["held_out"] < len(ROWS)


def test_every_turn_of_a_conversation_is_on_one_side_of_the_split(opened, target):
    """Also where the template makes a sample of each turn."""
    rows = [
        {
            "messages": [
                m for text in (question, "And again?") for m in conversation(text, "<think>x</think>y")["messages"]
            ]
        }
        for question in QUESTIONS
    ]
    config, _ = opened(rows)
    template = target.tokenizer.chat_template
    try:
        target.tokenizer.chat_template = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n"
            "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
        given = [module._given(prompt, config.data) for prompt in load_prompts(config.data)[0]]
        samples, dropped = make_samples(given, target, config.data)
    finally:
        target.tokenizer.chat_template = template
    assert (len(samples), dropped) == (2 * len(rows), 0)
    sides: dict[str, set[str]] = {}
    for sample in samples:
        name, turn = sample.id.split(".")
        assert turn in "01"
        sides.setdefault(name, set()).add(sample.split)
    assert all(len(side) == 1 for side in sides.values())
    assert set.union(*sides.values()) == {"train", "held_out"}


def test_finished_work_is_not_done_again_and_changed_input_is(opened, monkeypatch):
    config, run = opened(ROWS)
    prepare(config, run)
    before = (run.samples / "index.json").stat().st_mtime_ns
    prepare(*opened(ROWS))
    assert (run.samples / "index.json").stat().st_mtime_ns == before
    prepare(*opened(ROWS[1:]))
    assert len(load_samples(run.samples)) == len(ROWS) - 1
    prepare(*opened(ROWS[1:], max_length=45))
    assert max(len(sample.token_ids) for sample in load_samples(run.samples)) == 45


def test_a_stopped_prepare_keeps_its_answers_only_for_the_same_inputs(opened, monkeypatch):
    """A kill after the answers: they are there for the next start, and gone when a setting has changed."""

    def stop(*_):
        raise KeyboardInterrupt

    found = []

    def answer(prompts, target, config, path):
        found.append(path.exists())
        path.write_text("".join(json.dumps({"id": p.id, **conversation(p.turns[0], "Yes.")}) + "\n" for p in prompts))

    monkeypatch.setattr(module, "regenerate", answer)
    with monkeypatch.context() as patch:
        patch.setattr(module, "make_samples", stop)
        for settings in ({}, {}, {"max_new_tokens": 7}):
            config, run = opened(ROWS, regenerate=True, **settings)
            with pytest.raises(KeyboardInterrupt):
                prepare(config, run)
    assert found == [False, True, False]
    assert "prepare" not in run.manifest["stages"]
    assert not (run.samples / "index.json").exists()


@pytest.mark.parametrize(
    ("settings", "rows", "message"),
    [
        ({"max_length": 30}, ROWS, r"24 of 24 samples hold nothing.*data.max_length \(30 tokens\)"),
        ({}, [{"prompt": "Hi"}], "data.regenerate is false, but no row"),
    ],
)
def test_nothing_to_train_on_is_refused(opened, settings, rows, message):
    config, run = opened(rows, **settings)
    with pytest.raises(UserError, match=message):
        prepare(config, run)
    assert "prepare" not in run.manifest["stages"]


def test_some_that_hold_nothing_are_dropped_and_counted(opened):
    long = [conversation("Word " * 300 + str(n), "Yes.") for n in range(3)]
    config, run = opened([*ROWS, *long], max_length=100)
    prepare(config, run)
    assert len(load_samples(run.samples)) == len(ROWS)
    assert read_json(run.samples / "index.json")["dropped"] == 3


def test_damaged_samples_are_said(opened):
    config, run = opened(ROWS)
    prepare(config, run)
    file = run.samples / "samples.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UserError, match=r"cannot be read.*run prepare again"):
        load_samples(run.samples)
