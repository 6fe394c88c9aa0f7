"""report.json, report.md and report.html from the counts of an engine.

report.json: `overall` and, under `suites`, each kind of prompt hold `acceptance_length`, `acceptance_rate_per_position`,
`drafts`, `accepted`, `emitted`, `prompts`, `tokens_per_weight_read`; beside them stand `k`, `engine`, `target`, `draft`,
`tokens_per_second`, `training` and `bandwidth`, whose figures say whether they were measured or estimated.
"""

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from rich.console import Console

from sparkdraft.bandwidth.bytes import Bytes
from sparkdraft.decoding.judgement import Judgement
from sparkdraft.drafts.counts import Counts
from sparkdraft.files import read_jsonl, write_json, write_text
from sparkdraft.report.plots import bars, curves

SCHEMA_VERSION = 1
_CLOCK_TOLERANCE = 1.1


def build_report(judgement: Judgement, facts: dict[str, Any], out: Path, metrics: Path | None) -> dict[str, Any]:
    """Write the three reports.

    Args:
        judgement: the counts.
        facts: `target`, `draft`, `bytes` and provenance, as `decoding.evaluate.judge` stores them.
        out: the report directory.
        metrics: metrics.jsonl of the training, if there was one.

    Returns:
        the content of report.json.
    """
    history = read_jsonl(metrics) if metrics else []
    report = make_report(judgement, facts) | {"training": _training(history)}
    environment = Environment(
        loader=PackageLoader("sparkdraft.report"),
        autoescape=select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda value: f"{value:.1%}"
    environment.filters["figure"] = lambda value: f"{value:.2f}"
    values = {
        "report": report,
        "facts": facts,
        "plots": _plots(report, history),
        "title": facts["target"]["name"],
        "star": _star(report),
    }
    write_json(out / "report.json", report)
    write_text(out / "report.md", environment.get_template("report.md").render(**values))
    write_text(out / "report.html", environment.get_template("report.html").render(**values))
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"evaluate: {report['verdict']}", markup=False)
    console.print(f"evaluate: the report is {out / 'report.html'}", markup=False)
    return report


def make_report(judgement: Judgement, facts: dict[str, Any]) -> dict[str, Any]:
    """The content of report.json."""
    read = Bytes(**facts["bytes"])
    overall = _figures(judgement.overall(), read)
    with_draft, without = (
        round(speed.tokens_per_second, 2) if speed else None for speed in (judgement.speed, judgement.baseline)
    )
    kind_of_bytes = "estimated" if read.verify_estimated else "measured"
    report = {
        "schema_version": SCHEMA_VERSION,
        "engine": judgement.engine,
        "k": judgement.k,
        "dtype": judgement.dtype,
        "max_new_tokens": judgement.max_new_tokens,
        "target": facts["target"],
        "draft": facts["draft"],
        "overall": overall,
        "suites": {kind: _figures(counts, read) for kind, counts in judgement.by_kind().items()},
        "tokens_per_second": {
            "with_draft": with_draft,
            "without_draft": without,
            "ratio": round(with_draft / without, 3) if with_draft and without else None,
            "acceptance_length": round(judgement.timed().acceptance_length, 4),
            "basis": "measured",
        },
        "bandwidth": {
            "plain_token_bytes": {"value": read.plain_token, "basis": "measured"},
            "verify_bytes": {"value": read.verify, "basis": kind_of_bytes},
            "draft_step_bytes": {"value": read.draft_step, "basis": "measured"},
            "ceiling_tokens_per_weight_read": {
                "value": round(read.tokens_per_weight_read(judgement.k + 1, judgement.k), 4),
                "basis": kind_of_bytes,
            },
        },
        "provenance": {name: facts[name] for name in ("versions", "git_revision", "machine")},
    }
    report["verdict"] = verdict(report)
    return report


def _figures(counts: Counts, read: Bytes) -> dict[str, Any]:
    return {
        "prompts": counts.prompts,
        "drafts": counts.drafts,
        "accepted": counts.accepted,
        "emitted": counts.emitted,
        "acceptance_length": round(counts.acceptance_length, 4),
        "acceptance_rate_per_position": [round(rate, 4) for rate in counts.acceptance_rate_per_position],
        "tokens_per_weight_read": round(read.tokens_per_weight_read(counts.acceptance_length, counts.k), 4),
    }


def verdict(report: dict[str, Any]) -> str:
    """One sentence that a person can decide from: what the bytes say, and what the clock here said."""
    value, length = report["overall"]["tokens_per_weight_read"], report["overall"]["acceptance_length"]
    pays = "pays" if value > 1 else "does not pay"
    text = (
        f"The draft {pays} where decoding is bound by bandwidth: {value:.2f}{_star(report)} tokens per weight read "
        f"(acceptance length {length:.2f} at k = {report['k']})"
    )
    ratio, possible = report["tokens_per_second"]["ratio"], report["tokens_per_second"]["acceptance_length"]
    if ratio is None:
        return text + "; its speed was not compared."
    if ratio > _CLOCK_TOLERANCE * possible:  # a block takes no less time than one token
        return (
            text
            + f"; the speeds measured here do not compare ({ratio:.2f} times, where {possible:.2f} tokens a block were "
            "accepted): something else kept the machine busy."
        )
    faster = "faster" if ratio > 1 else "not faster"
    return text + f"; measured here, single stream, it is {faster}: {ratio:.2f} times the speed without it."


def _star(report: dict[str, Any]) -> str:
    """What is put behind every figure that rests on an estimate."""
    return "*" if report["bandwidth"]["verify_bytes"]["basis"] == "estimated" else ""


def _training(history: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What training counted on held-out samples at its best step, which is the one that is exported; beside what serving
    counts it shows a draft that does worse where it is used."""
    counted = [line for line in history if "held_out_acceptance_length" in line]
    if not counted:
        return None
    best = max(counted, key=lambda line: line["held_out_acceptance_length"])
    return {
        "held_out_acceptance_length": round(best["held_out_acceptance_length"], 4),
        "steps": len(best["held_out_acceptance_rate_per_position"]),
    }


def _plots(report: dict[str, Any], history: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(title, SVG) of every plot of the page."""
    rates = report["overall"]["acceptance_rate_per_position"]
    plots = [
        (
            "Acceptance rate per position",
            bars([str(i) for i in range(1, len(rates) + 1)], rates, "position", limit=1.0),
        ),
        (
            "Acceptance length per kind of prompt",
            bars(
                list(report["suites"]),
                [figures["acceptance_length"] for figures in report["suites"].values()],
                "acceptance length",
                horizontal=True,
                start=1.0,
            ),
        ),
    ]

    def curve(name: str) -> list[tuple[int, float]]:
        """A quantity of the training over its steps; of a list, what it says of the first draft token."""
        found = [(line["step"], line[name]) for line in history if name in line]
        return [(step, value[0] if isinstance(value, list) else value) for step, value in found]

    if losses := curve("loss"):
        plots.append(("Training loss", curves({"loss": losses}, "step")))
    if len(held_out := curve("held_out_acceptance_length")) > 1:
        plots.append(("Acceptance length on held-out samples, while training", curves({"held out": held_out}, "step")))
        accuracy = {"trained on": curve("accuracy_per_step"), "held out": curve("held_out_accuracy_per_step")}
        if all(accuracy.values()):
            plots.append(("Accuracy of the first draft token, at any position", curves(accuracy, "step")))
    return plots
