"""Training-time test (EAGLE-3, section 3.2): the draft unrolled on its own outputs, over packed rows.

Row t of a sample, at step i, reads the embedding of token t+1+i and (i = 0) the target's features of position t or
(i > 0) the draft's own state of step i-1; it stands at position t+i and predicts token t+2+i. Its query sees

    keys of step 0     rows 0 .. t       made of true features
    keys of steps 1..i row t alone       made of the draft's own states

which is what vLLM's cache holds while a block is drafted. Seen as a matrix, i = 2 and four rows:

             step-0 keys      step 1          step 2
    row 0    x . . .          x . . .         x . . .
    row 1    x x . .          . x . .         . x . .
    row 2    x x x .          . . x .         . . x .
    row 3    x x x x          . . . x         . . . x

The square on the left is causal attention, for which there are flash kernels; the diagonals are i dot products a row.
Both parts are merged by log-sum-exp, and the flash kernel's own backward gives the exact gradient of the merged result
when it is called with the MERGED output and log-sum-exp, since its formula (FlashAttention-2, section 3.1: P =
exp(S - lse), D = rowsum(dO * O)) knows nothing else of the softmax. So no mask and no score matrix is ever built.

Only live rows are queried: those from a sample's first trained position on. The rows before it only give keys.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparkdraft.errors import UserError


@dataclass(frozen=True)
class Span:
    """Where one sample lies among the packed rows: all of them [start, end), the queried ones [live, end)."""

    start: int
    live: int
    end: int


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Any]:
    """Flash attention of one sample. q [1, Hq, R, D], k and v [1, Hkv, N, D] -> out like q, lse [1, Hq, R], context."""
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse, None
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, lse, (cum_q, cum_k, max_q, max_k, seed, offset)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, context: Any, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given the output and the log-sum-exp of the whole softmax that (q, k, v) is a part of."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    cum_q, cum_k, max_q, max_k, seed, offset = context
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset, scale=scale
    )


def _heads_first(x: Tensor, start: int, end: int) -> Tensor:
    """Rows [start, end) of x [N, H, D] as [1, H, rows, D]."""
    return x[start:end].transpose(0, 1)[None]


def _parts(span: Span) -> list[tuple[int, int, bool]]:
    """The step-0 keys that a sample's live rows see: all rows before the first live one, then a causal square."""
    before = [(span.start, span.live, False)] if span.live > span.start else []
    return [*before, (span.live, span.end, True)]


