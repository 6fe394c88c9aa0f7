"""Shared parts of the tests: the real target, materialised once."""

import pytest

from sparkdraft.config import TargetConfig
from sparkdraft.target import Target


@pytest.fixture(scope="session")
def target() -> Target:
    """SmolLM2-135M-Instruct."""
    return Target.open(TargetConfig())


@pytest.fixture(scope="session")
def target_model(target):
    """The target's weights in float32, shared by the tests that only read them."""
    return target.load_model()
