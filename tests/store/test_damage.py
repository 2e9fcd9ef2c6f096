"""A damaged file never changes a result silently, and never breaks a command: seeded damage to runs of every kind."""

from collections import Counter

import pytest

from store_cases import check_damage, make_expected

QUICK, SLOW = 60, 340  # seeds


@pytest.fixture(scope="module")
def expected(runs, tmp_path_factory):
    return make_expected(runs, tmp_path_factory.mktemp("expected"))


def check(seeds, runs, expected, place):
    outcomes, failures = Counter(), []
    for seed in seeds:
        try:
            outcomes[check_damage(seed, runs, expected, place)] += 1
        except AssertionError as error:
            failures.append(str(error).splitlines()[0])
    assert not failures, "\n".join(failures)
    assert min(outcomes["intact"], outcomes["refused"]) > len(seeds) // 10  # the damage reaches something


def test_damaged_files(runs, expected, tmp_path):
    check(range(QUICK), runs, expected, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_more_damaged_files(runs, expected, tmp_path):
    check(range(QUICK, QUICK + SLOW), runs, expected, tmp_path)
