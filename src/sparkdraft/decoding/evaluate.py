"""The evaluate stage: decode with the exported draft, count, report."""

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from sparkdraft.bandwidth.bytes import count_bytes
from sparkdraft.config import Config, EvaluateConfig
from sparkdraft.data.template import Template
from sparkdraft.decoding.judgement import Judgement
from sparkdraft.decoding.questions import Question, held_out_questions, load_questions
from sparkdraft.decoding.reference import run_reference
from sparkdraft.decoding.vllm_engine import run_vllm
from sparkdraft.drafts.eagle3 import WEIGHTS, Eagle3Draft
from sparkdraft.errors import UserError
from sparkdraft.files import disk_errors, read_json, sha256_file, write_json
from sparkdraft.report.build import build_report
from sparkdraft.run import Run, provenance
from sparkdraft.target import Target

COUNTS = "counts.json"


def evaluate(config: Config, run: Run) -> None:
    """Judge the draft of a run and write report/.

    Raises:
        UserError: nothing was exported, the questions or the engine are not to be had.
    """
    exported = run.stage_record("export")
    target = Target.open(_target_config(config))
    questions = run_questions(config.evaluate, run)
    inputs = {
        "draft": exported["sha256"],
        "target": target.fingerprint,
        "questions": [asdict(question) for question in questions],
        "evaluate": config.evaluate.model_dump(mode="json") | {"engine": choose_engine(config.evaluate)},
        "template": config.data.template_arguments,
    }
    with run.stage("evaluate", inputs) as stage:
        if not stage.needed and (run.report / "report.json").is_file():
            Console(stderr=True).print("evaluate: finished before, nothing has changed")
            return
        stage.needed = True
        arguments = config.data.template_arguments
        report = judge(target, run.draft, questions, config.evaluate, arguments, run.report, run.metrics)
        stage.facts.update(acceptance_length=report["overall"]["acceptance_length"], engine=report["engine"])


def _target_config(config: Config) -> Any:
    """The target in the dtype that it is judged in."""
    if config.evaluate.dtype == "auto":
        return config.target
    return config.target.model_copy(update={"dtype": config.evaluate.dtype})


def run_questions(settings: EvaluateConfig, run: Run) -> list[Question]:
    if settings.questions:
        return load_questions(Path(settings.questions), settings.limit)
    return held_out_questions(run, settings.limit)


def choose_engine(settings: EvaluateConfig) -> str:
    if settings.engine == "auto":
        return "vllm" if find_spec("vllm") else "reference"
    return settings.engine


def judge(
    target: Target, draft: Path, questions: list[Question], settings: EvaluateConfig, template_arguments: dict[str, Any],
    out: Path, metrics: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Judge any draft directory on any questions; writes counts.json and the report to `out` and returns the report.

    Raises:
        UserError: the draft is of another target; a question is too long; the engine is not installed or fails.
    """
    check_draft(target, draft)
    template = Template(target.tokenizer, template_arguments)
    check_lengths(target, template, questions, settings)
    common = (template, questions, settings.k, settings.max_new_tokens, settings.baseline)
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        if choose_engine(settings) == "vllm":
            judgement: Judgement = run_vllm(target, draft, *common, log=out)
        else:
            judgement = run_reference(target, Eagle3Draft.load(draft), *common)
        facts = {
            "target": {"name": target.name, "path": str(target.path), "fingerprint": target.fingerprint},
            "draft": {"path": str(draft), "sha256": sha256_file(draft / WEIGHTS)},
            "bytes": vars(count_bytes(target, draft, settings.k)),
            **provenance(),
        }
        write_json(out / COUNTS, {"judgement": judgement.to_json(), "facts": facts})
        return build_report(judgement, facts, out, metrics)


def check_draft(target: Target, draft: Path) -> None:
    """Refuse a directory that is no EAGLE-3 draft, and a draft of another target. Drafts of other trainers record less
    about their target: what is recorded is held against it.

    Raises:
        UserError: names what is missing or differs.
    """
    for name in ("config.json", WEIGHTS):
        if not (draft / name).is_file():
            raise UserError(f"{draft} holds no {name}, so it is no draft directory. Give the `draft/` of a run.")
    config = read_json(draft / "config.json")
    if "draft_vocab_size" not in config:
        raise UserError(f"{draft}: {config.get('architectures')} is no EAGLE-3 draft. Give the `draft/` of a run.")
    differences = [
        f"{what} {recorded} against {theirs}"
        for what, recorded, theirs in (
            ("hidden size", config.get("target_hidden_size") or config.get("hidden_size"), target.hidden_size),
            ("vocabulary", config.get("vocab_size"), target.vocab_size),
            ("layers", config.get("target_num_layers"), target.num_layers),
        )
        if recorded not in (None, theirs)
    ]
    if differences:
        raise UserError(f"{draft} is a draft of another target than {target.path}: {', '.join(differences)}.")


def check_lengths(target: Target, template: Template, questions: list[Question], settings: EvaluateConfig) -> None:
    """Refuse a question that leaves no room for its answer.

    Raises:
        UserError: names the longest question.
    """
    length, longest = max((len(question.tokens(template)), question.id) for question in questions)
    limit = getattr(target.config, "max_position_embeddings", None)
    if limit and length + settings.max_new_tokens + settings.k + 1 > limit:
        raise UserError(
            f"Question {longest} has {length} tokens, which with {settings.max_new_tokens} new ones and {settings.k} "
            f"drafted ones do not fit into the {limit} positions of {target.name}. Leave it out or lower max_new_tokens."
        )
