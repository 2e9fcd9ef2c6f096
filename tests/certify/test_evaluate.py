"""Certificates hold under attack, and the check that says so does fail where they do not."""

import dataclasses
import inspect
import math

import pytest
import torch
from safetensors.torch import load_file

from atoll.attacks import APGD, FGSM
from atoll.certify import GloRo, broken_certificates, certifier_for, heuristic_certifier
from atoll.certify.evaluate import CHECKS, Certification, attack_certified, certify, empirical, noise, relative_cost
from atoll.certify.gloro import PairwiseLipschitz
from atoll.certify.measure import CertifySettings
from atoll.certify.power import LipschitzEstimator
from atoll.data import MemorySplit
from atoll.errors import InputError, UnsoundError
from atoll.models import MLP, CentroidNet, SmallConvNet
from atoll.threat import ThreatModel

BOUNDS = (0.0, 1.0)


@pytest.fixture(scope="module")
def digits(gloro_run):
    """A model that was trained to certify, in float32 and float64, test points, and their certificates."""
    model, certified = gloro_run.model(), gloro_run.model().double()
    split = gloro_run.data.split("test").take(torch.arange(120))
    certifier = GloRo.proven(certified)
    return model, certifier, split, certify(certifier, split)


def test_training_makes_certificates_worth_having(digits):
    *_, certification = digits
    assert certification.clean.value > 0.8
    assert certification.verified(0.25).value > 0.4


def test_no_certificate_breaks(digits):
    model, certifier, split, certification = digits
    check = attack_certified(model, certifier, split, certification, bounds=BOUNDS, points=20, batch_size=10)
    assert check.attacked == 20
    assert check.passes > 20 * 100
    single = GloRo.proven(model)  # in float32, with all that rounding can do
    attack_certified(model, single, split, certify(single, split), bounds=BOUNDS, points=10)


@pytest.mark.parametrize("share", [0.5, 0.2])
def test_a_bound_that_is_too_small_is_detected(digits, share, tmp_path):
    """Half the norm doubles the radii, and some of those points do have a neighbour of another class."""
    model, certifier, split, _ = digits
    wrong = GloRo(certifier.model, PairwiseLipschitz.estimated(share * certifier.constants.lipschitz))
    claims = certify(wrong, split)
    with pytest.raises(
        UnsoundError, match=r"a certificate is false: point \d+ has the certified radius .* please report"
    ):
        attack_certified(
            model, wrong, split, claims, bounds=BOUNDS, attacks={"APGD-CE": CHECKS["APGD-CE"]}, folder=tmp_path
        )
    point = load_file(tmp_path / "broken.safetensors")
    assert float((point["x_adv"] - point["x"]).norm()) <= float(point["radius"])
    ((path, message),) = broken_certificates(tmp_path).items()
    assert path == tmp_path / "broken.safetensors"
    assert "APGD-CE changed its class" in message
    predictions = certifier.model(torch.stack([point["x"], point["x_adv"]]).double()).argmax(1)
    assert predictions[0] != predictions[1]


@pytest.mark.parametrize("name", CHECKS)
def test_every_attack_of_the_check_can_detect_it(digits, name):
    model, certifier, split, _ = digits
    wrong = GloRo(certifier.model, PairwiseLipschitz.estimated(0.1 * certifier.constants.lipschitz))
    with pytest.raises(UnsoundError, match=name):
        attack_certified(
            model, wrong, split, certify(wrong, split), bounds=BOUNDS, points=20, attacks={name: CHECKS[name]}
        )


def test_points_are_attacked_close_to_their_own_radius(digits):
    model, certifier, split, certification = digits
    eps = []

    def attack(threat):
        eps.append(threat.radius)
        return APGD(threat, steps=1)

    attack_certified(model, certifier, split, certification, bounds=BOUNDS, attacks={"one": attack}, batch_size=10)
    radii = certification.radius[certification.radius > 0].sort().values
    assert eps == radii[::10].tolist()


def test_passes_are_counted_per_point():
    """FGSM takes one forward and one backward pass; another forward pass confirms its results."""
    net, split = MLP((3,), 2, hidden=()).double(), noise((3,), 20)
    certifier = GloRo.proven(net)
    for count in (20, 7):
        check = attack_certified(
            net, certifier, split, certify(certifier, split), bounds=BOUNDS, points=count, attacks={"one": FGSM}
        )
        assert (check.certified, check.attacked, check.passes) == (20, count, 3 * count)


def test_python_functions_use_the_seed_of_the_command_by_default():
    for function in (attack_certified, empirical, noise):
        assert inspect.signature(function).parameters["seed"].default == CertifySettings().seed


def test_verified_is_below_empirical_is_below_clean(digits):
    model, _, split, certification = digits
    attack = {"APGD-CE": APGD(ThreatModel("l2", 0.4), steps=20)}
    robust = empirical(model, split, certification, attack, 0.4)
    assert certification.verified(0.4).correct <= robust.correct <= certification.clean.correct
    alone = dataclasses.replace(certification, radius=torch.zeros_like(certification.radius))  # all points attacked
    assert empirical(model, split, alone, attack, 0.4).correct == robust.correct


def test_the_curve_counts_points():
    certification = Certification(
        torch.tensor([0, 1, 1, 0]), torch.tensor([0.5, 0.2, 0.9, math.inf]).double(), torch.tensor([0, 1, 0, 0])
    )
    radii, accuracy = certification.curve(points=6)
    torch.testing.assert_close(radii, torch.linspace(0, 0.5, 6).double())
    assert accuracy.tolist() == [0.75, 0.75, 0.75, 0.5, 0.5, 0.5]
    assert certification.verified(0.3).correct == 2
    assert certification.rejected(0.3).correct == 1
    assert certification.median_radius == pytest.approx(0.5)  # of 0.2, 0.5 and infinity
    most = dataclasses.replace(certification, radius=torch.tensor([math.inf, 0.2, 0.9, math.inf]).double())
    assert most.median_radius == math.inf
    nothing = Certification(torch.zeros(1).long(), torch.zeros(1).double(), torch.zeros(1).long())
    assert nothing.verified(0.0).correct == 0  # a tie is no certificate, not even for radius 0


def test_cost_is_measured_against_the_same_model():
    model = SmallConvNet((1, 8, 8), 3, activation="minmax")
    assert 0.5 < relative_cost(GloRo.proven(model), model, torch.rand(64, 1, 8, 8)) < 20


def test_no_points():
    with pytest.raises(InputError, match="expected at least one point"):
        certify(lambda x: None, MemorySplit(torch.zeros(0, 1, 2, 2), torch.zeros(0).long()))


def test_certifiers_by_kind_of_model():
    kinds = {"GloRo": MLP((2,), 2), "NearestCentroid": CentroidNet((2,), 2)}
    for name, model in kinds.items():
        assert type(certifier_for(model)).__name__ == name
        assert type(heuristic_certifier(model, LipschitzEstimator(model))).__name__ == name
    assert certifier_for(kinds["NearestCentroid"], eta=0.3).eta.eta == 0.3
    with pytest.raises(InputError, match="eta: expected a CentroidNet, got MLP"):
        certifier_for(kinds["GloRo"], eta=0.3)
    with pytest.raises(InputError, match="shape: Linear has no input_shape"):
        certifier_for(torch.nn.Linear(2, 2))
