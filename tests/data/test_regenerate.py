"""On-policy answers: equal to transformers' own generation, drawn by prompt alone, finished after a kill."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from sparkdraft.config import Config, DataConfig
from sparkdraft.data import regenerate as module
from sparkdraft.data.prompts import Prompt, load_prompts
from sparkdraft.data.regenerate import Generator, read_conversations, regenerate, ship, shipped_answers
from sparkdraft.data.template import Template

PROMPTS = [
    Prompt("a", ("What is the capital of France?",)),
    Prompt("a", ("Say yes.",)),
    Prompt("b", ("List five colours, one a line.",)),
    Prompt("b", ("Translate to French: The cat sleeps on the warm roof of the old house by the sea.",)),
    Prompt("c", ("What is 2 + 3?", "And twice that?")),
]


@pytest.fixture(autouse=True)
def one_thread():
    """Small batches gain little from more, and lose much where another process is at work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def loaded(target, target_model, monkeypatch):
    """The target, whose weights are not loaded anew in every test; no answers ship with it."""
    monkeypatch.setattr(type(target), "load_model", lambda self: target_model)
    monkeypatch.setattr(module, "shipped_answers", lambda target, config: {})
    return target


def first_answers(target, config: DataConfig, prompts=PROMPTS) -> dict[str, list[int]]:
    """Each prompt's first answer as token ids, by the prompt's id."""
    template = Template(target.tokenizer, {})
    ids = [template.prompt([{"role": "user", "content": prompt.turns[0]}]) for prompt in prompts]
    answers = Generator(target, config).generate(ids, [prompt.id for prompt in prompts])
    return {prompts[index].id: answer for index, answer, _ in answers}


def unbatched(model, ids: list[int], ends: set[int], count: int) -> list[int]:
    """What transformers' own greedy generation answers to one prompt."""
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
        max_new_tokens=count, eos_token_id=sorted(ends), pad_token_id=0,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


def assert_same_or_tied(model, prompt: list[int], answer: list[int], reference: list[int]) -> None:
    """Equal, or different first where the two tokens' logits are equal up to rounding."""
    if answer == reference:
        return
    at = next(i for i, (one, other) in enumerate(zip(answer, reference, strict=False)) if one != other)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + reference[:at]])).logits[0, -1]
    assert abs(logits[answer[at]] - logits[reference[at]]) < 1e-3


def test_batched_greedy_answers_are_those_of_transformers(loaded, target_model):
    """With batches in which the rows end at different lengths."""
    answers = first_answers(loaded, DataConfig(max_new_tokens=20, batch_size=3))
    template = Template(loaded.tokenizer, {})
    for prompt in PROMPTS:
        ids = template.prompt([{"role": "user", "content": prompt.turns[0]}])
        reference = unbatched(target_model, ids, loaded.eos_token_ids, 20)
        assert_same_or_tied(target_model, ids, answers[prompt.id], reference)
    assert len({len(answer) for answer in answers.values()}) > 1


