"""The unrolled attention against its eager twin, and the unroll against drafting a row at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from sparkdraft.drafts.eagle3 import Eagle3Config, Eagle3Draft, Rotary, rotate
from sparkdraft.drafts.ttt import Span, UnrolledAttention, unroll


class EagerUnrolledAttention(UnrolledAttention):
    """The same by an explicit mask over all keys, for comparison only: rows x (rows + steps x rows) scores."""

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        k, v, own_k, own_v = self._keys(layer)
        spans = self._spans(len(q))
        rows = torch.cat([torch.arange(span.live, span.end) for span in spans])
        sample = torch.cat([torch.full((span.end - span.start,), number) for number, span in enumerate(spans)])
        columns = torch.arange(len(k))
        true_mask = (columns[None] <= rows[:, None]) & (sample[None] == sample[rows][:, None])
        mask = torch.cat([true_mask, *[torch.eye(len(q), dtype=torch.bool)] * len(own_k)], dim=1)
        keys, values = torch.cat([k, *own_k]), torch.cat([v, *own_v])
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), attn_mask=mask, enable_gqa=True
        )
        return out.transpose(0, 1)


def small_config(**changes) -> Eagle3Config:
    values = {
        "layer_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "max_position_embeddings": 256, "vocab_size": 50,
        "draft_vocab_size": 20, "target_hidden_size": 32, "target_num_layers": 6, "aux_layers": [1, 3, 4],
    }  # fmt: skip
    return Eagle3Config(**(values | changes))


def small_draft(**changes) -> Eagle3Draft:
    generator = torch.Generator().manual_seed(0)
    draft = Eagle3Draft(small_config(**changes))
    draft.initialise(None, generator)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    draft.set_vocabulary(torch.arange(0, 40, 2))
    draft.set_embeddings(torch.randn(50, 32, generator=generator))
    return draft


spans_strategy = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 14)), min_size=1, max_size=4)


def make_spans(sizes) -> list[Span]:
    spans, start = [], 0
    for before, live in sizes:
        spans.append(Span(start, start + before, start + before + live))
        start += before + live
    return spans


@settings(max_examples=25, deadline=None)
@given(spans_strategy, st.integers(1, 4), st.sampled_from([(1, 1), (4, 2), (9, 3)]), st.sampled_from([64, 128, 256]))
def test_attention_equals_eager(sizes, steps, heads, head_dim):
    """Output and every gradient, whatever the packing, the prompts without live rows before them, and the heads."""
    spans = make_spans(sizes)
    generator = torch.Generator().manual_seed(1)
    rows = sum(live for _, live in sizes)

    def tensors():
        generator.manual_seed(1)
        queries, keys = heads
        total = spans[-1].end
        make = lambda *shape: torch.randn(*shape, generator=generator).requires_grad_()  # noqa: E731
        return [
            (make(rows, queries, head_dim), *(make(total if step == 0 else rows, keys, head_dim) for _ in "kv"))
            for step in range(steps)
        ]

    results = []
    for kind in (UnrolledAttention, EagerUnrolledAttention):
        attention, inputs = kind(spans), tensors()
        outputs = []
        for step, (q, k, v) in enumerate(inputs):
            if step:
                attention.advance()
            outputs.append(attention(0, q, k, v))
        weights = torch.randn(len(outputs), *outputs[0].shape, generator=torch.Generator().manual_seed(2))
        (torch.stack(outputs) * weights).sum().backward()
        results.append([*outputs, *(tensor.grad for group in inputs for tensor in group)])
    for ours, eager in zip(*results, strict=True):
        assert torch.allclose(ours, eager, atol=1e-5, rtol=1e-5), (ours - eager).abs().max()


def run_unroll(draft, spans, steps, kind):
    generator = torch.Generator().manual_seed(3)
    total = spans[-1].end
    token_ids = torch.randint(0, 50, (total,), generator=generator)
    features = torch.randn(total, 96, generator=generator)
    return token_ids, features, unroll(draft, token_ids, features, spans, kind(spans), steps)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_hidden_layers": 2},
        {"layer_type": "qwen3", "num_hidden_layers": 3},
        {"norm_output": True},
        {"norm_before_residual": True, "fc_norm": True},
        {"norm_before_fc": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}},
    ],
)
def test_unroll_equals_drafting_row_by_row(changes):
    """Each live row of each step, against the draft run on that row alone with explicit keys: the picture in ttt.py."""
    draft = small_draft(**changes)
    spans, steps = make_spans([(3, 5), (0, 4)]), 3
    token_ids, features, normed = run_unroll(draft, spans, steps, UnrolledAttention)
    out_row = 0
    for span in spans:
        tokens = token_ids[span.start : span.end]
        length = len(tokens)
        after = lambda t, d, tokens=tokens, length=length: tokens[(t + d).clamp(max=length - 1)]  # noqa: E731
        for t in range(span.live - span.start, length):
            cache: dict[int, list] = {}

            def attention(layer, q, k, v, cache=cache):
                cache.setdefault(layer, []).append((k, v))
                keys, values = (torch.cat(parts) for parts in zip(*cache[layer], strict=True))
                count = len(keys) - len(q)
                mask = torch.ones(len(q), len(keys), dtype=torch.bool).tril(count)
                return torch.nn.functional.scaled_dot_product_attention(
                    q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), attn_mask=mask, enable_gqa=True
                ).transpose(0, 1)

            positions = torch.arange(t + 1)
            hidden = draft.combine(features[span.start : span.start + t + 1])
            state, out = draft(draft.embed(after(positions, 1)), hidden, positions, attention)
            for step in range(steps):
                assert torch.allclose(out[-1], normed[step, out_row], atol=1e-5), (t, step)
                last = torch.tensor([t])
                state, out = draft(draft.embed(after(last, 2 + step)), state[-1:], last + step + 1, attention)
            out_row += 1


def test_gradients_of_the_whole_unroll_equal_eager():
    draft = small_draft(num_hidden_layers=2)
    spans = make_spans([(4, 7), (1, 6)])
    gradients = []
    for kind in (UnrolledAttention, EagerUnrolledAttention):
        draft.zero_grad()
        _, _, normed = run_unroll(draft, spans, 4, kind)
        (draft.logits(normed) ** 2).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in draft.named_parameters()})
    for name in gradients[0]:
        scale = gradients[1][name].abs().max()
        assert torch.allclose(gradients[0][name], gradients[1][name], atol=1e-5 * scale), name


def test_later_rows_do_not_leak_into_earlier_ones():
    """Changing the tokens and features after a position changes nothing that a row there could know."""
    draft = small_draft()
    spans, steps, cut = make_spans([(0, 12)]), 3, 6
    generator = torch.Generator().manual_seed(5)
    token_ids, features = torch.randint(0, 50, (12,), generator=generator), torch.randn(12, 96, generator=generator)
    before = unroll(draft, token_ids, features, spans, UnrolledAttention(spans), steps)
    token_ids[cut + steps + 1 :] = 7
    features[cut + 1 :] = 0.0
    after = unroll(draft, token_ids, features, spans, UnrolledAttention(spans), steps)
    assert torch.equal(before[:, : cut + 1], after[:, : cut + 1])
    assert not torch.equal(before[:, cut + 1 :], after[:, cut + 1 :])


def test_partial_rotation_is_that_of_a_smaller_head():
    """A quarter of a head of 16 turns as a head of 4 does: angles p * theta ** (-2i / 4), halves paired; the rest stays."""
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25}
    rotary = Rotary(small_config(rope_parameters=rope))
    x, positions = torch.randn(5, 2, 16), torch.tensor([0, 1, 7, 50, 200])
    turned = rotate(x, *rotary(positions))
    angles = positions[:, None] * 100.0 ** (-torch.arange(0, 4, 2) / 4)
    whole = torch.complex(x[..., :2], x[..., 2:4]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    assert torch.allclose(turned[..., :4], torch.cat([whole.real, whole.imag], -1), atol=1e-5)
    assert torch.equal(turned[..., 4:], x[..., 4:])
