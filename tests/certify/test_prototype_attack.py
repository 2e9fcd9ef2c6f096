"""The attack that knows prototypes: against brute force, beside attacks that follow gradients, and on false proofs."""

import pytest
import torch

from atoll.attacks import APGD
from atoll.certify import NearestCentroid
from atoll.certify.evaluate import attack_certified, certify
from atoll.certify.prototype_attack import PrototypeAttack
from atoll.data.base import MemorySplit
from atoll.errors import InputError, UnsoundError
from atoll.models import MLP, CentroidNet
from atoll.threat import ThreatModel


def net(features, stretch, seed=0, classes=3, per_class=8):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = CentroidNet((features,), classes, per_class=per_class, stretch=stretch).double()
        model.head.centroids.data.uniform_(0, 1)
    return model


def points(seed, count, features):
    """Most coordinates are almost black or white, like pixels."""
    draw = torch.rand(count, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (1.5 * draw - 0.25).clamp(0, 1)


def breaks(model, x, attack):
    """Which points change their class; all stay where the threat model wants them."""
    with torch.no_grad():
        y = model(x).argmax(1)
        x_adv = attack(model, x, y)
        assert ((x_adv - x).norm(dim=1) <= attack.threat.radius).all()
        assert ((x_adv >= 0) & (x_adv <= 1)).all()
        return model(x_adv).argmax(1) != y


@pytest.mark.parametrize("stretch", [0.0, 0.15])
@pytest.mark.parametrize("seed", [0, 1])
def test_in_the_plane_it_finds_nearly_what_there_is(seed, stretch):
    model, x = net(2, stretch, seed), points(seed, 20, 2)
    axis = torch.linspace(0, 1, 401, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        classes = model(grid).argmax(1)
        truth = torch.stack([(grid[classes != model(p[None]).argmax()] - p).norm(dim=1).min() for p in x])
    broken = [
        bool(breaks(model, p[None], PrototypeAttack(ThreatModel("l2", float(1.1 * t)))))
        for p, t in zip(x, truth, strict=True)
    ]
    assert sum(broken) >= 17


@pytest.mark.parametrize("features", [3, pytest.param(20, marks=pytest.mark.slow), 100])
def test_no_certificate_breaks_and_a_little_further_most_do(features):
    model, x = net(features, 0.15, features), points(7, 20, features)
    radius = NearestCentroid.proven(model, radii=[features**0.5])(x).radius
    assert (radius > 0).all()
    for factor, least, most in ((1.0, 0, 0), (1.2, 15, 20)):
        each = [
            breaks(model, p[None], PrototypeAttack(ThreatModel("l2", float(factor * r))))
            for p, r in zip(x, radius, strict=True)
        ]
        assert least <= int(torch.cat(each).sum()) <= most


def test_gradients_are_blind_where_it_sees():
    model, x = net(100, 0.15), points(3, 60, 100).round()  # black and white: all gradients are zero
    threat = ThreatModel("l2", 1.0)
    assert breaks(model, x, PrototypeAttack(threat)).sum() > breaks(model, x, APGD(threat, steps=50)).sum() + 20


def test_a_wrong_radius_is_detected():
    model, x = net(100, 0.15), points(5, 30, 100).round()
    split, model = MemorySplit(x.float(), torch.zeros(30, dtype=torch.long)), model.float()

    def wrong(x):
        honest = certifier(x)
        return type(honest)(honest.prediction, 1.5 * honest.radius)

    certifier = NearestCentroid.proven(model, radii=[10.0])
    attack_certified(model, certifier, split, certify(certifier, split), bounds=(0.0, 1.0), attacks={}, batch_size=5)
    with pytest.raises(UnsoundError, match="prototypes changed its class"):
        attack_certified(model, wrong, split, certify(wrong, split), bounds=(0.0, 1.0), attacks={}, batch_size=5)


def test_nonsense_is_one_sentence():
    with pytest.raises(InputError, match="PrototypeAttack: expected l2, got linf"):
        PrototypeAttack(ThreatModel("linf", 0.1))
    with pytest.raises(InputError, match="expected a CentroidNet without encoder, got MLP"):
        PrototypeAttack(ThreatModel("l2", 0.1))(MLP((2,), 2), torch.zeros(1, 2), torch.tensor([0]))