def test_a_hybrid_target_is_answered_the_same_in_batches():
    """Gated DeltaNet's states: left padding does not reach them, and they leave the batch with their row."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=24, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=32,
        linear_value_head_dim=32, eos_token_id=3, pad_token_id=0,
    )  # fmt: skip
    assert {"linear_attention", "full_attention"} == set(config.layer_types)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4 if parameter.dim() > 1 else 1)  # sharper, so that the answers differ
    prompts = [torch.randint(4, 24, (length,)).tolist() for length in (3, 9, 5, 14, 7, 2)]
    generator = Generator(
        SimpleNamespace(device=torch.device("cpu"), eos_token_ids={3}, config=config),
        DataConfig(max_new_tokens=16, batch_size=3),
    )
    generator.model = model
    lengths = set()
    for index, answer, finished in generator.generate(prompts, [str(i) for i in range(len(prompts))]):
        assert_same_or_tied(model, prompts[index], answer, unbatched(model, prompts[index], {3}, 16))
        assert finished == (answer[-1] == 3)
        lengths.add(len(answer))
    assert len(lengths) > 1


def test_draws_depend_on_the_prompt_and_its_name_alone(loaded):
    config = {"max_new_tokens": 8, "temperature": 1.0, "top_p": 0.9}
    together = first_answers(loaded, DataConfig(**config, batch_size=5))
    assert first_answers(loaded, DataConfig(**config, batch_size=2), PROMPTS[::-1]) == together
    assert together != first_answers(loaded, DataConfig(max_new_tokens=8))


def test_a_tiny_nucleus_is_greedy(loaded):
    greedy = first_answers(loaded, DataConfig(max_new_tokens=8))
    assert first_answers(loaded, DataConfig(max_new_tokens=8, temperature=1.0, top_p=1e-6)) == greedy


def test_draws_follow_the_tempered_nucleus():
    """Frequencies of 4,000 draws against the probabilities, cut to the smallest set that holds top_p, renormalised."""
    target = SimpleNamespace(eos_token_ids={0}, device="cpu")
    generator = Generator(target, DataConfig(temperature=2.0, top_p=0.75))
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log() * 2
    draws = [torch.Generator().manual_seed(seed) for seed in range(4000)]
    tokens = generator._choose(logits.expand(len(draws), -1), draws)
    share = torch.bincount(tokens, minlength=4) / len(draws)
    expected = torch.tensor([0.0, 4 / 9, 2 / 9, 3 / 9])  # 0.4 and 0.3 hold less than 0.75, so 0.2 is in
    assert torch.allclose(share, expected, atol=0.03)
    assert share[0] == 0


def test_the_second_turn_is_asked_after_the_first_answer(loaded, target_model, tmp_path):
    config = DataConfig(max_new_tokens=24, batch_size=2)
    regenerate(PROMPTS[4:], loaded, config, tmp_path / "out.jsonl")
    (row,) = read_conversations(tmp_path / "out.jsonl").values()
    roles = [message["role"] for message in row["messages"]]
    assert roles == ["user", "assistant"] * 2
    ids = Template(loaded.tokenizer, {}).prompt(row["messages"][:3])
    reference = loaded.tokenizer.decode(
        unbatched(target_model, ids, loaded.eos_token_ids, 24), skip_special_tokens=True
    )
    assert row["messages"][3]["content"] == reference


@pytest.mark.parametrize("torn", [0, 1, 40])
def test_a_killed_generation_goes_on_to_the_same_end(loaded, tmp_path, torn, monkeypatch):
    """The file is cut after two lines and `torn` more bytes, as a kill leaves it."""
    config = DataConfig(max_new_tokens=6)
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    regenerate(PROMPTS, loaded, config, whole)
    lines = whole.read_bytes().splitlines(keepends=True)
    cut.write_bytes(b"".join(lines[:2]) + lines[2][:torn])
    asked = []
    generate = Generator.generate
    monkeypatch.setattr(Generator, "generate", lambda self, p, n: asked.append(len(p)) or generate(self, p, n))
    regenerate(PROMPTS, loaded, config, cut)
    assert read_conversations(cut) == read_conversations(whole)
    assert cut.read_bytes().count(b"\n") == len(PROMPTS)
    assert asked[0] == len(PROMPTS) - 2


def test_a_prompt_without_room_is_given_no_answer(loaded, tmp_path):
    """Instead of pages of text that no sample could hold; the others are answered."""
    long = Prompt("long", ("word " * 200,))
    regenerate([long, PROMPTS[1]], loaded, DataConfig(max_new_tokens=4, max_length=100), tmp_path / "out.jsonl")
    rows = read_conversations(tmp_path / "out.jsonl")
    assert (rows[long.id]["messages"][-1]["content"], rows[long.id]["finish_reason"]) == ("", "length")
    assert rows[PROMPTS[1].id]["tokens"] > 0
    regenerate([long, PROMPTS[1]], loaded, DataConfig(max_new_tokens=4, max_length=400), tmp_path / "out.jsonl")
    again = read_conversations(tmp_path / "out.jsonl")
    assert again[long.id]["tokens"] > 0
    assert again[PROMPTS[1].id] == rows[PROMPTS[1].id]


def test_a_character_cut_in_its_middle_is_left_out(loaded, tmp_path, monkeypatch):
    emoji = loaded.tokenizer("Hi 🦜", add_special_tokens=False)["input_ids"]
    assert loaded.tokenizer.decode(emoji[:-1]).endswith("\ufffd")
    monkeypatch.setattr(Generator, "generate", lambda self, p, n: iter([(0, emoji[:-1], False)]))
    regenerate(PROMPTS[:1], loaded, DataConfig(), tmp_path / "out.jsonl")
    (row,) = read_conversations(tmp_path / "out.jsonl").values()
    assert row["messages"][-1]["content"] == "Hi "


def test_shipped_answers_need_the_same_target_and_settings(loaded, tmp_path, monkeypatch):
    """Answers shipped into a folder are taken from there, until a setting that they depend on differs."""
    (tmp_path / "responses").mkdir()
    prompts = PROMPTS[:2]
    monkeypatch.setattr(module, "load_prompts", lambda config: (prompts, 0))
    ship(Config(name="x", data=DataConfig(max_new_tokens=5)), tmp_path / "responses")
    assert sorted(file.suffix for file in (tmp_path / "responses").iterdir()) == [".json", ".jsonl"]
    monkeypatch.setattr(module, "BUILTIN", tmp_path)
    monkeypatch.setattr(module, "shipped_answers", shipped_answers)

    same = DataConfig(max_new_tokens=5, batch_size=3, max_length=77, top_p=0.5, seed=9)  # greedy: nothing is drawn
    assert set(shipped_answers(loaded, same)) == {prompt.id for prompt in prompts}
    for change in (
        {"temperature": 0.5},
        {"max_new_tokens": 6},
        {"system_prompt": "x"},
        {"template_arguments": {"a": 1}},
    ):
        assert shipped_answers(loaded, DataConfig(**{"max_new_tokens": 5, **change})) == {}

    monkeypatch.setattr(Generator, "generate", None)  # nothing is left to be generated
    regenerate(prompts, loaded, same, tmp_path / "out.jsonl")
    assert len(read_conversations(tmp_path / "out.jsonl")) == 2


def test_what_ships_is_what_its_record_says(target):
    """Every built-in prompt's questions are those that were asked, and no answer is empty."""
    prompts = {prompt.id: prompt for prompt in load_prompts(DataConfig())[0]}
    rows = shipped_answers(target, DataConfig())
    record = json.loads((module.BUILTIN / "responses" / f"{target.name}.json").read_text())
    assert len(rows) == record["conversations"] > 1000
    for name, row in rows.items():
        if name in prompts:
            asked = [message["content"] for message in row["messages"] if message["role"] == "user"]
            assert tuple(asked) == prompts[name].turns[: len(asked)]
            assert row["kind"] == prompts[name].kind
    assert {row["finish_reason"] for row in rows.values()} == {"stop", "length"}
