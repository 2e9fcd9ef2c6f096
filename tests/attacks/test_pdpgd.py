"""PDPGD: known distances, and the best point of a fine grid."""

import itertools
import math

import torch

from atoll.attacks import PDPGD
from atoll.threat import ThreatModel
from attack_cases import linear, plane


def test_finds_the_distance_to_the_boundary_of_a_linear_model():
    model, x, y, truth = linear("l1")
    attack = PDPGD(ThreatModel("l1", 0.0, None), minimum_norm=True)
    x_adv = attack(model, x, y)
    assert (model(x_adv).argmax(1) != y).all()
    ratio = attack.threat.distance(x_adv, x) / truth
    assert float(ratio.min()) >= 1 - 1e-5
    assert float(ratio.median()) < 1.05
    assert float(ratio.quantile(0.9)) < 1.15


def test_finds_what_a_fine_grid_finds():
    model, x, y = plane(40, torch.float64)
    grid = torch.tensor(list(itertools.product(torch.linspace(0, 1, 301).tolist(), repeat=2))).double()
    other = model(grid).argmax(1)[None] != y[:, None]
    truth = torch.where(other, torch.cdist(x, grid, p=1.0), math.inf).amin(1)
    threat = ThreatModel("l1", 0.0)
    x_adv = PDPGD(threat, minimum_norm=True)(model, x, y)
    result = torch.where(model(x_adv).argmax(1) != y, threat.distance(x_adv, x), math.inf)
    assert (result > truth - 2 / 300).all()
    assert float((result < 1.05 * truth + 2 / 300).double().mean()) >= 0.7
