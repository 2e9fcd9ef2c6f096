"""A hostile run executes nothing, writes nothing outside its folder, shows nothing of other files, and never hangs."""

import sys
from collections import Counter

import pytest

from hostile_cases import check_hostile

QUICK, SLOW = 15, 285  # seeds


def check(seeds, runs, place, monkeypatch):
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as with `python -m`
    outcomes, failures = Counter(), []
    for seed in seeds:
        try:
            outcomes[check_hostile(seed, runs, place)] += 1
        except AssertionError as error:
            failures.append(str(error).splitlines()[0])
    assert not failures, "\n".join(failures)
    assert min(outcomes["used"], outcomes["refused"]) > len(seeds) // 10


def test_hostile_runs(runs, tmp_path, monkeypatch):
    check(range(QUICK), runs, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_more_hostile_runs(runs, tmp_path, monkeypatch):
    check(range(QUICK, QUICK + SLOW), runs, tmp_path, monkeypatch)
