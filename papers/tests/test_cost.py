"""Functions of known cost."""

from __future__ import annotations

import functools
import operator
import os
import time

import pytest

from atoll.errors import AtollError
from atoll_papers.cost import added, peak_memory, ratio, seconds

SIZE = 100_000_000
sleep = functools.partial(functools.partial, time.sleep)


def test_seconds() -> None:
    assert 0.02 <= seconds(sleep(0.02)) < 1
    assert ratio(sleep(0.06), sleep(0.02), 5) == pytest.approx(3, rel=0.4)
    assert added(sleep(0.06), sleep(0.02), 5) == pytest.approx(0.04, rel=0.4)


def test_memory() -> None:
    before = dict(os.environ)
    bytes_used = peak_memory(functools.partial(functools.partial, operator.mul, b"x", SIZE))
    assert bytes_used == pytest.approx(SIZE, rel=0.05)
    assert dict(os.environ) == before


def test_a_process_that_dies_is_an_error() -> None:
    with pytest.raises(AtollError, match="died"):
        peak_memory(functools.partial(functools.partial, os._exit, 3))
