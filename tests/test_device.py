"""Everything runs on an accelerator, where it gives the results of the CPU: on the pretend one, bit for bit."""

import copy
import inspect

import pytest
import torch

from atoll.attacks.base import ATTACKS
from atoll.threat import ThreatModel
from attack_cases import plane
from pretend import DEVICE, accelerator
from support import (
    ANNEALED,
    CENTROID,
    CERTIFIED,
    LOSSES,
    METHODS,
    TinyData,
    assert_identical,
    first_batch,
    tiny_model,
    tiny_trainer,
    weights,
)

EPS = {"linf": 0.05, "l2": 0.06, "l1": 0.08, "l0": 1}
SHORT = {"steps": 20, "queries": 40, "binary_search_steps": 2}  # for attacks with these options
ATTACK_CASES = [(name, norm) for name, member in ATTACKS.members().items() for norm in member.cls.norms]


def build(name, norm, **options):
    member = ATTACKS.resolve(name)
    short = {option: count for option, count in SHORT.items() if option in inspect.signature(member.cls).parameters}
    return member.cls(ThreatModel(norm, EPS[norm]), **(short | member.arguments | options))


def check_attack(name, norm, **options):
    """On images, and on points of which some are broken at once, some later and some never."""
    x, _ = TinyData().tensors("test", 4)
    images = tiny_model(batch_norm=True).eval()
    crooked, points, _ = plane(40)
    for model, inputs in ((images, x), (crooked, points)):
        y = model(inputs).argmax(1)
        attack = build(name, norm, **options)
        expected = attack(model, inputs, y)
        with accelerator():
            result = attack(copy.deepcopy(model).to(DEVICE), inputs.to(DEVICE), y.to(DEVICE))
            assert result.device == DEVICE
            assert torch.equal(result.cpu(), expected)
    broken = int((crooked(expected).argmax(1) != y).sum())
    assert 0 < broken < len(y) or name == "PDPGD"  # which takes more steps


@pytest.mark.parametrize("bounds", [None, (0.0, 1.0)], ids=str)
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_projections_onto_hyperplanes(norm, bounds):
    """Also of points that are mostly at their bounds, with a fixed number of iterations instead of a check."""
    draw = torch.Generator().manual_seed(0)
    threat = ThreatModel(norm, 1.0, bounds)
    x = (2 * torch.rand(300, 50, generator=draw) - 0.5).clamp(0, 1)
    w = torch.randn(300, 50, generator=draw)
    w[0] = 0
    rise = torch.randn(300, generator=draw) * torch.rand(300, generator=draw) * 10
    expected = threat.to_hyperplane(x, w, rise)
    with accelerator() as counts:
        arguments = [value.to(DEVICE) for value in (x, w, rise)]
        before = counts.waits
        result = threat.to_hyperplane(*arguments)
        assert counts.waits == before
        assert torch.equal(result.cpu(), expected)


KINDS = {member.cls.__name__: member.cls for member in ATTACKS.members().values()}


@pytest.mark.parametrize(
    ("name", "norm", "options"),
    [*((name, KINDS[name].norms[0], {}) for name in sorted(KINDS)), ("APGD", "l1", {"restarts": 2, "steps": 7})],
)
def test_attacks(name, norm, options):
    check_attack(name, norm, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("APGD", {"restarts": 2}), ("APGD-T", {"patience": 1.0}), ("FAB-T", {"restarts": 2}), ("Square", {"restarts": 3})],
)
def test_attacks_that_restart(name, options):
    check_attack(name, "linf", **options)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "norm"), ATTACK_CASES)
def test_attacks_in_all_norms(name, norm):
    check_attack(name, norm)


def check_training(loss, methods=(), **settings):
    """Three steps and a validation; a step of the loss alone waits at most once."""
    results = []
    for device in ("cpu", DEVICE):
        with accelerator() as counts:
            trainer = tiny_trainer(loss, methods=methods, device=device, batch_norm=True, epochs=1, **settings)
            for method in trainer.methods:
                method.setup(trainer)
            batch = first_batch(trainer, device)
            for _ in range(3):
                before = counts.waits
                trainer.train_step(batch)
                assert methods or counts.waits - before <= 1
                trainer.step += 1
            accuracy = trainer.validate(trainer.data.validation, 2)
            states = [weights(trainer.model), *trainer.averages.values()]
            results.append((accuracy, [{name: value.cpu() for name, value in state.items()} for state in states]))
    (accuracy, states), (accuracy_there, states_there) = results
    assert accuracy_there == accuracy
    for ours, theirs in zip(states, states_there, strict=True):
        assert_identical(ours, theirs)


@pytest.mark.parametrize("loss", ["standard", "trades", "gloro-trades", "centroid-margin"])
def test_training(loss):
    check_training(loss)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loss", LOSSES | ANNEALED | CERTIFIED | CENTROID)
def test_training_with_all_losses(loss, accumulate):
    check_training(loss, accumulate=accumulate)


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in [*METHODS, "eps-ramp"] if name != "rat-exact"])
def test_training_with_all_methods(method):
    """Except for derivatives in forward mode, whose wrappers do not know the pretend tensors."""
    check_training("gloro-trades" if method == "eps-ramp" else "trades", (method,))
