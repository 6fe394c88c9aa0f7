"""Reports from stored counts: the contract of report.json, the same figures in the page, and hostile text."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdraft.decoding.judgement import Answer, Judgement, Speed
from sparkdraft.drafts.counts import Counts
from sparkdraft.report.build import build_report, make_report

FACTS = {
    "target": {"name": "the target", "path": "/t", "fingerprint": "f00"},
    "draft": {"path": "/d", "sha256": "abc"},
    "bytes": {"plain_token": 1000, "verify": 1010, "verify_estimated": False, "draft_step": 50},
    "versions": {"sparkdraft": "0"}, "git_revision": "r", "machine": "m",
}  # fmt: skip
EVIL = "<script>alert(1)</script>|x\n&$\\frac{"


def judgement(histograms: list[list[int]], kinds: list[str]) -> Judgement:
    answers = []
    for number, (histogram, kind) in enumerate(zip(histograms, kinds, strict=True)):
        counts = Counts(len(histogram) - 1, prompts=1, emitted=sum(n * (j + 1) for j, n in enumerate(histogram)))
        for accepted, times in enumerate(histogram):
            for _ in range(times):
                counts.observe(accepted)
        answers.append(Answer(str(number), kind, [1, 2], counts))
    return Judgement("vllm", 3, "float32", 96, answers, Speed(100, 2.0), Speed(80, 2.0))


def test_figures_and_contract():
    """Two kinds: 10 drafts with 0, 1, 2, 3 accepted 1, 2, 3, 4 times, and 4 drafts with none."""
    report = make_report(judgement([[1, 2, 3, 4], [4, 0, 0, 0]], ["a", "b"]), FACTS)
    a, overall = report["suites"]["a"], report["overall"]
    assert a["acceptance_rate_per_position"] == [0.9, 0.7, 0.4]
    assert a["acceptance_length"] == 3.0
    assert (overall["drafts"], overall["accepted"], overall["prompts"]) == (14, 20, 2)
    assert overall["acceptance_length"] == round(1 + 20 / 14, 4)  # sums before ratios: not the mean of 3 and 1
    assert overall["tokens_per_weight_read"] == round((1 + 20 / 14) / ((1010 + 3 * 50) / 1000), 4)
    assert report["tokens_per_second"] == {
        "with_draft": 50.0,
        "without_draft": 40.0,
        "ratio": 1.25,
        "acceptance_length": round(1 + 20 / 14, 4),
        "basis": "measured",
    }
    assert {item["basis"] for item in report["bandwidth"].values()} == {"measured"}
    assert "pays" in report["verdict"]


def test_a_draft_that_costs_more_than_it_gives_is_said():
    report = make_report(judgement([[10, 0, 0, 0]], ["a"]), FACTS)
    assert "does not pay" in report["verdict"]
    assert report["overall"]["tokens_per_weight_read"] < 1


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        (Speed(80, 2.0), "it is faster: 1.25 times"),
        (Speed(125, 2.0), "it is not faster: 0.80 times"),
        (None, "not compared"),
    ],
)
def test_the_verdict_says_what_the_clock_said(plain, said):
    found = judgement([[1, 2, 3, 4]], ["a"])
    found.baseline = plain
    assert said in make_report(found, FACTS)["verdict"]


def test_what_training_counted_stands_beside_what_serving_counts(tmp_path):
    """The best held-out evaluation, whose step is the exported one."""
    lines = [{"step": n, "loss": 1.0} for n in range(3)]
    for step, length in ((1, 1.5), (2, 2.25), (3, 2.0)):
        lines.append(
            {"step": step, "held_out_acceptance_length": length, "held_out_acceptance_rate_per_position": [0.5] * 3}
        )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = build_report(judgement([[1, 2, 3, 4]], ["a"]), FACTS, tmp_path, tmp_path / "metrics.jsonl")
    assert report["training"] == {"held_out_acceptance_length": 2.25, "steps": 3}
    page = (tmp_path / "report.html").read_text()
    assert "an acceptance length of 2.25 on held-out samples" in page
    assert page.count("<svg") == 4


def test_estimates_are_starred(tmp_path):
    facts = FACTS | {"bytes": FACTS["bytes"] | {"verify_estimated": True}}
    build_report(judgement([[1, 1, 1, 1]], ["a"]), facts, tmp_path, None)
    for name in ("report.md", "report.html"):
        assert "estimated: distinct experts" in (tmp_path / name).read_text()
        assert re.search(r"1,010\*", (tmp_path / name).read_text())
        assert not re.search(r"tokens per weight read[^|<(]*\d\.\d\d(?!\\?\*)", (tmp_path / name).read_text())
    assert (tmp_path / "report.html").read_text().count("2.16*") == 4  # verdict, tile, all, the one kind


def test_hostile_text_is_escaped_and_figures_are_those_of_the_json(tmp_path):
    facts = FACTS | {"target": FACTS["target"] | {"name": EVIL}}
    report = build_report(judgement([[1, 2, 3, 4], [4, 0, 0, 1]], ["a", EVIL]), facts, tmp_path, None)
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    for figures in (report["overall"], *report["suites"].values()):
        cells = [str(figures["prompts"]), str(figures["drafts"]), f"{figures['acceptance_length']:.2f}"]
        cells += [f"{rate:.1%}" for rate in figures["acceptance_rate_per_position"]]
        assert "".join(f"<td>{cell}</td>" for cell in cells) in page
    assert not re.search(r'(src|href)="(?!#)', page)  # self-contained


@given(st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1, max_size=5))
def test_counts_survive_json_and_keep_their_bounds(histograms):
    before = judgement(histograms, [str(n % 2) for n in range(len(histograms))])
    after = Judgement.from_json(before.to_json())
    assert after == before
    overall = after.overall()
    assert 1 <= overall.acceptance_length <= 4
    rates = overall.acceptance_rate_per_position
    assert rates == sorted(rates, reverse=True)
    assert Counts.total(3, after.by_kind().values()) == overall
