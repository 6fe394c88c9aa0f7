"""The same draft, prompts and precision in a real vLLM and in the reference decoder."""

import sys
from pathlib import Path

import pytest

from sparkdraft.data.template import Template
from sparkdraft.decoding.questions import Question
from sparkdraft.decoding.reference import run_reference
from sparkdraft.decoding.vllm_engine import run_vllm
from sparkdraft.drafts.eagle3 import Eagle3Draft
from sparkdraft.errors import UserError

TEXTS = [
    "What is the capital of France?", "List five colours.", "Hi", "Explain gravity to a child.",
    "Write a short poem about the sea.", "What is 12 times 12?", "Translate to French: good morning", "Who was Newton?",
]  # fmt: skip


@pytest.mark.vllm
def test_vllm_counts_what_the_reference_counts(target, warm_draft, tmp_path):
    """Float32, greedy, k = 3: acceptance within 1% and the same texts, with and without the draft."""
    questions = [Question(str(n), "all", (("user", text),)) for n, text in enumerate(TEXTS)]
    template = Template(target.tokenizer, {})
    ours = run_reference(target, Eagle3Draft.load(warm_draft), template, questions, 3, 48, baseline=False)
    theirs = run_vllm(target, warm_draft, template, questions, 3, 48, baseline=False, log=tmp_path)
    assert [answer.token_ids for answer in ours.answers] == [answer.token_ids for answer in theirs.answers]
    one, other = ours.overall(), theirs.overall()
    assert one.accepted > 0
    assert one.emitted == other.emitted
    assert other.acceptance_length == pytest.approx(one.acceptance_length, rel=0.01)
    assert other.drafts == pytest.approx(one.drafts, rel=0.01)
    assert theirs.speed.tokens_per_second > 0
    assert [path.name for path in tmp_path.iterdir()] == ["vllm.log"]


@pytest.mark.vllm
def test_what_vllm_says_when_it_fails_is_shown(target, warm_draft, tmp_path):
    broken = tmp_path / "draft"
    broken.mkdir()
    (broken / "config.json").write_text((warm_draft / "config.json").read_text())
    with pytest.raises(UserError, match=r"(?s)vLLM could not decode.*model weights.*vllm\.log") as caught:
        run_vllm(
            target, broken, Template(target.tokenizer, {}), [Question("1", "a", (("user", "Hi"),))], 3, 8,
            baseline=False, log=tmp_path / "log",
        )  # fmt: skip
    assert "Engine core initialization failed" not in str(caught.value)


def test_nothing_that_vllm_started_outlives_it(target, warm_draft, tmp_path, monkeypatch):
    """A process that dies and leaves one behind, as vLLM leaves its engine, which holds the memory."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\nsleep 300 &\necho $! > {tmp_path}/left\necho 'SomeError: no luck'\nexit 3\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr("sparkdraft.decoding.vllm_engine.check_installed", lambda: None)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    with pytest.raises(UserError, match=r"\(exit code 3\): SomeError: no luck"):
        run_vllm(
            target, warm_draft, Template(target.tokenizer, {}), [Question("1", "a", (("user", "Hi"),))], 3, 8,
            baseline=False, log=tmp_path / "log",
        )  # fmt: skip
    state = Path(f"/proc/{(tmp_path / 'left').read_text().strip()}/stat")
    assert not state.exists() or ") Z " in state.read_text()
    assert [path.name for path in (tmp_path / "log").iterdir()] == ["vllm.log"]
