"""The EAGLE-3 draft (Li et al. 2025, "EAGLE-3", section 3): one or more decoder layers over fused target features.

The arithmetic is that of vLLM's `llama_eagle3.py` and `qwen3_eagle3.py`, whose tensor names and config keys the saved
directory uses, so that vLLM loads it as it is:

    fused  = fc([norm](aux))                              once a row, from the target's auxiliary states
    layer0 : x = [input_layernorm(embed) ; hidden_norm(hidden)]; hidden += attention(x); hidden += mlp(norm(hidden))
    output : state = hidden (or norm(hidden) with `norm_output`) goes to the next step; logits = lm_head(norm(hidden))
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sparkdraft.config import DraftConfig
from sparkdraft.errors import UserError
from sparkdraft.files import read_json, write_json
from sparkdraft.target import Target

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [R, Hq, D], k [N, Hkv, D], v [N, Hkv, D]) -> [R, Hq, D]: who sees which keys is the caller's business."""

WEIGHTS = "model.safetensors"
_ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}


class Eagle3Config(BaseModel):
    """Everything that defines the draft; `to_vllm` and `from_vllm` map it to the keys that vLLM reads."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layer_type: Literal["llama", "qwen3"]
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    target_num_layers: int
    aux_layers: list[int]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @classmethod
    def of(cls, draft: DraftConfig, target: Target, aux_layers: list[int], draft_vocab_size: int) -> "Eagle3Config":
        """The draft of a target: what `draft` leaves unset is the target's own (rotary settings always are)."""
        config = target.config
        hidden = draft.hidden_size or config.hidden_size
        if hidden != config.hidden_size:
            raise UserError(
                f"draft.hidden_size is {hidden} but the target's is {config.hidden_size}: the draft shares the target's "
                "embeddings in vLLM, so the two must be equal. Leave draft.hidden_size unset."
            )
        heads = draft.num_attention_heads or config.num_attention_heads
        qk_norm = "qwen3" in config.model_type
        return cls(
            layer_type=("qwen3" if qk_norm else "llama") if draft.layer_type == "auto" else draft.layer_type,
            hidden_size=hidden,
            intermediate_size=draft.intermediate_size or getattr(config, "intermediate_size", None) or 4 * hidden,
            num_hidden_layers=draft.num_layers,
            num_attention_heads=heads,
            num_key_value_heads=draft.num_key_value_heads or config.num_key_value_heads,
            head_dim=draft.head_dim or getattr(config, "head_dim", None) or hidden // heads,
            hidden_act=getattr(config, "hidden_act", None) or "silu",
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters=_plain_rope(config),
            max_position_embeddings=config.max_position_embeddings,
            vocab_size=config.vocab_size,
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=config.hidden_size,
            target_num_layers=config.num_hidden_layers,
            aux_layers=aux_layers,
            norm_before_residual=draft.norm_before_residual,
            norm_before_fc=draft.norm_before_fc,
            fc_norm=draft.fc_norm,
            norm_output=draft.norm_output,
            dtype=str(config.dtype or torch.bfloat16).removeprefix("torch."),
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
        )

    def to_vllm(self) -> dict[str, Any]:
        """config.json of the draft directory. The layer ids and the flags of the fusion are written both at the top and
        inside `eagle_config`, since vLLM reads some of them only in one place."""
        fusion = {"eagle_aux_hidden_state_layer_ids": self.aux_layers, "norm_before_fc": self.norm_before_fc}
        own = {"layer_type", "aux_layers"}
        return {
            "architectures": [_ARCHITECTURES[self.layer_type]],
            "model_type": self.layer_type,
            **self.model_dump(exclude=own),
            **fusion,
            "num_aux_hidden_states": len(self.aux_layers),
            "eagle_config": {"use_aux_hidden_state": True, **fusion},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        }

    @classmethod
    def from_vllm(cls, path: Path) -> "Eagle3Config":
        """Read the config.json of a draft directory.

        Raises:
            UserError: the file is missing, broken or not of an EAGLE-3 draft that this class can be.
        """
        raw = read_json(path)
        kinds = {name: kind for kind, name in _ARCHITECTURES.items()} | {"Eagle3LlamaForCausalLM": "llama"}
        kind = kinds.get((raw.get("architectures") or [""])[0])
        if kind is None:
            raise UserError(f"{path}: {raw.get('architectures')} is no EAGLE-3 draft; known are {sorted(kinds)}.")
        values = {name: raw[name] for name in cls.model_fields if name in raw}
        values |= {"layer_type": kind, "aux_layers": raw.get("eagle_aux_hidden_state_layer_ids")}
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(
                f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}. Export the draft again."
            ) from error


def _plain_rope(config: Any) -> dict[str, Any]:
    """The target's rotary settings as vLLM reads them, without the multi-modal sections: text positions are the same on
    every axis, so the draft's rotation equals the plain one."""
    parameters = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    if "full_attention" in parameters:  # one entry a layer type: the draft's layers attend to everything
        parameters = dict(parameters["full_attention"])
    return {name: value for name, value in parameters.items() if not name.startswith("mrope")}


