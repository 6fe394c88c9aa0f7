"""The reference engine: greedy speculative decoding in plain torch, one prompt at a time.

It counts as vLLM does: a draft is a block of k tokens that the target verified, in full even where the answer ends
inside it or at its length limit; the first token after the prompt comes from the prompt's own pass.

Rejected tokens are cut off the target's cache. Recurrent states (gated DeltaNet) cannot be cut: there the cache is copied
before a block, and the accepted tokens are run again, so the counts hold but the speed says little.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from sparkdraft.data.template import Template
from sparkdraft.decoding.judgement import TIMED, Answer, Judgement, Speed, spread
from sparkdraft.decoding.questions import Question
from sparkdraft.drafts.counts import Counts
from sparkdraft.drafts.eagle3 import Eagle3Draft
from sparkdraft.features.taps import Taps
from sparkdraft.target import Target


@dataclass
class DraftCache:
    """Keys and values of the draft, layer by layer; an `attention` for `Eagle3Draft`, causal over what it holds."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    length: int = 0
    """Rows that stay: those made of true features."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.keys:
            k, v = torch.cat([self.keys[layer], k]), torch.cat([self.values[layer], v])
        self.keys[layer], self.values[layer] = k, v
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)

    def crop(self) -> None:
        """Forget the rows that were made of the draft's own states."""
        for layer in self.keys:
            self.keys[layer], self.values[layer] = self.keys[layer][: self.length], self.values[layer][: self.length]


class ReferenceDecoder:
    """A target and, if given, a draft, ready to answer token lists greedily."""

    def __init__(self, target: Target, draft: Eagle3Draft | None, max_new_tokens: int):
        self.target, self.draft, self.max_new_tokens = target, draft, max_new_tokens
        self.model = target.load_model()
        self.ends = target.eos_token_ids
        self.taps = Taps(self.model.get_decoder(), draft.config.aux_layers if draft else [])
        if draft:
            draft.set_embeddings(target.rows("embed"))
            draft.to(device=target.device).eval()
            for parameter in draft.parameters():  # not the rotary table, which BF16 would turn by radians
                parameter.data = parameter.data.to(target.dtype)

    def _forward(self, token_ids: list[int], cache: DynamicCache) -> tuple[list[int], Tensor | None]:
        """Run the target over new tokens: its choice after each, and its auxiliary states [T, A*H]."""
        start = cache.get_seq_length()
        ids = torch.tensor([token_ids], device=self.model.device)
        positions = torch.arange(start, start + len(token_ids), device=ids.device)[None]
        logits = self.model(
            input_ids=ids, position_ids=positions, past_key_values=cache, logits_to_keep=0 if start else 1
        ).logits[0]
        states = self.taps.take()
        return logits.argmax(-1).tolist(), torch.cat(states, -1)[0] if states else None

    @torch.inference_mode()
    def decode(self, prompt: list[int], k: int) -> tuple[list[int], Counts]:
        """Answer a prompt, drafting k tokens at a time (0: plain decoding).

        Returns:
            the new tokens, end token included, at most `max_new_tokens`; the counts of drafting.
        """
        cache, draft_cache = DynamicCache(config=self.model.config), DraftCache()
        counts = Counts(max(k, 1), prompts=1)
        (token,), aux = self._forward(prompt, cache)
        answer, fresh = [token], [*prompt[1:], token]
        while not self._ended(answer):
            proposed = self._propose(fresh, aux, draft_cache, k) if k and aux is not None else []
            fresh, aux, cache = self._verify([answer[-1], *proposed], cache)
            if k:
                counts.observe(len(fresh) - 1)
            answer += fresh
        answer = self._cut(answer)
        counts.emitted = len(answer)
        return answer, counts

    def _verify(self, block: list[int], cache: DynamicCache) -> tuple[list[int], Tensor | None, DynamicCache]:
        """Run the target over the answer's last token and the drafted ones.

        Returns:
            the accepted tokens and the target's own next one; the states that they were made of; the cache, in which the
            rejected tokens have left nothing.
        """
        cut = cache.is_croppable
        if cut:
            cache.activate_past_recording()  # a sliding window keeps what the block pushes out of it
        before = cache if cut or len(block) == 1 else copy.deepcopy(cache)
        choices, aux = self._forward(block, cache)
        drafted = block[1:]
        accepted = next((i for i, token in enumerate(drafted) if token != choices[i]), len(drafted))
        if cut:
            cache.crop(accepted - len(drafted))
        elif accepted < len(drafted):
            cache = before
            self._forward(block[: accepted + 1], cache)
        return choices[: accepted + 1], aux[: accepted + 1] if aux is not None else None, cache

    def _propose(self, tokens: list[int], aux: Tensor, cache: DraftCache, k: int) -> list[int]:
        """Draft k tokens after `tokens`, whose predecessors' true features are `aux` (one row a token)."""
        assert self.draft
        cache.crop()
        rows = torch.arange(cache.length, cache.length + len(tokens), device=aux.device)
        ids = torch.tensor(tokens, device=aux.device)
        state, normed = self.draft(self.draft.embed(ids), self.draft.combine(aux), rows, cache)
        cache.length += len(tokens)
        proposed: list[int] = []
        for step in range(k):
            if step:
                last = torch.tensor(proposed[-1:], device=aux.device)
                state, normed = self.draft(self.draft.embed(last), state[-1:], rows[-1:] + step, cache)
            choice = self.draft.logits(normed[-1:]).argmax(-1)
            proposed.append(int(self.draft.to_target_ids(choice)))
        return proposed

    def _cut(self, answer: list[int]) -> list[int]:
        """The answer up to its end token and its length limit."""
        end = next((i + 1 for i, token in enumerate(answer) if token in self.ends), len(answer))
        return answer[: min(end, self.max_new_tokens)]

    def _ended(self, answer: list[int]) -> bool:
        return len(answer) >= self.max_new_tokens or any(token in self.ends for token in answer)


def run_reference(
    target: Target, draft: Eagle3Draft, template: Template, questions: Sequence[Question], k: int, max_new_tokens: int,
    baseline: bool,
) -> Judgement:  # fmt: skip
    """Judge a draft with the reference decoder."""
    decoder = ReferenceDecoder(target, draft, max_new_tokens)
    timed = {question.id for question in spread(questions, TIMED)}
    answers, speed, plain = [], Speed(0, 0.0), Speed(0, 0.0)
    decoder.decode(questions[0].tokens(template), k)  # warm
    for question in track(questions, "decode", console=Console(stderr=True)):
        prompt = question.tokens(template)
        start = time.perf_counter()
        tokens, counts = decoder.decode(prompt, k)
        seconds = time.perf_counter() - start
        answers.append(Answer(question.id, question.kind, tokens, counts))
        if question.id in timed:
            speed.add(len(tokens), seconds)
            if baseline:
                start = time.perf_counter()
                plain.add(len(decoder.decode(prompt, 0)[0]), time.perf_counter() - start)
    dtype = str(target.dtype).removeprefix("torch.")
    return Judgement("reference", k, dtype, max_new_tokens, answers, speed, plain if baseline else None)
