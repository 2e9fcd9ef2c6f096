"""What all attacks share: their options and ranges, seeds, and checks of labels."""

import importlib
import inspect
import math
import pkgutil

import pytest
import torch
from torch import nn

import atoll.attacks
from atoll.attacks import APGD, FAB, FGSM, FMN, PDPGD, PGD, CarliniWagner, RayS, SigmaZero, Square
from atoll.attacks.base import ATTACKS, check_labels, check_logits
from atoll.errors import InputError
from atoll.threat import ThreatModel

# The options of each attack, in order, with their defaults.  A changed default changes the results of every user.
DEFAULTS = {
    APGD: {"objective": "ce", "steps": 100, "targets": 0, "restarts": 1, "patience": None, "eot": 1},
    CarliniWagner: {
        "steps": 1000, "binary_search_steps": 9, "learning_rate": 0.01, "initial_const": None, "confidence": 0.0,
        "abort_early": True, "minimum_norm": False,
    },
    FAB: {"steps": 100, "targets": 0, "restarts": 1, "minimum_norm": False},
    FGSM: {"objective": "ce", "targeted": False},
    FMN: {"steps": 200, "step_size": 1.0, "minimum_norm": False},
    PDPGD: {"steps": 500, "step_size": 0.1, "minimum_norm": False},
    PGD: {"objective": "ce", "steps": 20, "step_size": None, "start": None, "restarts": 1, "targeted": False},
    RayS: {"queries": 10_000, "minimum_norm": False},
    SigmaZero: {"steps": 1000, "step_size": 1.0, "sigma": 1e-3, "minimum_norm": False},
    Square: {"queries": 5000, "p_init": 0.8, "horizon": 10_000, "restarts": 1},
}  # fmt: skip

COUNT = (1, 10**6)  # least and most
POSITIVE = (5e-324, 1.7e308)
# The range of each option that is a number, both ends included; the next number beyond an end is refused.
RANGES = {
    (APGD, "steps"): COUNT,
    (APGD, "targets"): (0, 10**9),
    (APGD, "restarts"): COUNT,
    (APGD, "eot"): COUNT,
    (CarliniWagner, "steps"): COUNT,
    (CarliniWagner, "binary_search_steps"): COUNT,
    (CarliniWagner, "learning_rate"): POSITIVE,
    (CarliniWagner, "initial_const"): (5e-324, 1e10),
    (CarliniWagner, "confidence"): (0.0, 1.7e308),
    (FAB, "steps"): COUNT,
    (FAB, "targets"): (0, 10**9),
    (FAB, "restarts"): COUNT,
    (FMN, "steps"): COUNT,
    (FMN, "step_size"): POSITIVE,
    (PDPGD, "steps"): COUNT,
    (PDPGD, "step_size"): POSITIVE,
    (PGD, "steps"): COUNT,
    (PGD, "restarts"): COUNT,
    (RayS, "queries"): COUNT,
    (SigmaZero, "steps"): COUNT,
    (SigmaZero, "step_size"): POSITIVE,
    (SigmaZero, "sigma"): POSITIVE,
    (Square, "queries"): COUNT,
    (Square, "p_init"): (5e-324, 1.0),
    (Square, "horizon"): COUNT,
    (Square, "restarts"): COUNT,
}
SLOW_TO_BUILD = {(APGD, "steps")}  # its schedule has an entry for every step


def threat(kind):
    return ThreatModel(kind.norms[0], 1)


def test_options_and_their_defaults():
    for kind, defaults in DEFAULTS.items():
        first, *options = inspect.signature(kind).parameters.values()
        assert first.name == "threat"
        assert {option.name: option.default for option in options} == defaults
        by_keyword = [option for option in options if option.name != "objective"]
        assert all(option.kind is option.KEYWORD_ONLY for option in by_keyword)
    assert DEFAULTS.keys() == {member.cls for member in ATTACKS.members().values()}


@pytest.mark.parametrize(("kind", "option"), RANGES, ids=lambda value: getattr(value, "__name__", value))
def test_ranges_of_options(kind, option):
    least, most = RANGES[kind, option]
    whole = isinstance(least, int)
    below = least - 1 if whole else math.nextafter(least, -math.inf)
    above = most + 1 if whole else math.inf if most > 1e300 else math.nextafter(most, math.inf)
    for value in (below, above, "1", *((1.5,) if whole else (math.nan,))):
        with pytest.raises(InputError, match=rf"^{option}: expected "):
            kind(threat(kind), **{option: value})
    for value in (least,) if (kind, option) in SLOW_TO_BUILD else (least, most):
        assert getattr(kind(threat(kind), **{option: value}), option) == value


