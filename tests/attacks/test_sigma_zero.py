"""Sigma-zero: exact distances of linear models, and all pairs of components of a small net."""

import itertools
import math

import torch
from torch import nn

from atoll.attacks import SigmaZero
from atoll.threat import ThreatModel

MINIMUM = ThreatModel("l0", 0)


def distances(attack, model, x, y):
    x_adv = attack(model, x, y)
    return torch.where(model(x_adv).argmax(1) != y, (x_adv != x).flatten(1).sum(1).double(), math.inf)


def bounded(classes=2):
    """A linear model on inputs in [0, 1], and the fewest components that change the class: those that gain most."""
    draw = torch.Generator().manual_seed(0)
    model = nn.Linear(20, classes)
    x = torch.rand(60, 20, generator=draw)
    model.weight.data = torch.randn(classes, 20, generator=draw)
    model.bias.data = -model.weight.data @ x.mean(0)
    model.bias.data[0] += 4.0  # so that several components are needed
    logits = model(x).detach()
    y = logits.argmax(1)
    fewest = torch.full((len(x),), math.inf)
    for target in range(classes):
        weight = model.weight.detach()[target] - model.weight.detach()[y]
        gain = (weight * torch.where(weight > 0, 1 - x, -x)).sort(dim=1, descending=True).values.cumsum(1)
        missing = logits.gather(1, y[:, None]) - logits[:, target : target + 1]
        enough = gain > missing + 1e-5
        count = torch.where(enough.any(1), enough.int().argmax(1) + 1.0, math.inf)
        fewest = torch.where(y == target, fewest, torch.minimum(fewest, count))
    return model, x, y, fewest.double()


def test_changes_as_few_components_of_a_linear_model_as_possible():
    for classes in (2, 4):
        model, x, y, truth = bounded(classes)
        assert truth.isfinite().all()
        assert truth.max() > 3
        result = distances(SigmaZero(MINIMUM, steps=500, minimum_norm=True), model, x, y)
        assert (result >= truth).all()
        assert float((result == truth).double().mean()) > 0.8
        assert (result <= truth + 1).all()


def test_finds_points_that_one_or_two_components_can_change():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3)).eval()
        x = torch.rand(30, 6)
        model[2].bias.data -= 0.7 * model(x).detach().mean(0)  # so that every class is near
    y = model(x).argmax(1)
    ticks = torch.linspace(0, 1, 21).tolist()
    truth = torch.full((30,), math.inf)
    for pair in itertools.combinations(range(6), 2):
        changed = x[:, None].repeat(1, len(ticks) ** 2, 1)
        changed[:, :, pair] = torch.tensor(list(itertools.product(ticks, repeat=2)))
        broken = (model(changed).argmax(2) != y[:, None]).any(1)
        truth[broken & truth.isinf()] = 2
        for component in pair:
            single = x[:, None].repeat(1, len(ticks), 1)
            single[:, :, component] = torch.tensor(ticks)
            truth[(model(single).argmax(2) != y[:, None]).any(1)] = 1
    easy = truth.isfinite()
    assert 0 < int((truth == 1).sum()) < 30
    result = distances(SigmaZero(MINIMUM, steps=500, minimum_norm=True), model, x, y)
    assert (result >= truth)[truth == 1].all()
    assert float((result <= truth)[easy].double().mean()) >= 0.8


def test_eps_is_a_number_of_components():
    model, x, y, truth = bounded()
    threat = ThreatModel("l0", 2)
    result = distances(SigmaZero(threat), model, x, y)
    assert not (result[truth > 2] < math.inf).any()
    assert float((result <= 2)[truth <= 2].double().mean()) > 0.8
