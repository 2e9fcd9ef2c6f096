"""Tests start from seeds of their own, whatever ran before them (conftest.py in the root)."""

import random
import zlib

import numpy as np
import pytest
import torch


def draw():
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


def expected(name):
    seed = zlib.crc32(name.encode())
    generator = torch.Generator().manual_seed(seed)
    return random.Random(seed).random(), np.random.RandomState(seed).rand(), float(torch.rand((), generator=generator))


@pytest.fixture(scope="module")
def drawn():
    return draw()


def test_seeds_are_names(request, drawn):
    assert draw() == expected(request.node.nodeid)
    assert drawn == expected(f"{request.node.nodeid.partition('::')[0]}::drawn")