def test_ranges_of_all_numbers_are_known():
    """A new option joins the table."""
    for kind, defaults in DEFAULTS.items():
        numbers = {name for name, value in defaults.items() if type(value) in (int, float)}
        assert numbers <= {option for owner, option in RANGES if owner is kind}


@pytest.mark.parametrize("kind", DEFAULTS, ids=lambda kind: kind.__name__)
def test_shown_as_the_call_that_makes_it_again(kind):
    attack = kind(threat(kind))
    assert repr(eval(repr(attack), {kind.__name__: kind, "ThreatModel": ThreatModel})) == repr(attack)


def functions_with_seeds():
    for info in pkgutil.iter_modules(atoll.attacks.__path__, "atoll.attacks."):
        for name, function in inspect.getmembers(importlib.import_module(info.name), inspect.isfunction):
            if function.__module__ == info.name and "seed" in inspect.signature(function).parameters:
                yield name, inspect.signature(function).parameters["seed"].default


def test_the_seed_is_0_unless_given():
    seeds = dict(functions_with_seeds())
    assert {"evaluate", "measure_power", "measure_curve", "evaluate_corruptions"} <= seeds.keys()
    assert set(seeds.values()) <= {0, inspect.Parameter.empty}
    model, x, y = nn.Linear(4, 2), torch.rand(3, 4), torch.tensor([0, 1, 0])
    attack = PGD(ThreatModel("linf", 0.1), steps=1, step_size=0.01)
    assert torch.equal(attack(model, x, y), attack(model, x, y, seed=0))
    assert not torch.equal(attack(model, x, y), attack(model, x, y, seed=1))


LOGITS = torch.zeros(2, 3)


@pytest.mark.parametrize("y", [torch.tensor([0, 2]), torch.tensor([1, 1]), torch.full((2, 3), 1 / 3)], ids=str)
def test_labels_are_classes_or_probabilities(y):
    check_labels(LOGITS, y)


@pytest.mark.parametrize(
    ("y", "sentence"),
    [
        (torch.tensor([0, 3]), r"^labels: expected classes in \[0, 2\], got \[0, 3\]$"),
        (torch.tensor([-1, 2]), r"^labels: expected classes in \[0, 2\], got \[-1, 2\]$"),
        (torch.tensor([0, 1], dtype=torch.int32), r"or 3 probabilities, got int32 of shape \(2,\)$"),
        (torch.tensor([0.0, 1.0]), r"^labels: expected one int64 class per point or 3 prob.*, got float32 of shape"),
        (torch.tensor([[0], [1]]), r"got int64 of shape \(2, 1\)$"),
        (torch.zeros(2, 3, dtype=torch.int64), r"got int64 of shape \(2, 3\)$"),
        (torch.zeros(2, 2), r"got float32 of shape \(2, 2\)$"),
        (torch.zeros(2, 4), r"got float32 of shape \(2, 4\)$"),
        (torch.zeros(2, 3, 1), r"got float32 of shape \(2, 3, 1\)$"),
    ],
    ids=str,
)  # fmt: skip
def test_other_labels_are_refused(y, sentence):
    with pytest.raises(InputError, match=sentence):
        check_labels(LOGITS, y)


def test_a_known_number_of_classes_replaces_the_look_at_the_labels():
    y = torch.tensor([0, 1])
    check_labels(LOGITS, y, 3)
    check_labels(LOGITS, y, 1)
    with pytest.raises(InputError, match=r"^labels: expected classes in \[0, 2\], got \[0, 3\]$"):
        check_labels(LOGITS, y, 4)


def test_outputs_that_are_not_logits_are_refused():
    check_logits(LOGITS)
    for output, got in (((LOGITS, LOGITS), "tuple"), (LOGITS[0], r"\(3,\)"), (LOGITS[None], r"\(1, 2, 3\)")):
        with pytest.raises(InputError, match=rf"^model: expected logits of shape \(batch, classes\), got {got}$"):
            check_logits(output)
