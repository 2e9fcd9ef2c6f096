"""Seeds for all tests, those of docstrings included, so that none depends on the ones before it."""

import random
import zlib

import numpy as np
import pytest
import torch


def seed_everything(name: str) -> None:
    seed = zlib.crc32(name.encode())  # the same in every process, unlike hash()
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """Fixtures of a module or a session are set up by whichever test comes first."""
    seed_everything(f"{fixturedef.baseid}::{fixturedef.argname}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    seed_everything(item.nodeid)
