"""Reading a feature store: damage of every kind is named with its shard and the way to mend it."""

import json
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkdraft.config import Config
from sparkdraft.errors import UserError
from sparkdraft.features.capture import capture
from sparkdraft.features.store import FeatureStore
from sparkdraft.run import Run


@pytest.fixture(scope="module")
def small_store(prepared, hybrid_target, tmp_path_factory):
    """A finished store of small states: a run directory."""
    runs = tmp_path_factory.mktemp("captured")
    shutil.copytree(prepared, runs / "small")
    groups = {"target": {"model": str(hybrid_target)}, "features": {"aux_layers": [0, 1], "tokens_per_shard": 600}}
    run = Run.open(Config.model_validate({"name": "small", "runs_dir": str(runs)} | groups))
    capture(run.config, run)
    return run.path


@pytest.fixture
def directory(small_store, tmp_path):
    """A copy that may be damaged."""
    shutil.copytree(small_store, tmp_path / "small")
    return tmp_path / "small" / "features"


def place_of(path, tensor: str) -> tuple[int, int]:
    """First and last byte of a tensor in a safetensors file."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    start, end = json.loads(content[8 : 8 + size])[tensor]["data_offsets"]
    return 8 + size + start, 8 + size + end


def test_loading_copies_nothing_and_agrees_with_tokens(small_store):
    store = FeatureStore.open(small_store / "features")
    store.verify()
    for entry in store.entries:
        features = store.load(entry)
        whole = store._tensors[entry.shard]
        assert features.aux.data_ptr() == whole["aux"].data_ptr() + entry.offset * whole["aux"].stride(0) * 2
        assert features.aux.shape == (entry.length, 2 * store.hidden_size) and features.aux.dtype == torch.bfloat16
        token_ids, loss_mask = store.tokens(entry)
        assert torch.equal(features.token_ids, token_ids) and torch.equal(features.loss_mask, loss_mask)
        assert int(loss_mask.sum()) == entry.trained
    assert {entry.split for entry in store.entries} == {"train", "held_out"}


def test_offsets_in_a_shard_are_those_of_the_index(small_store):
    store = FeatureStore.open(small_store / "features")
    for name, tensors in store._tensors.items():
        entries = sorted((entry for entry in store.entries if entry.shard == name), key=lambda entry: entry.offset)
        ends = [entry.offset + entry.length for entry in entries]
        assert tensors["offsets"].tolist() == [0, *ends] == [*(entry.offset for entry in entries), ends[-1]]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_found(data, small_store, tmp_path_factory):
    directory = tmp_path_factory.mktemp("damaged") / "small" / "features"
    shutil.copytree(small_store / "features", directory)
    shard = data.draw(st.sampled_from(sorted(directory.glob("*.safetensors"))))
    content = bytearray(shard.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans(), label="cut"):
        shard.write_bytes(content[:place])
    else:
        content[place] ^= data.draw(st.integers(1, 255))
        shard.write_bytes(content)
    with pytest.raises(UserError) as error:
        FeatureStore.open(directory).verify()
    message = str(error.value)
    assert str(shard) in message
    assert f"sparkdraft capture --config {directory.parent / 'config.yaml'}" in message
    shutil.rmtree(directory)


def test_a_missing_shard_or_index_is_named(directory):
    shard = sorted(directory.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard} is damaged: it has 0 bytes"):
        FeatureStore.open(directory)
    (directory / "index.json").unlink()
    with pytest.raises(UserError, match=r"no finished feature store.*sparkdraft capture"):
        FeatureStore.open(directory)


@pytest.mark.parametrize("tensor", ["aux", "final"])
@pytest.mark.parametrize("value", [b"\xc0\x7f", b"\x80\x7f", b"\x80\xff"], ids=["nan", "inf", "-inf"])
def test_a_state_that_is_not_finite_is_refused_when_it_is_loaded(directory, tensor, value):
    store = FeatureStore.open(directory)
    entry = store.entries[3]
    path = directory / entry.shard
    start, end = place_of(path, tensor)
    width = (end - start) // len(store._tensors[entry.shard][tensor])
    with path.open("r+b") as file:
        file.seek(start + (entry.offset + entry.length - 1) * width + width - 2)
        file.write(value)
    store = FeatureStore.open(directory)
    with pytest.raises(UserError, match=f"{path}.* the {tensor} states of sample {entry.id} hold NaN or infinity"):
        store.load(entry)
    for other in store.entries:
        if other != entry:
            store.load(other)
