"""Functions of known cost."""

from __future__ import annotations

import functools
import operator
import os
from types import SimpleNamespace

import pytest

from atoll.errors import AtollError
from atoll_papers.cost import added, peak_memory, ratio, seconds

SIZE = 100_000_000


def test_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that stands still while nothing waits."""
    now = 0.0

    def wait(duration: float) -> None:
        nonlocal now
        now += duration

    monkeypatch.setattr("atoll_papers.cost.time", SimpleNamespace(perf_counter=lambda: now))
    six, two = (functools.partial(wait, duration) for duration in (6.0, 2.0))
    assert seconds(two) == 2
    assert ratio(six, two, 5) == 3
    assert added(six, two, 5) == 4


def test_memory() -> None:
    before = dict(os.environ)
    bytes_used = peak_memory(functools.partial(functools.partial, operator.mul, b"x", SIZE))
    assert bytes_used == pytest.approx(SIZE, rel=0.05)
    assert dict(os.environ) == before


def test_a_process_that_dies_is_an_error() -> None:
    with pytest.raises(AtollError, match="died"):
        peak_memory(functools.partial(functools.partial, os._exit, 3))