class RMSNorm(nn.RMSNorm):
    """RMSNorm in float32 whatever the dtype of its input, as vLLM computes it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


class Rotary(nn.Module):
    """Rotary embedding of the target's kind (default, llama3, yarn, partial, ...), through transformers' tables."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        rope = dict(config.rope_parameters)
        self.dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        head_dim = config.head_dim
        if rope.get("rope_type", "default") == "default":
            # transformers' default table knows no partial rotation: it is that of a head of the rotated dimensions
            head_dim = self.dim
            rope.pop("partial_rotary_factor", None)
        self.tables = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                head_dim=head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=rope,
            )
        )

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [N, rotary dim] in float32 for int64 positions [N]."""
        cos, sin = self.tables(positions.new_zeros((), dtype=torch.float32), positions[None])
        return cos[0, :, : self.dim], sin[0, :, : self.dim]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply a rotation to x [N, heads, D]; dimensions beyond cos's stay as they are (partial rotary)."""
    dim = cos.shape[-1]
    turned, rest = x[..., :dim], x[..., dim:]
    half = torch.cat((-turned[..., dim // 2 :], turned[..., : dim // 2]), dim=-1)
    turned = (turned * cos[:, None] + half * sin[:, None]).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class SelfAttention(nn.Module):
    def __init__(self, config: Eagle3Config, inputs: int):
        super().__init__()
        self.head_dim = config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(inputs, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, kv, bias=False)
        self.v_proj = nn.Linear(inputs, kv, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)
        if config.layer_type == "qwen3":
            self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_norm(k) if hasattr(self, "k_norm") else k
        return rotate(k, cos, sin), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        q = self.q_norm(q) if hasattr(self, "q_norm") else q
        return rotate(q, cos, sin)


class MLP(nn.Module):
    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Layer 0 reads [embedding ; hidden]; later layers read the hidden state alone, as vLLM's do."""

    def __init__(self, config: Eagle3Config, index: int):
        super().__init__()
        self.index = index
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if index == 0:
            self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = SelfAttention(config, config.hidden_size * (2 if index == 0 else 1))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attention: Attention, rows: Tensor | None
    ) -> Tensor:
        """[N, H] -> [N, H], or -> [R, H] where only `rows` (int64 [R]) are wanted; keys are made of all N rows."""
        residual = hidden
        if self.index == 0:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            x = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        else:
            x = self.input_layernorm(hidden)
        k, v = self.self_attn.keys(x, cos, sin)
        if rows is not None:
            x, residual, cos, sin = x[rows], residual[rows], cos[rows], sin[rows]
        attended = attention(self.index, self.self_attn.queries(x, cos, sin), k, v)
        hidden = residual + self.self_attn.o_proj(attended.flatten(-2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Draft(nn.Module):
    """The EAGLE-3 head. Rows are packed: N tokens of any number of sequences, without padding."""

    d2t: Tensor
    t2d: Tensor
    embeddings: Tensor

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.config = config
        fused = config.target_hidden_size * len(config.aux_layers)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(fused, eps=config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, eps=config.rms_norm_eps) for _ in config.aux_layers
            )
        self.fc = nn.Linear(fused, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.register_buffer("embeddings", torch.empty(0), persistent=False)

    # --- arithmetic ----------------------------------------------------------------------------------------------

    def combine(self, aux: Tensor) -> Tensor:
        """Fuse the target's auxiliary states, [N, len(aux_layers) * target_hidden_size] -> [N, hidden_size]."""
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            chunks = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux)

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's embeddings, frozen: int64 [N] -> [N, hidden_size]."""
        return F.embedding(token_ids, self.embeddings).to(self.fc.weight.dtype)

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attention: Attention, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One draft step.

        Args:
            embeds: [N, hidden_size], embeddings of the tokens that follow each row's position.
            hidden: [N, hidden_size], `combine`d features at first, then the state of the step before.
            positions: int64 [N].
            attention: sees each layer's queries, keys and values and returns what each query gathers.
            rows: int64 [R]; only these rows are wanted from the last layer (all rows still give keys).

        Returns:
            state [R, hidden_size], fed to the next step; normed [R, hidden_size], the input of `logits`.
        """
        cos, sin = self.rotary(positions)
        for layer in self.layers:
            last = layer is self.layers[-1]
            hidden = layer(embeds, hidden, cos, sin, attention, rows if last else None)
        normed = self.norm(hidden)
        return (normed if self.config.norm_output else hidden), normed

    def logits(self, normed: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, draft_vocab_size]."""
        return self.lm_head(normed)

    # --- vocabulary and start ------------------------------------------------------------------------------------

    @property
    def target_ids(self) -> Tensor:
        """Target token id of every draft token, int64 [draft_vocab_size]."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]

    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Fix the draft vocabulary: sorted target token ids, int64 [draft_vocab_size]."""
        self.d2t.copy_(target_ids - torch.arange(len(target_ids)))
        self.t2d.zero_()
        self.t2d[target_ids] = True

    def set_embeddings(self, rows: Tensor) -> None:
        """Lend the draft the target's embedding table [vocab_size, hidden_size]; it is never trained nor saved."""
        self.embeddings = rows.to(self.fc.weight.device)

    @torch.no_grad()
    def initialise(self, target: Target | None, generator: torch.Generator) -> None:
        """Random start (normal, 0.02), or, given a target, a warm one.

        The warm start lets the last auxiliary state pass, reads it with as many of the target's last layers as the draft
        has, and judges the outcome with its final norm and lm_head rows, so that the untrained draft already repeats the
        target's last guess; the inputs that the target's layers do not have (embeddings, other auxiliary states) start at
        zero. Tensors whose shapes differ (gated attention, experts) keep their random start.
        """
        for parameter in self.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
        if target is None:
            return
        hidden = self.config.hidden_size
        zero_centred = target.config.model_type.startswith(("qwen3_5", "qwen3_next", "gemma"))
        norm_shift = 1.0 if zero_centred else 0.0  # those families store w of (1 + w)
        self.lm_head.weight.copy_(target.rows("lm_head", self.target_ids.cpu()))
        self.norm.weight.copy_(target.final_norm() + norm_shift)
        self.fc.weight.zero_()
        self.fc.weight[:, -hidden:].copy_(torch.eye(hidden))
        for index, layer in enumerate(self.layers):
            self._start_layer(layer, target.layer_tensors(target.num_layers - len(self.layers) + index), norm_shift)

    def _start_layer(self, layer: nn.Module, tensors: dict[str, Tensor], norm_shift: float) -> None:
        """Copy one of the target's layers; the columns that read the embeddings start at zero."""
        for name, parameter in layer.named_parameters():
            if name == "input_layernorm.weight" and layer is self.layers[0]:
                continue  # norms the embeddings, which the target's layer does not read
            source = tensors.get("input_layernorm.weight" if name == "hidden_norm.weight" else name)
            if source is None:
                continue
            if name.endswith(("k_proj.weight", "v_proj.weight")) and parameter.shape[0] % source.shape[0] == 0:
                # more key-value heads than the target's: each copy serves some of the queries of its original
                heads = source.unflatten(0, (-1, self.config.head_dim))
                source = heads.repeat_interleave(parameter.shape[0] // source.shape[0], 0).flatten(0, 1)
            if source.shape == parameter.shape:
                parameter.copy_(source + (norm_shift if parameter.dim() == 1 else 0.0))
            elif parameter.dim() == 2 and source.shape == (parameter.shape[0], parameter.shape[1] - source.shape[1]):
                parameter.zero_()
                parameter[:, source.shape[1] :].copy_(source)

    # --- files ---------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The draft's tensors under vLLM's names, on the CPU; floating ones in the training dtype."""
        own = {name.replace("layers.0.", "midlayer."): value for name, value in self.state_dict().items()}
        if self.config.draft_vocab_size == self.config.vocab_size:  # vLLM maps nothing then
            del own["d2t"], own["t2d"]
        return {name: value.detach().cpu().contiguous() for name, value in own.items()}

    def save(self, directory: Path, dtype: torch.dtype | None = None) -> None:
        """Write config.json and the weights into a directory that exists; `dtype` casts the floating tensors."""
        tensors = {
            name: value.to(dtype) if dtype and value.is_floating_point() else value
            for name, value in self.tensors().items()
        }
        config = self.config.to_vllm() | ({"dtype": str(dtype).removeprefix("torch.")} if dtype else {})
        write_json(directory / "config.json", config)
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})

    @classmethod
    def load(cls, directory: Path) -> "Eagle3Draft":
        """Read a draft directory in float32; `midlayer.*` and `layers.0.*` names are both taken.

        Raises:
            UserError: a file is missing or damaged, or the tensors are not those that the config announces.
        """
        config = Eagle3Config.from_vllm(directory / "config.json")
        draft = cls(config)
        file = directory / WEIGHTS
        try:
            tensors = {name.replace("midlayer.", "layers.0."): value for name, value in load_file(file).items()}
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} cannot be read ({error}). Export the draft again.") from error
        if config.draft_vocab_size == config.vocab_size and "d2t" not in tensors:
            tensors |= {"d2t": torch.zeros_like(draft.d2t), "t2d": torch.ones_like(draft.t2d)}
        tensors.pop("embed_tokens.weight", None)
        try:
            draft.load_state_dict(tensors)
        except RuntimeError as error:
            raise UserError(f"{file} does not hold the tensors that its config announces: {error}") from error
        return draft
