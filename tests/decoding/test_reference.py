"""The reference decoder: the text of plain greedy decoding, and counts that an independent recount confirms."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from sparkdraft.config import DraftConfig
from sparkdraft.data.template import Template
from sparkdraft.decoding.reference import ReferenceDecoder
from sparkdraft.drafts.counts import Counts
from sparkdraft.drafts.eagle3 import Eagle3Config, Eagle3Draft

QUESTIONS = [
    "What is the capital of France?",
    "List five colours.",
    "Say: one two three four five six seven eight",
    "Hi",
]


@pytest.fixture(scope="module")
def decoder(target, warm_draft):
    return ReferenceDecoder(target, Eagle3Draft.load(warm_draft), 40)


@pytest.fixture(scope="module")
def prompts(target):
    template = Template(target.tokenizer, {})
    return [template.prompt([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="module")
def texts(prompts, target_model):
    """What transformers' own greedy decoding answers."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        plain = target_model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        answers.append(plain[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_text_is_that_of_plain_greedy_decoding(decoder, prompts, texts, k):
    for prompt, text in zip(prompts, texts, strict=True):
        tokens, counts = decoder.decode(prompt, k)
        assert tokens == text
        assert counts.emitted == len(tokens)


def test_counts_equal_a_recount_without_caches(decoder, prompts, target, target_model):
    """Every block anew from the whole text: one pass of the target, the draft over all rows with an explicit mask."""
    k, draft = 3, decoder.draft
    for prompt in prompts[:2]:
        tokens, counts = decoder.decode(prompt, k)
        recount, answer = Counts(k, prompts=1, emitted=len(tokens)), tokens[:1]
        while len(answer) < 40 and not set(answer) & target.eos_token_ids:
            text = prompt + answer
            proposed = propose(draft, target_model, text, k)
            with torch.no_grad():
                choices = target_model(torch.tensor([text + proposed])).logits[0].argmax(-1)[len(text) - 1 :].tolist()
            accepted = next((i for i in range(k) if proposed[i] != choices[i]), k)
            recount.observe(accepted)
            answer = answer + choices[: accepted + 1]
        assert recount == counts
    assert counts.drafts > 0


@torch.no_grad()
def propose(draft, model, text: list[int], k: int) -> list[int]:
    """k drafted tokens after `text`, with no cache: the keys of all earlier rows are made anew for every step."""
    states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    aux = torch.cat([states[layer][0] for layer in draft.config.aux_layers], -1)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attention(_layer, q, new_k, new_v):
        held.append((new_k, new_v))
        keys, values = (
            torch.cat(x).repeat_interleave(q.shape[1] // new_k.shape[1], 1) for x in zip(*held, strict=True)
        )
        scores = torch.einsum("qhd,khd->hqk", q, keys) / q.shape[-1] ** 0.5
        hidden = torch.ones(len(q), len(keys), dtype=torch.bool).triu(len(keys) - len(q) + 1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)

    rows = torch.arange(len(text) - 1)
    state, normed = draft(draft.embed(torch.tensor(text[1:])), draft.combine(aux), rows, attention)
    proposed = []
    for step in range(k):
        proposed.append(int(draft.to_target_ids(draft.logits(normed[-1:]).argmax(-1))))
        token = torch.tensor(proposed[-1:])
        state, normed = draft(draft.embed(token), state[-1:], rows[-1:] + step + 1, attention)
    return proposed


def test_an_end_token_inside_a_block_ends_the_answer(decoder, prompts, monkeypatch):
    """Any token may be the end token: the answer is cut there, whatever was accepted beyond it."""
    whole, _ = decoder.decode(prompts[1], 3)
    for end in sorted(set(whole[1:12])):
        monkeypatch.setattr(decoder, "ends", {end})
        tokens, counts = decoder.decode(prompts[1], 3)
        assert tokens == whole[: whole.index(end) + 1]
        assert counts.emitted == len(tokens)


def test_length_limit(decoder, prompts, monkeypatch):
    whole, _ = decoder.decode(prompts[1], 3)
    for limit in (1, 2, 7):
        monkeypatch.setattr(decoder, "max_new_tokens", limit)
        assert decoder.decode(prompts[1], 3)[0] == whole[:limit]


SMALL = {
    "vocab_size": 24, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "eos_token_id": 3, "pad_token_id": 0,
}  # fmt: skip
CACHES = {
    "sliding window of 8": MistralConfig(**SMALL, sliding_window=8),
    "recurrent states": Qwen3_5TextConfig(
        **SMALL, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=32, linear_value_head_dim=32
    ),
}


@pytest.mark.parametrize("kind", CACHES)
def test_rejected_tokens_leave_nothing_in_any_cache(kind, monkeypatch):
    """Small random targets, whose caches cannot be cut like those of full attention, and proposals that are wrong at
    each of their places in turn."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CACHES[kind], dtype=torch.float32).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter *= 4  # so that the texts are no repetitions
    target = SimpleNamespace(
        config=model.config, device=torch.device("cpu"), dtype=torch.float32, eos_token_ids={3},
        load_model=lambda: model, rows=lambda part: model.get_input_embeddings().weight,
    )  # fmt: skip
    decoder = ReferenceDecoder(target, Eagle3Draft(Eagle3Config.of(DraftConfig(), target, [1, 2, 4], 24)), 30)
    for length in (3, 7, 9, 14, 20):
        prompt = torch.randint(4, 24, (length,)).tolist()
        ids = torch.tensor([prompt])
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
        expected = plain[0, length:].tolist()
        done, blocks = 0, 0

        def propose(fresh, _aux, _cache, k, length=length, expected=expected):
            nonlocal done, blocks
            done += len(fresh) - (length - 1 if blocks == 0 else 0)
            proposed = (expected[done : done + k] + [0] * k)[:k]
            if blocks % (k + 1) < k:
                proposed[blocks % (k + 1)] = 0  # never written: the targets' texts do not hold it
            blocks += 1
            return proposed

        monkeypatch.setattr(decoder, "_propose", propose)
        tokens, counts = decoder.decode(prompt, 3)
        assert tokens == expected
        assert counts.drafts == blocks
        if len(expected) == 30:
            assert counts.acceptance_length == pytest.approx(2.5, abs=0.3)  # 0, 1, 2, 3 of 3 in turn
