"""The boundary search of the thesis keeps the promises of every strategy."""

from functools import partial

import pytest
import torch

from atoll.errors import InputError
from atoll.explain.boundary import boundary_search
from atoll_papers.pgd_cw_search import pgd_cw_search
from attack_cases import plane
from explain_cases import check_batch_sizes, check_both_sides, check_counts

STRATEGIES = {"PGD": partial(pgd_cw_search, with_cw=False), "PGD and CW": pgd_cw_search}


@pytest.mark.parametrize("name", STRATEGIES)
def test_both_sides_have_the_stated_classes(name):
    boundary = check_both_sides(STRATEGIES[name], 620)
    assert "PGD" in boundary.method


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_batch_size_changes_anything(name):
    check_batch_sizes(*plane(9, torch.float64)[:2], STRATEGIES[name], 430, 4)


@pytest.mark.parametrize("name", STRATEGIES)
def test_budgets_hold_and_counts_are_true(name):
    check_counts(STRATEGIES[name], 430)


def test_it_draws_nothing_from_the_global_generator():
    model, x, _ = plane(4, torch.float64)
    state = torch.get_rng_state()
    boundary_search(model, x, strategy=pgd_cw_search, budget=300)
    assert torch.equal(state, torch.get_rng_state())


def test_other_norms_are_one_sentence():
    model, x, _ = plane(4, torch.float64)
    with pytest.raises(InputError, match="norm: the search with PGD and CW expects l2, got linf"):
        boundary_search(model, x, norm="linf", strategy=pgd_cw_search)
