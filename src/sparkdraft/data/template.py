"""From a conversation to token ids and a loss mask, by the target's own chat template.

The conversation is rendered once and tokenised once, so the ids are those that serving sees. What the assistant wrote is
found by rendering prefixes: up to a turn with the generation prompt, up to and with the turn.

    messages[:i] + generation prompt   <user>Hi<end><assistant>
    messages[:i+1]                     <user>Hi<end><assistant>Hello<end>\\n
    closing (after any answer)                                      <end>\\n
    trained                                                    Hello<end>

Templates rewrite answers: they close reasoning that was cut, or leave the reasoning of earlier turns out. An answer that
was cut, or that the template does not show after its own generation prompt, is put after that prompt as it was written,
as serving had it. Where an earlier turn is not the start of the last one, each turn is a sample of its own.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from sparkdraft.errors import UserError

Message = dict[str, Any]

_STAND_IN = "answer-stand-in"
_LAST_TAG = re.compile(r"([<\[][^<>\[\]\s]+[>\]])\s*$")
"""`<think>` at the end of a generation prompt."""


@dataclass(frozen=True)
class Encoded:
    """One training sequence: ids and, for each, whether the assistant wrote it (its end token included)."""

    token_ids: list[int]
    loss_mask: list[bool]


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template with the arguments that serving gives it."""

    tokenizer: PreTrainedTokenizerBase
    arguments: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise UserError(
                f"target.model: the tokenizer in {self.tokenizer.name_or_path} has no chat template. Add "
                "chat_template.jinja (or `chat_template` in tokenizer_config.json) to the checkpoint directory."
            )

    def render(self, messages: Sequence[Message], generation: bool = False) -> str:
        """The text of a conversation, with the generation prompt at its end where it is asked for.

        Raises:
            UserError: the template refuses the conversation.
        """
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=generation, **self.arguments
                )
            )
        except (TemplateError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"The chat template of {self.tokenizer.name_or_path} refuses a conversation: {error}"
            ) from error

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids that the target is given to answer with."""
        return self.tokenizer(self.render(messages, generation=True), add_special_tokens=False)["input_ids"]

    def encode(self, messages: Sequence[Message], finished: bool, max_length: int) -> list[Encoded]:
        """The training sequences of a conversation: one, or one an assistant turn where the template rewrites history.

        Args:
            messages: with `role` and `content`; assistant turns are trained.
            finished: false where the last answer was cut by a length limit, so that its end token was never written.
            max_length: in tokens; what is beyond is cut off.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        written = [self._written(messages[: i + 1], finished or i != turns[-1]) for i in turns]
        if all(written[-1][0].startswith(text) for text, _ in written):
            spans = [(start, len(text)) for text, start in written]
            return [self._sequence(written[-1][0], spans, max_length)] if written else []
        return [self._sequence(text, [(start, len(text))], max_length) for text, start in written]

    def _written(self, messages: Sequence[Message], finished: bool) -> tuple[str, int]:
        """The text of a conversation up to the end token of its last message, an answer, and where that answer starts."""
        *before, answer = messages
        content = str(answer.get("content") or "")
        start = self.render(before, generation=True)
        if not finished:
            return start + content, len(start)
        shown = self.render(messages)
        closing = self.render([*before, {**answer, "content": _STAND_IN}]).rpartition(_STAND_IN)[2]
        end_token = closing[: self._end_of_special(closing)]
        body_end = len(shown) - len(closing)
        kept = shown.startswith(start) and shown.endswith(closing) and content.strip() in shown[len(start) : body_end]
        if kept:
            return shown[:body_end] + end_token, len(start)
        # an answer from elsewhere may open its reasoning itself, as the generation prompt has done already
        opened = _LAST_TAG.search(start)
        if opened and content.startswith(opened[1]):
            content = content.removeprefix(opened[1]).lstrip()
        return start + content + end_token, len(start)

    def _end_of_special(self, text: str) -> int:
        """Where the first special token of a text ends; 0 where there is none."""
        tokens = {*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()}
        found = [(text.find(token), -len(token)) for token in tokens if token and token in text]
        return min(found)[0] - min(found)[1] if found else 0

    def _sequence(self, text: str, spans: list[tuple[int, int]], max_length: int) -> Encoded:
        """Tokenise a text and mark the tokens that lie in the spans; nothing is kept after the last trained one."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        # a token that begins in the prompt and ends in the answer is the answer's: it could not be foreseen
        mask = [any(start < right <= end for start, end in spans) for _, right in encoded["offset_mapping"]]
        last = max((i for i, on in enumerate(mask) if on), default=-1)
        length = min(last + 1, max_length)
        return Encoded(encoded["input_ids"][:length], mask[:length])
