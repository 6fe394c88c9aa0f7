"""Acceptance report of a draft.

    python eval/acceptance.py --target DIR --draft DIR --questions FILE.jsonl --out DIR

Writes report.json, report.md and report.html to the --out directory. Questions: JSONL with `turns` and `category`
(Spec-Bench's form). Exit codes: 0 done, 2 the input is wrong, 1 anything else.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from sparkdraft.cli import exit_code
from sparkdraft.config import DEMO_TARGET, EvaluateConfig, TargetConfig


def main() -> int:
    defaults = EvaluateConfig()
    parser = argparse.ArgumentParser(description="Acceptance report of a draft.")
    parser.add_argument("--target", default=DEMO_TARGET, help="checkpoint directory or name (%(default)s)")
    parser.add_argument("--draft", type=Path, required=True, help="draft directory")
    parser.add_argument("--questions", type=Path, required=True, help="JSONL with `turns` and `category`")
    parser.add_argument("--out", type=Path, required=True, help="directory of the report")
    parser.add_argument("--engine", choices=["auto", "reference", "vllm"], default=defaults.engine)
    parser.add_argument("--k", type=positive, default=defaults.k, help="speculative tokens (%(default)s)")
    parser.add_argument("--max-new-tokens", type=positive, default=defaults.max_new_tokens, help="(%(default)s)")
    parser.add_argument("--limit", type=positive, help="judge on this many questions, spread over the file")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument(
        "--template-arguments",
        type=json_object,
        default={},
        help="JSON for the chat template, such as '{\"enable_thinking\": false}'",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that the target's directory brings")
    parser.add_argument("--no-baseline", action="store_true", help="do not decode without the draft")
    arguments = parser.parse_args()
    return exit_code(lambda: report(arguments))


def positive(text: str) -> int:
    """An argument that counts something; argparse says what is wrong and ends with exit code 2."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value


def report(arguments: argparse.Namespace) -> None:
    from sparkdraft.decoding.evaluate import judge
    from sparkdraft.decoding.questions import load_questions
    from sparkdraft.target import Target

    settings = EvaluateConfig(
        engine=arguments.engine,
        k=arguments.k,
        max_new_tokens=arguments.max_new_tokens,
        baseline=not arguments.no_baseline,
    )
    questions = load_questions(arguments.questions, arguments.limit)
    target = Target.open(
        TargetConfig(model=arguments.target, dtype=arguments.dtype, trust_remote_code=arguments.trust_remote_code)
    )
    judge(target, arguments.draft, questions, settings, arguments.template_arguments, arguments.out)


if __name__ == "__main__":
    sys.exit(main())
