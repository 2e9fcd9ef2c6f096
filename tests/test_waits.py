"""Attacks and training steps keep to their budgets of operations and waits."""

import pytest

from wait_cases import CASES, QUICK


def check(name):
    case = CASES[name]
    if case.limit is None:
        return
    count = case.count()
    assert count.operations <= case.limit.operations
    assert count.waits <= case.limit.waits


@pytest.mark.parametrize("name", QUICK)
def test_budgets(name):
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES.keys() - QUICK))
def test_budgets_of_all_cases(name):
    check(name)
