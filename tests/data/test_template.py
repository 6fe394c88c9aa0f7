"""Loss masks: decoding the trained tokens gives what the assistant wrote and its end token, nothing else."""

import copy

import pytest

from sparkdraft.data.template import Template
from sparkdraft.errors import UserError

CHAT = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "What is 2+2? Say Hello! too."},
    {"role": "assistant", "content": "4, and Hello!\n\nBye."},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# strips the reasoning of all but the last answer, as thinking models' templates do
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].strip() }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# no end token after an answer but the next turn's start
PLAIN = (
    "{% for m in messages %}{{ 'A: ' if m.role == 'assistant' else 'Q: ' }}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}A: {% endif %}"
)
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def template_of(target):
    def make(text: str | None) -> Template:
        tokenizer = copy.deepcopy(target.tokenizer)
        if text is not None:
            tokenizer.chat_template = text
        return Template(tokenizer, {})

    return make


def trained(template, sequence) -> list[str]:
    """The text of every stretch of trained tokens."""
    stretches, current = [], []
    for token, on in [*zip(sequence.token_ids, sequence.loss_mask, strict=True), (0, False)]:
        if on:
            current.append(token)
        elif current:
            stretches.append(template.tokenizer.decode(current))
            current = []
    return stretches


@pytest.mark.parametrize("text", [None, CHATML, GENERATION])
def test_every_answer_and_its_end_token_is_trained(template_of, text):
    template = template_of(text)
    (sequence,) = template.encode(CHAT, True, 1000)
    assert trained(template, sequence) == ["Hello!<|im_end|>", "4, and Hello!\n\nBye.<|im_end|>"]
    whole = template.tokenizer(template.render(CHAT), add_special_tokens=False)["input_ids"]
    assert sequence.token_ids == whole[: len(sequence.token_ids)]


def test_the_prompt_is_what_serving_gives(template_of):
    template = template_of(None)
    (sequence,) = template.encode(CHAT[:3], True, 1000)
    prompt = template.prompt(CHAT[:2])
    assert sequence.token_ids[: len(prompt)] == prompt
    assert sequence.loss_mask == [False] * len(prompt) + [True] * (len(sequence.token_ids) - len(prompt))


def test_an_unfinished_answer_has_no_end_token(template_of):
    template = template_of(None)
    (sequence,) = template.encode(CHAT, False, 1000)
    assert trained(template, sequence) == ["Hello!<|im_end|>", "4, and Hello!\n\nBye."]


def test_a_template_without_end_tokens_trains_the_content(template_of):
    template = template_of(PLAIN)
    (sequence,) = template.encode(CHAT, True, 1000)
    assert [part.strip() for part in trained(template, sequence)] == ["Hello!", "4, and Hello!\n\nBye."]


def test_a_template_that_strips_reasoning_gives_a_sample_a_turn(template_of):
    template = template_of(THINKING)
    chat = copy.deepcopy(CHAT)
    chat[2]["content"] = "<think>greet</think>Hello!"
    chat[4]["content"] = "<think>add</think>4"
    sequences = template.encode(chat, True, 1000)
    assert [trained(template, sequence) for sequence in sequences] == [
        ["<think>greet</think>Hello!<|im_end|>"],
        ["<think>add</think>4<|im_end|>"],
    ]
    text = template.tokenizer.decode(sequences[1].token_ids)
    assert "greet" not in text


def test_cutting_keeps_ids_and_mask_in_step(template_of):
    template = template_of(None)
    (whole,) = template.encode(CHAT, True, 1000)
    for length in range(1, len(whole.token_ids) + 1):
        (cut,) = template.encode(CHAT, True, length)
        assert (cut.token_ids, cut.loss_mask) == (whole.token_ids[:length], whole.loss_mask[:length])


def test_a_target_without_a_chat_template_is_said(template_of):
    with pytest.raises(UserError, match=r"no chat template.*chat_template"):
        template_of("")


def test_a_template_that_refuses_is_said(template_of):
    template = template_of("{{ raise_exception('no system role') }}")
    with pytest.raises(UserError, match="refuses a conversation: no system role"):
        template.render(CHAT)