class _UnrolledAttention(torch.autograd.Function):
    """softmax over (step-0 keys up to the row) + (the row's own keys), forward and exact backward.

    q [R, Hq, D]; k, v [N, Hkv, D]; own_k, own_v [i, R, Hkv, D] (i may be 0). Live rows lie in q one sample after
    the other. Returns [R, Hq, D].
    """

    @staticmethod
    def forward(ctx, q, k, v, own_k, own_v, spans: list[Span]) -> Tensor:
        scale = q.shape[-1] ** -0.5
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)  # [R, Hq]
        contexts, row = [], 0
        for span in spans:
            rows = slice(row, row := row + span.end - span.live)
            queries = _heads_first(q, rows.start, rows.stop)
            parts = []
            for start, end, causal in _parts(span):
                part, part_lse, context = _flash_forward(
                    queries, _heads_first(k, start, end), _heads_first(v, start, end), causal, scale
                )
                contexts.append(context)
                parts.append((part[0].transpose(0, 1), part_lse[0].transpose(0, 1).float()))
            out[rows], lse[rows] = parts[0] if len(parts) == 1 else _merge(*parts[0], *parts[1])
        if len(own_k):
            scores = _own_scores(q, own_k, scale)
            own_lse = scores.logsumexp(-1)
            weights = (scores - own_lse[..., None]).exp()
            own_out = torch.einsum("rgmi,irgd->rgmd", _grouped(weights, k), own_v.float()).flatten(1, 2)
            out, lse = _merge(out, lse, own_out.to(out.dtype), own_lse)
        ctx.save_for_backward(q, k, v, own_k, own_v, out, lse)
        ctx.spans, ctx.scale, ctx.contexts = spans, scale, contexts
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, own_k, own_v, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        contexts, row = iter(ctx.contexts), 0
        for span in ctx.spans:
            rows = slice(row, row := row + span.end - span.live)
            q_part, grad_part, out_part = (_heads_first(x, rows.start, rows.stop) for x in (q, grad, out))
            lse_part = lse[rows].transpose(0, 1)[None].contiguous()
            for start, end, causal in _parts(span):
                gq, gk, gv = _flash_backward(
                    grad_part, q_part, _heads_first(k, start, end), _heads_first(v, start, end),
                    out_part, lse_part, next(contexts), causal, ctx.scale,
                )  # fmt: skip
                dq[rows] += gq[0].transpose(0, 1)
                dk[start:end] += gk[0].transpose(0, 1)
                dv[start:end] += gv[0].transpose(0, 1)
        if not len(own_k):
            return dq, dk, dv, None, None, None
        weights = (_own_scores(q, own_k, ctx.scale) - lse[..., None]).exp()  # [R, Hq, i], of the whole softmax
        grad32, grouped = grad.float(), _grouped(weights, k)
        grad_heads, q_heads = _grouped(grad32, k), _grouped(q.float(), k)
        delta = (grad32 * out.float()).sum(-1)
        dweights = torch.einsum("rgmd,irgd->rgmi", grad_heads, own_v.float()).flatten(1, 2)
        dscores = _grouped(weights * (dweights - delta[..., None]) * ctx.scale, k)
        dq = dq + torch.einsum("rgmi,irgd->rgmd", dscores, own_k.float()).flatten(1, 2).to(dq.dtype)
        down_k = torch.einsum("rgmi,rgmd->irgd", dscores, q_heads).to(own_k.dtype)
        down_v = torch.einsum("rgmi,rgmd->irgd", grouped, grad_heads).to(own_v.dtype)
        return dq, dk, dv, down_k, down_v, None


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[R, Hq, ...] -> [R, Hkv, queries a key head, ...]."""
    return x.unflatten(1, (k.shape[1], -1))


def _own_scores(q: Tensor, own_k: Tensor, scale: float) -> Tensor:
    """Scores of each row's own keys: q [R, Hq, D], own_k [i, R, Hkv, D] -> float32 [R, Hq, i]."""
    return torch.einsum("rgmd,irgd->rgmi", _grouped(q.float(), own_k[0]), own_k.float()).flatten(1, 2) * scale


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two attention outputs over disjoint keys as one; out [R, H, D], lse float32 [R, H]."""
    total = torch.logaddexp(lse, other_lse)
    share, rest = (lse - total).exp()[..., None], (other_lse - total).exp()[..., None]
    return (out * share + other * rest).to(out.dtype), total


class UnrolledAttention:
    """The `attention` of a draft that is unrolled: call the draft once a step, `advance` in between."""

    def __init__(self, spans: list[Span]):
        self.live_spans = spans
        self.all_spans = [Span(span.start, span.start, span.end) for span in spans]
        self.live_rows = torch.cat([torch.arange(span.live, span.end) for span in spans])
        self.step = 0
        self.true: dict[int, tuple[Tensor, Tensor]] = {}
        self.own: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def advance(self) -> None:
        self.step += 1

    def _spans(self, rows: int) -> list[Span]:
        return self.live_spans if rows == len(self.live_rows) else self.all_spans

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.step == 0:
            self.true[layer], self.own[layer] = (k, v), []
        else:
            self.own[layer].append((k, v))
        return self.attend(layer, q)

    def _keys(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        k, v = self.true[layer]
        own = self.own[layer]
        empty = k.new_empty((0, 0, *k.shape[1:]))
        own_k = torch.stack([key for key, _ in own]) if own else empty
        own_v = torch.stack([value for _, value in own]) if own else empty
        return k, v, own_k, own_v

    def attend(self, layer: int, q: Tensor) -> Tensor:
        k, v, own_k, own_v = self._keys(layer)
        if q.device.type != "cpu" and q.dtype == torch.float32:
            raise UserError("train.mixed_precision: the GPU's flash kernels need bf16; leave it on auto.")
        return _UnrolledAttention.apply(q, k, v, own_k, own_v, self._spans(len(q)))


def unroll(
    draft: Any, token_ids: Tensor, features: Tensor, spans: list[Span], attention: UnrolledAttention, steps: int
) -> Tensor:
    """Run the draft for `steps` steps over packed samples.

    Args:
        draft: with `combine`, `embed` and the step itself (`Eagle3Draft`).
        token_ids: int64 [N]; each sample's tokens.
        features: [N, F], what `combine` reads.
        spans: the samples; rows [live, end) are the ones asked for.
        attention: a fresh `UnrolledAttention` of the same spans.
        steps: number of draft steps, at least 1.

    Returns:
        [steps, R, H]: what the lm_head reads, for every step and live row. Rows whose tokens run out (the last ones of a
        sample at later steps) hold numbers that no target token answers to; the caller gives them no weight.
    """
    rows = attention.live_rows.to(token_ids.device)
    positions = torch.cat([torch.arange(span.end - span.start) for span in spans]).to(token_ids.device)
    ends = torch.cat([torch.full((span.end - span.start,), span.end - 1) for span in spans]).to(token_ids.device)

    def tokens_after(row: Tensor, distance: int) -> Tensor:
        return token_ids[torch.minimum(row + distance, ends[row])]

    everything = torch.arange(len(token_ids), device=token_ids.device)
    state, normed = draft(draft.embed(tokens_after(everything, 1)), draft.combine(features), positions, attention, rows)
    outputs = [normed]
    for step in range(1, steps):
        attention.advance()
        state, normed = draft(draft.embed(tokens_after(rows, 1 + step)), state, positions[rows] + step, attention)
        outputs.append(normed)
    return torch.stack(outputs)
