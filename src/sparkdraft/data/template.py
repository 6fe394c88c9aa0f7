"""From a conversation to token ids and a loss mask, by the target's own chat template.

The conversation is rendered once and tokenised once, so the ids are those that serving sees. Which characters are the
assistant's is found by rendering prefixes: up to a turn with the generation prompt, and up to and with the turn.

    messages[:i] + generation prompt   <user>Hi<end><assistant>
    messages[:i+1]                     <user>Hi<end><assistant>Hello<end>\\n
    trained                                                    Hello<end>

This needs nothing of the template but that it renders a prefix of the conversation as a prefix of the text. Templates
that do not (those that strip the reasoning of earlier turns) are handled by one sample for each assistant turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from sparkdraft.errors import UserError

Message = dict[str, Any]


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
        whole = self.render(messages)
        starts = [self.render(messages[:i], generation=True) for i in turns]
        ends = [self.render(messages[: i + 1]) for i in turns]
        if all(map(whole.startswith, starts)) and all(map(whole.startswith, ends)):
            spans = [
                self._written(whole, len(start), len(end), messages[i])
                for i, start, end in zip(turns, starts, ends, strict=True)
            ]
            return [self._sequence(whole, spans, finished, max_length)]
        pairs = [(start, end) for start, end in zip(starts, ends, strict=True) if end.startswith(start)]
        return [
            self._sequence(
                end,
                [self._written(end, len(start), len(end), messages[i])],
                finished or i != turns[-1],
                max_length,
            )
            for i, (start, end) in zip(turns, pairs, strict=False)
        ]

    def _written(self, text: str, start: int, end: int, message: Message) -> tuple[int, int, int]:
        """Where an answer lies in the text: its start, the end of its content, and the end of its end token."""
        content = str(message.get("content") or "").strip()
        place = text.rfind(content, start, end) if content else start
        content_end = place + len(content) if place >= 0 else end
        specials = sorted(set(self.tokenizer.all_special_tokens) | set(self.tokenizer.get_added_vocab()), key=len)
        rest = text[content_end:end]
        found = [(rest.find(token), len(token)) for token in specials if token in rest]
        if not found:
            return start, content_end, len(text[:end].rstrip())
        at, length = min(found)
        return start, content_end, content_end + at + length

    def _sequence(self, text: str, spans: list[tuple[int, int, int]], finished: bool, max_length: int) -> Encoded:
        """Tokenise a text and mark the tokens that lie in the spans; nothing is kept after the last trained one."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        last_span = len(spans) - 1
        limits = [
            (start, content if number == last_span and not finished else end)
            for number, (start, content, end) in enumerate(spans)
        ]
        # a token that begins in the prompt and ends in the answer is the answer's: it could not be foreseen
        mask = [
            any(start < right <= end for start, end in limits) and left < right
            for left, right in encoded["offset_mapping"]
        ]
        last = max((i for i, on in enumerate(mask) if on), default=-1)
        length = min(last + 1, max_length)
        return Encoded(encoded["input_ids"][:length], mask[:length])
