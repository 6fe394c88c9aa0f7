"""The training stage: feature store in, checkpoints and metrics out. The target is not here, only rows of its tables."""

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, set_seed

from sparkdraft.config import Config
from sparkdraft.drafts.counts import Counts
from sparkdraft.drafts.eagle3 import Eagle3Config, Eagle3Draft
from sparkdraft.drafts.vocab import choose_vocabulary, count_tokens, coverage
from sparkdraft.errors import Stopped, UserError
from sparkdraft.features.store import FeatureStore
from sparkdraft.files import disk_errors, read_jsonl, write_text
from sparkdraft.progress import progress_bar
from sparkdraft.run import Run
from sparkdraft.target import Target
from sparkdraft.training.batches import Batch, Plan, load_batch
from sparkdraft.training.checkpoints import checkpoints, claim, prune, save_checkpoint
from sparkdraft.training.objective import Objective, walk
from sparkdraft.training.optimisers import Optimiser, build_optimisers, learning_rate, set_learning_rate

HELD_OUT_SAMPLES = 64
"""Samples judged at each evaluation; the final judgement is another stage's."""

_NO_EFFECT = {"trackers", "log_every", "evaluate_every", "save_every", "keep_checkpoints", "gradient_accumulation"}
"""Settings that change no weight, so that a run may change them and go on; accumulation counts together with processes."""


def train(config: Config, run: Run) -> None:
    """Train the draft of a run, going on from its newest checkpoint.

    Raises:
        UserError: features are missing or damaged, the loss is no longer finite.
        Stopped: SIGTERM or Ctrl-C; the state was saved.
    """
    capture = run.stage_record("capture")
    accelerator = _accelerator(config, run)
    inputs = {
        "capture": capture["fingerprint"],
        "draft": config.draft.model_dump(mode="json"),
        "ttt": config.ttt.model_dump(mode="json"),
        "train": config.train.model_dump(mode="json", exclude=_NO_EFFECT),
        "batches_per_step": accelerator.num_processes * config.train.gradient_accumulation,
    }
    with run.stage("train", inputs, record=accelerator.is_main_process) as stage:
        if not stage.needed:
            accelerator.print("train: finished before, nothing has changed")
            return
        with disk_errors(run.path):
            trainer = Trainer(config, run, accelerator, stage.fingerprint)
            trainer.fit()
        stage.facts.update(trainer.facts())


def _accelerator(config: Config, run: Run) -> Accelerator:
    precision = config.train.mixed_precision
    if precision == "auto":
        precision = "bf16" if torch.cuda.is_available() else "no"
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # without it, several processes on a CPU would each train alone
        mixed_precision=precision,
        log_with=list(config.train.trackers) or None,
        project_dir=run.path,
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(days=1)),
            DistributedDataParallelKwargs(broadcast_buffers=False),
        ],
    )
    if config.train.trackers:
        accelerator.init_trackers("sparkdraft", config=_flat(config.model_dump(mode="json")))
    return accelerator


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names, as trackers take them (numbers and text only)."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if isinstance(value, int | float | str) else str(value)
    return flat


@dataclass
class Best:
    """The checkpoint with the highest acceptance length on held-out samples."""

    step: int = -1
    acceptance_length: float = 0.0
    acceptance_rate_per_position: list[float] = field(default_factory=list)


