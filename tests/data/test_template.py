"""Loss masks: decoding the trained tokens gives what the assistant wrote and its end token, nothing else."""

import copy

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

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


# opens the reasoning in the generation prompt, closes it in every answer that it shows (Qwen3.5)
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set parts = m.content.split('</think>') %}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\\n' }}"
    "{{ parts[0].split('<think>')[-1].strip() if parts[1:] else '' }}{{ '\\n</think>\\n\\n' }}{% endif %}"
    "{{ parts[-1].strip() }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ '<think>\\n' }}{% endif %}"
)
# opens the reasoning too, and never shows it again (DeepSeek-R1)
FORGETTING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].strip() }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ '<think>\\n' }}{% endif %}"
)


@pytest.mark.parametrize("text", [REASONING, FORGETTING])
@pytest.mark.parametrize(
    ("answer", "finished", "expected"),
    [
        ("I add.\n</think>\n\n4", True, "I add.\n</think>\n\n4<|im_end|>"),
        ("I add.\n</think>\n\n4 and", False, "I add.\n</think>\n\n4 and"),
        ("I add.", False, "I add."),
        ("<think>\nI add.\n</think>\n\n4", True, "I add.\n</think>\n\n4<|im_end|>"),
    ],
    ids=["finished", "cut", "cut-in-the-reasoning", "opened-twice"],
)
def test_an_answer_stands_after_the_generation_prompt_as_it_was_written(template_of, text, answer, finished, expected):
    """Whatever the template makes of it: no reasoning is closed that was not, none is lost, none counted twice."""
    template = template_of(text)
    chat = [*CHAT[:2], {"role": "assistant", "content": answer}]
    (sequence,) = template.encode(chat, finished, 1000)
    assert trained(template, sequence) == [expected]
    prompt = template.prompt(chat[:2])
    assert sequence.token_ids[: len(prompt)] == prompt


def test_an_answer_without_reasoning_keeps_what_the_template_adds(template_of):
    """Given answers to a target that reasons: an empty reasoning, as its history shows it, and not an open one."""
    template = template_of(REASONING)
    (sequence,) = template.encode([*CHAT[:2], {"role": "assistant", "content": "4"}], True, 1000)
    assert [part.split() for part in trained(template, sequence)] == [["</think>", "4<|im_end|>"]]


@pytest.mark.parametrize("answer", ["im", "end", "<", "assistant", "", "You are terse."])
def test_answers_that_look_like_the_frame_around_them(template_of, answer):
    for text in (None, CHATML, GENERATION):
        template = template_of(text)
        (sequence,) = template.encode([*CHAT[:2], {"role": "assistant", "content": answer}], True, 1000)
        assert trained(template, sequence) == [f"{answer}<|im_end|>"]


# no control characters (this vocabulary lacks some bytes), no space in front (it may merge with the prompt's line end)
ANSWER = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs", "Cc", "Co", "Cn"]), max_size=30).map(
    str.lstrip
)


@given(st.lists(ANSWER, min_size=1, max_size=3), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@example(["the cat"], False)
def test_round_trip(template_of, answers, finished):
    """Any text: what is trained is what was written, with an end token after each finished answer."""
    assume(all("<|" not in answer for answer in answers))
    template = template_of(None)
    chat = [m for a in answers for m in ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": a})]
    (sequence,) = template.encode(chat, finished, 10**6)
    expected = [f"{answer}<|im_end|>" for answer in answers]
    if not finished:
        expected[-1] = answers[-1]
    assert trained(template, sequence) == [text for text in expected if text]


def test_a_target_without_a_chat_template_is_said(template_of):
    with pytest.raises(UserError, match=r"no chat template.*chat_template"):
        template_of("")


def test_a_template_that_refuses_is_said(template_of):
    template = template_of("{{ raise_exception('no system role') }}")
    with pytest.raises(UserError, match="refuses a conversation: no system role"):
        template.render(CHAT)
