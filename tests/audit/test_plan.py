"""The plan of an audit: it fits into the budget, claims no more than the time bought, and knows what passes cost."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from atoll.attacks.evaluate import evaluate
from atoll.attacks.suites import suite
from atoll.audit.plan import (
    FEWEST,
    STANDARD_FORWARD,
    STANDARD_GRADIENT,
    STEPS,
    Facts,
    divide,
    make_plan,
    parse_duration,
    scaled,
)
from atoll.audit.speed import Speed
from atoll.data import MemorySplit
from atoll.errors import InputError
from atoll.threat import ThreatModel


def facts(milliseconds=1.0, points=1000, corruptions=0.01, norm="linf", **more):
    seconds = milliseconds / 1000
    speed = Speed(seconds, 3 * seconds, 1.5 * seconds, corruptions, points, 64)
    return Facts(speed, ThreatModel(norm, "0.1"), training_points=points, **more)


def step(name, budget, *arguments, **options):
    (result,) = (each for each in make_plan(facts(*arguments, **options), budget) if each.name == name)
    return result


@given(
    milliseconds=st.floats(1e-3, 1e3),
    points=st.integers(1, 100_000),
    corruptions=st.none() | st.floats(0, 1),
    norm=st.sampled_from(["linf", "l2", "l1"]),
    budget=st.floats(1, 1e5),
    unprovable=st.sampled_from(["", "no rule for this operation"]),
    certified=st.booleans(),
)
def test_any_plan_fits_and_explains_what_it_leaves_out(budget, points, **options):
    given_facts = facts(points=points, **options)
    steps = make_plan(given_facts, budget)
    assert [each.name for each in steps] == list(STEPS)
    health = steps[0]
    assert sum(each.seconds for each in steps) <= max(budget, health.seconds) * (1 + 1e-9)
    for each in steps:
        if each.settings is None:
            assert each.note.startswith("left out: ")
            assert not each.seconds
        else:
            assert each.settings.points is None or min(FEWEST, points) <= each.settings.points <= points
            if each.settings.points is not None and each.settings.points < min(points, 100) and each is not health:
                assert f"{each.settings.points:,} of " in each.note  # never as if it were all


@pytest.mark.parametrize(
    ("milliseconds", "attacks"),
    [(0.001, "standard"), (0.1, "fast"), (30.0, "APGD-CE"), (200.0, "PGD-10"), (5000.0, None)],
)
def test_less_time_buys_weaker_attacks(milliseconds, attacks):
    attack = step("attack", 1800, milliseconds)
    assert (attack.settings and attack.settings.attacks) == attacks
    assert ("AutoAttack" in attack.note) == (attacks not in ("standard", None))


def test_more_time_buys_more_points():
    for name in ("corruptions", "explain", "curvature", "certify"):
        sizes = [step(name, budget, 5.0).settings for budget in (600, 6000, 60_000)]
        numbers = [0 if settings is None else settings.points for settings in sizes]
        assert numbers == sorted(numbers)
        assert numbers[0] < numbers[-1]


def test_steps_that_make_no_sense_are_left_out():
    assert "not images" in step("corruptions", 1e5, corruptions=None).note
    assert step("certify", 1e5, unprovable="no rule for aten.sin").note == "left out: no rule for aten.sin"
    assert "proven" in step("smoothing", 1e5, certified=True).note
    assert step("smoothing", 1e5).settings.smooth == 0.25
    assert step("certify", 1e5, norm="l2").settings.eps == "0.1"


@given(
    wants=st.lists(st.floats(0, 1e4), min_size=1, max_size=6),
    weights=st.lists(st.floats(0.1, 10), min_size=6, max_size=6),
    budget=st.floats(0, 1e4),
)
def test_a_budget_is_divided_completely(wants, weights, budget):
    names = "abcdef"[: len(wants)]
    wanted = dict(zip(names, wants, strict=True))
    shares = divide(budget, wanted, dict(zip("abcdef", weights, strict=True)))
    assert shares.keys() == wanted.keys()
    assert all(0 <= shares[name] <= wanted[name] * (1 + 1e-9) for name in names)
    assert sum(shares.values()) == pytest.approx(min(budget, sum(wants)), rel=1e-6, abs=1e-6)
    for one, other in itertools.permutations(names, 2):  # who gets less per weight than another wants no more
        if shares[one] / weights[names.index(one)] < shares[other] / weights[names.index(other)] * (1 - 1e-6):
            assert shares[one] == pytest.approx(wanted[one])


def test_a_slower_machine():
    slow = scaled(facts(1.0, proof_seconds=2.0), 3.0)
    assert slow.speed.forward == pytest.approx(0.003)
    assert slow.speed.corruptions == pytest.approx(0.03)
    assert slow.proof_seconds == 6
    assert slow.standard == pytest.approx(3 * facts(1.0).standard)


@pytest.mark.parametrize("text", ["", "0", "-1m", "1d", "30 m", "nan", "inf", "1e400", "m", "1m30"])
def test_no_duration(text):
    with pytest.raises(InputError, match="budget: expected a duration"):
        parse_duration(text)


@pytest.mark.slow
def test_autoattack_costs_what_the_plan_says():
    """At points that no attack can break, because the logits hardly depend on the input."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 10)).eval()
    with torch.no_grad():
        model[1].weight.mul_(1e-3)
        model[1].bias.copy_(torch.eye(10)[0])
    split = MemorySplit(torch.randint(0, 256, (3, 1, 4, 4), dtype=torch.uint8), torch.zeros(3, dtype=torch.int64))
    result = evaluate(model, split, suite("standard", ThreatModel("linf", 0.01)), cascade=True)
    assert result.robust.correct == 3
    forward, backward = (sum(getattr(each, name) for each in result.attacks) for name in ("forward", "backward"))
    assert math.isclose(forward / 3, STANDARD_FORWARD, rel_tol=0.01)
    assert math.isclose(backward / 3, STANDARD_GRADIENT, rel_tol=0.01)