class Trainer:
    """One training: what `train` sets up, steps through and saves."""

    def __init__(self, config: Config, run: Run, accelerator: Accelerator, fingerprint: str):
        self.config, self.run, self.accelerator, self.fingerprint = config, run, accelerator, fingerprint
        self.device = accelerator.device
        # of features and tables; the weights are float32 everywhere
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        set_seed(config.train.seed)
        self.store = FeatureStore.open(run.features)
        if accelerator.is_main_process:
            self.store.verify()
        target = Target.open(config.target)
        if self.store.target_fingerprint != target.fingerprint:
            raise UserError(
                f"The features in {run.features} come from another target than {target.path}. Run capture again."
            )
        entries = self.store.entries
        held_out = sorted((entry for entry in entries if entry.split == "held_out"), key=lambda entry: entry.id)
        self.held_out = held_out[:HELD_OUT_SAMPLES]  # ids are hashes: any kind of prompt may be among them
        self.plan = Plan(
            [entry for entry in entries if entry.split == "train"],
            config.train.tokens_per_batch,
            accelerator.num_processes * config.train.gradient_accumulation,
            config.train.seed,
        )
        self.steps = config.train.steps or self.plan.steps_of(config.train.epochs or 1)
        self.draft, self.coverage = self._build_draft(target)
        objective = Objective(self.draft, self._teacher_rows(target), config.ttt, config.train.loss).to(self.device)
        self.optimisers: list[Optimiser] = build_optimisers(config.train, objective)
        if config.train.compile:
            self.draft.compile()
        self.objective = accelerator.prepare(objective)
        self.best, self.step, self.tokens = Best(), 0, 0
        self._resume()

    # --- set-up --------------------------------------------------------------------------------------------------

    def _build_draft(self, target: Target) -> tuple[Eagle3Draft, float]:
        config = self.config
        train = [self.store.tokens(entry) for entry in self.plan.entries]
        counts = count_tokens(train, target.vocab_size)
        vocabulary = choose_vocabulary(counts, config.draft.vocab_size)
        draft = Eagle3Draft(Eagle3Config.of(config.draft, target, self.store.aux_layers, len(vocabulary)))
        draft.set_vocabulary(vocabulary)
        generator = torch.Generator().manual_seed(config.train.seed)
        draft.initialise(target if config.draft.init == "target" else None, generator)
        draft.to(self.device)
        draft.set_embeddings(target.rows("embed").to(self.dtype))
        return draft, coverage(counts, vocabulary)

    def _teacher_rows(self, target: Target) -> torch.Tensor:
        return target.rows("lm_head", self.draft.target_ids.cpu()).to(self.dtype)

    def _resume(self) -> None:
        """Go on from the newest checkpoint of the same settings; those of other settings stand aside."""
        main = self.accelerator.is_main_process
        if main:
            claim(self.run.checkpoints, self.run.metrics, self.fingerprint)
        self.accelerator.wait_for_everyone()
        if found := checkpoints(self.run.checkpoints):
            found[-1].restore(self.draft, self.optimisers)
            progress = found[-1].progress
            self.step, self.tokens, self.best = found[-1].step, progress["tokens"], Best(**progress["best"])
            self.accelerator.print(f"train: going on after step {self.step} of {self.steps}")
        if main:
            _keep_metrics(self.run, self.step)
        self.accelerator.wait_for_everyone()

    # --- the loop ------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to the last step, evaluating, logging and saving on the way."""
        train, main = self.config.train, self.accelerator.is_main_process
        recent = _Recent()
        with _stop_signals() as stop, progress_bar(main) as bar, self._batches() as batches:
            task = bar.add_task("train", total=self.steps, completed=self.step, detail="")
            while self.step < self.steps:
                recent.add(*self._optimise(next(batches)))
                self.step += 1
                finished = self.step == self.steps
                if self.step % train.log_every == 0 or finished:
                    line = recent.summary(self.accelerator) | {"tokens": self.tokens}
                    self._log(line)
                    bar.update(task, detail=f"loss {line['loss']:.3f}  {line['tokens_per_second']:.0f} tok/s")
                    recent = _Recent()
                bar.update(task, completed=self.step)
                stopping = self._agreed(stop)
                better = (self.step % train.evaluate_every == 0 or finished) and self._evaluate()
                if better or finished or stopping or self.step % train.save_every == 0:
                    self._save()
                if stopping and not finished:
                    raise Stopped(
                        f"Stopped after step {self.step} of {self.steps}, which is saved. The same command goes on from there."
                    )
        self.accelerator.end_training()

    def _optimise(self, batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """One optimiser step over this process's batches."""
        train, accelerator = self.config.train, self.accelerator
        self.objective.train()
        total = sum(sum(entry.trained for entry in group) for group in self.plan.step(self.step))
        loss_sum = torch.zeros((), device=self.device)
        hits, terms = torch.zeros(self.config.ttt.steps), torch.zeros(self.config.ttt.steps)
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with nullcontext() if last else accelerator.no_sync(self.objective):
                loss, hit = self.objective(batch, float(total))
                # the wrapper averages gradients over processes; the loss is a share of a sum over all of them
                accelerator.backward(loss * accelerator.num_processes)
            loss_sum += loss.detach()
            hits += hit.sum(1).cpu()
            terms += batch.valid.sum(1).cpu()
        norm = torch.nn.utils.clip_grad_norm_(self.objective.parameters(), train.max_grad_norm or float("inf"))
        if not torch.isfinite(norm):
            raise UserError(
                f"train: the gradient is no longer finite at step {self.step + 1}. Lower train.learning_rate (now "
                f"{train.learning_rate}) and start again; it goes on from the last checkpoint if you keep the rate."
            )
        set_learning_rate(self.optimisers, learning_rate(train, self.step, self.steps))
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.tokens += total
        return loss_sum, hits, terms, sum(len(batch.token_ids) for batch in batches)

    @contextmanager
    def _batches(self) -> Iterator[Iterator[list[Batch]]]:
        """This process's batches, step after step, read one step ahead."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes

        def read(step: int) -> list[Batch]:
            mine = self.plan.step(step)[rank::processes]
            return [load_batch(self.store, group, self.config.ttt.steps, self.dtype) for group in mine]

        def stream(pool: ThreadPoolExecutor) -> Iterator[list[Batch]]:
            ahead: Future[list[Batch]] = pool.submit(read, self.step)
            for step in range(self.step, self.steps):
                ready = ahead.result()
                if step + 1 < self.steps:
                    ahead = pool.submit(read, step + 1)
                yield [batch.to(self.device) for batch in ready]

        with ThreadPoolExecutor(1) as pool:
            yield stream(pool)

    @torch.no_grad()
    def _evaluate(self) -> bool:
        """Acceptance length on held-out samples; true where it is the best so far."""
        self.objective.eval()
        k, accelerator = self.config.evaluate.k, self.accelerator
        mine = self.held_out[accelerator.process_index :: accelerator.num_processes]
        objective = accelerator.unwrap_model(self.objective)
        counted, hits, terms = Counts(k), torch.zeros(k), torch.zeros(k)
        with accelerator.autocast():
            for start in range(0, len(mine), 4):
                batch = load_batch(self.store, mine[start : start + 4], k, self.dtype).to(self.device)
                hit = objective(batch, 1.0)[1]
                counted = Counts.total(k, [counted, walk(batch, hit)])
                hits += hit.sum(1).cpu()
                terms += batch.valid.sum(1).cpu()
        sums = torch.stack(
            [torch.full((k,), float(counted.drafts)), torch.tensor(counted.accepted_per_position), hits, terms]
        )
        drafts, accepted, hits, terms = accelerator.reduce(sums.to(self.device)).cpu()
        counts = Counts(k, drafts=int(drafts[0]), accepted_per_position=accepted.long().tolist())
        rates = counts.acceptance_rate_per_position
        self._log(
            {
                "held_out_acceptance_length": counts.acceptance_length,
                "held_out_acceptance_rate_per_position": rates,
                "held_out_accuracy_per_step": (hits / terms.clamp(min=1)).tolist(),
            }
        )
        if counts.acceptance_length < self.best.acceptance_length:
            return False
        self.best = Best(self.step, counts.acceptance_length, rates)
        return True

    # --- saying and saving ---------------------------------------------------------------------------------------

    def _agreed(self, stop: list[int]) -> bool:
        """Whether any process was told to stop."""
        if self.accelerator.num_processes == 1:
            return bool(stop)
        if stop:
            self.accelerator.set_trigger()
        return self.accelerator.check_trigger()

    def _log(self, values: dict[str, Any]) -> None:
        if not self.accelerator.is_main_process:
            return
        with self.run.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.step, **values}) + "\n")
        self.accelerator.log(
            {name: value for name, value in values.items() if isinstance(value, int | float)}, step=self.step
        )

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            progress = {"fingerprint": self.fingerprint, "tokens": self.tokens, "best": asdict(self.best)}
            save_checkpoint(self.run.checkpoints, self.step, self.draft, self.optimisers, progress)
            prune(self.run.checkpoints, self.config.train.keep_checkpoints, self.best.step)
        self.accelerator.wait_for_everyone()

    def facts(self) -> dict[str, Any]:
        """What the manifest keeps of this training."""
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "best": asdict(self.best),
            "draft_vocabulary": self.draft.config.draft_vocab_size,
            "vocabulary_coverage": round(self.coverage, 4),
            "parameters": sum(p.numel() for p in self.draft.parameters()),
        }


class _Recent:
    """Sums since the last logged step."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.hits: list[torch.Tensor] = []
        self.terms: list[torch.Tensor] = []
        self.rows, self.start = 0, time.perf_counter()

    def add(self, loss: torch.Tensor, hits: torch.Tensor, terms: torch.Tensor, rows: int) -> None:
        self.losses.append(loss)
        self.hits.append(hits)
        self.terms.append(terms)
        self.rows += rows

    def summary(self, accelerator: Accelerator) -> dict[str, Any]:
        """Mean loss and accuracy at each draft step (marginal: not an acceptance length), tokens per second."""
        seconds = time.perf_counter() - self.start
        loss = torch.stack(self.losses).mean().cpu()
        hits, terms = torch.stack(self.hits).sum(0), torch.stack(self.terms).sum(0)
        sums = torch.cat([loss[None], hits, terms, torch.tensor([float(self.rows)])]).to(accelerator.device)
        sums = accelerator.reduce(sums).cpu()
        half = 1 + len(hits)
        return {
            "loss": sums[0].item(),
            "accuracy_per_step": (sums[1:half] / sums[half:-1].clamp(min=1)).tolist(),
            "tokens_per_second": sums[-1].item() / seconds,
        }


def _keep_metrics(run: Run, step: int) -> None:
    """Drop the lines of metrics.jsonl after `step`: the steps that are done again will write them again."""
    kept = [line for line in read_jsonl(run.metrics) if line["step"] <= step]
    write_text(run.metrics, "".join(json.dumps(line) + "\n" for line in kept))


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT instead of dying of them."""
    received: list[int] = []

    def note(number: int, _frame: Any) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
