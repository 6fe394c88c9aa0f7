"""The schema of a run: what it refuses, and what it says then."""

import difflib
from typing import get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from sparkdraft.config import Config, dump_config, load_config
from sparkdraft.errors import UserError


def groups(model: type[BaseModel] = Config, prefix: tuple = ()) -> list[tuple[tuple, type[BaseModel]]]:
    """Every group of keys as (its path in a file, its model); items of a list are at index 0."""
    found = [(prefix, model)]
    for name, field in model.model_fields.items():
        annotation, path = field.annotation, (*prefix, name)
        while get_args(annotation):
            if annotation is not None and getattr(annotation, "__origin__", None) is list:
                path = (*path, 0)
            annotation = get_args(annotation)[0]
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found += groups(annotation, path)
    return found


def write(tmp_path_factory, content: dict | str):
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def nested(path: tuple, value: dict) -> dict | list:
    """`value` at `path`: ("data", "sources", 0) -> {"data": {"sources": [value]}}."""
    for part in reversed(path):
        value = [value] if part == 0 else {part: value}
    return value


def test_groups_are_found():
    assert {path for path, _ in groups()} >= {(), ("target",), ("data",), ("data", "sources", 0), ("train",), ("ttt",)}


@given(data=st.data())
def test_an_unknown_key_at_any_level_is_named_with_the_nearest_known_one(data, tmp_path_factory):
    path, model = data.draw(st.sampled_from(groups()))
    known = sorted(model.model_fields)
    key = data.draw(st.sampled_from(known))
    position = data.draw(st.integers(0, len(key)))
    wrong = key[:position] + data.draw(st.sampled_from("xqz")) + key[position:]
    content = nested(path, {wrong: 1})
    file = write(tmp_path_factory, {"name": "a"} | content)
    with pytest.raises(UserError) as error:
        load_config(file)
    message = str(error.value)
    assert str(file) in message
    assert f"unknown key {'.'.join(map(str, (*path, wrong)))!r}" in message
    nearest = difflib.get_close_matches(wrong, known, n=1, cutoff=0)[0]
    assert f"did you mean {nearest!r}" in message
    assert all(name in message for name in known)


@given(
    steps=st.integers(1, 10**6),
    rate=st.floats(1e-6, 1),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
)
def test_overrides_replace_and_the_resolved_file_reads_back(steps, rate, name, tmp_path_factory):
    file = write(tmp_path_factory, {"name": "a", "train": {"steps": 3, "seed": 5}})
    overrides = [
        f"train.steps={steps}",
        f"train.learning_rate={rate:.12f}",
        f"name='{name}'",
        "data.sources=[builtin, x.jsonl]",
    ]
    config = load_config(file, overrides)
    assert (config.name, config.train.steps, config.train.seed) == (name, steps, 5)
    assert config.train.learning_rate == pytest.approx(rate)
    assert [source.name for source in config.data.sources] == ["builtin", "x.jsonl"]
    resolved = write(tmp_path_factory, dump_config(config))
    assert load_config(resolved) == config


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.steps", "not of the form key=value"),
        ("=3", "not of the form key=value"),
        ("train.steps=[1", "not valid YAML"),
        ("name.part=1", "'name' is a value, not a group of keys"),
        ("train.steps=0", "train.steps"),
        ("train.steps=many", "'many'"),
        ("train.step=1", "did you mean 'steps'"),
        ("draft.kind=medusa", "draft.kind"),
        ("name=../elsewhere", "name"),
        ("ttt.step_weights=[1]", "one number a step"),
    ],
)
def test_a_wrong_override_is_the_users_to_mend(override, said, tmp_path_factory):
    with pytest.raises(UserError, match="(?s)" + said.replace("[", r"\[")):
        load_config(write(tmp_path_factory, {"name": "a"}), [override])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("name: [", "not valid YAML"),
        ("- a\n- b\n", "it holds list"),
        ("", "it holds NoneType"),
        ("train: {}\n", "name"),
    ],
)
def test_a_wrong_file_is_the_users_to_mend(content, said, tmp_path_factory):
    file = write(tmp_path_factory, content)
    with pytest.raises(UserError, match=said) as error:
        load_config(file)
    assert str(file) in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.yaml cannot be read"):
        load_config(tmp_path / "nowhere.yaml")


def test_the_shipped_configs_are_valid():
    from pathlib import Path

    files = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
    assert files
    for file in files:
        assert load_config(file).name == file.stem
