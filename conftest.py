"""Seeds for all tests, those of docstrings included, so that none depends on the ones before it; and no lost time."""

import gc
import os
import random
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import nn

from atoll.graph import Digest, function, function_digest

# Machines differ in speed, and a timeout is not a counterexample.  The same examples every time:
# `pytest --hypothesis-profile=default` draws new ones, and twice as many.
settings.register_profile("atoll", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("atoll")


@pytest.fixture(scope="session", autouse=True)
def _no_fsync() -> Iterator[None]:
    """What is written survives a kill without it; it only matters if the machine itself stops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _capture_once() -> Iterator[None]:
    """Capture a model only once if its code, settings and tensors are the same as before."""
    digests: dict[object, Digest] = {}

    def digest(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Digest:
        key = (*function._Writer(module).lines(), shape, dtype)
        if key not in digests:
            digests[key] = function_digest(module, shape, dtype)
        return digests[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atoll.subject.function_digest", digest)
        yield


def pytest_collection_finish() -> None:
    """Do not search half a million objects of imported modules for garbage again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


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
