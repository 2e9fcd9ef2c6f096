"""FMN: known distances, a fine grid, and Foolbox."""

import itertools
import math

import foolbox
import pytest
import torch
from torch import nn

from atoll.attacks import FMN
from atoll.threat import ThreatModel
from attack_cases import linear, plane

NORMS = {"linf": math.inf, "l2": 2.0, "l1": 1.0}


def distances(attack, model, x, y):
    """Distance of the result of each point; infinity if it is not adversarial."""
    x_adv = attack(model, x, y)
    return torch.where(model(x_adv).argmax(1) != y, attack.threat.distance(x_adv, x), math.inf)


@pytest.mark.parametrize("norm", NORMS)
def test_finds_the_distance_to_the_boundary_of_a_linear_model(norm):
    model, x, y, truth = linear(norm)
    ratio = distances(FMN(ThreatModel(norm, 0.0, None), minimum_norm=True), model, x, y) / truth
    assert float(ratio.min()) >= 1 - 1e-5
    assert float(ratio.median()) < 1.01
    assert float(ratio.max()) < 1.06


@pytest.mark.parametrize("norm", NORMS)
def test_finds_what_a_fine_grid_finds(norm):
    model, x, y = plane(40, torch.float64)
    ticks = torch.linspace(0, 1, 301).tolist()
    grid = torch.tensor(list(itertools.product(ticks, repeat=2))).double()
    other = model(grid).argmax(1)[None] != y[:, None]
    truth = torch.where(other, torch.cdist(x, grid, p=NORMS[norm]), math.inf).amin(1)
    result = distances(FMN(ThreatModel(norm, 0.0), minimum_norm=True), model, x, y)
    assert (result > truth - 2 / 300).all()  # between two points of the grid
    assert float((result < 1.02 * truth + 2 / 300).double().mean()) >= 0.7  # others end at another boundary


@pytest.mark.parametrize("norm", NORMS)
def test_is_at_least_as_good_as_foolbox(norm):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).eval()
        x = torch.rand(16, 1, 8, 8)
    y = model(x).argmax(1)
    names = {"linf": "LInfFMNAttack", "l2": "L2FMNAttack", "l1": "L1FMNAttack"}
    attack, threat = getattr(foolbox.attacks, names[norm])(steps=200), ThreatModel(norm, 0.0)
    with torch.enable_grad():
        wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
        theirs = attack.run(wrapped, x, foolbox.criteria.Misclassification(y))
    success = model(theirs).argmax(1) != y  # not always in l1
    assert int(success.sum()) >= 8
    ours = distances(FMN(threat, minimum_norm=True), model, x, y)
    assert ours.isfinite().all()
    assert float(ours[success].mean()) <= 1.02 * float(threat.distance(theirs, x)[success].mean())


def test_reaches_the_boundary_where_gradient_steps_get_stuck():
    """Each of 36 pixels counts only above 0.3, and six of them are needed: the gradient alone follows one."""

    class Filter(nn.Module):
        def forward(self, x):
            score = nn.functional.relu(x.flatten(1) - 0.3).clamp_max(0.1).sum(1) - 0.55
            return torch.stack([-score, score], 1)

    x = torch.full((4, 1, 6, 6), 0.31)
    y = torch.zeros(4, dtype=torch.long)
    result = distances(FMN(ThreatModel("l2", 0.0), minimum_norm=True), Filter(), x, y)
    assert (result < 0.5).all()


def test_zero_gradients_do_no_harm():
    class Flat(nn.Module):
        def forward(self, x):
            return torch.tensor([1.0, 0.0]).expand(len(x), 2) + 0 * x.sum()

    x = torch.rand(3, 5)
    for norm in NORMS:
        assert torch.equal(FMN(ThreatModel(norm, 0.1))(Flat(), x, torch.zeros(3, dtype=torch.long)), x)
