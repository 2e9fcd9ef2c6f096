"""Proof files of certified models: the independent checker proves their claims, and nothing more."""

import pytest
import torch

from atoll.certify import GloRo, certifier_for
from atoll.certify.certificate import Certificate
from atoll.certify.proof_file import write_proof
from atoll.checker import ProofError, check
from atoll.errors import InputError
from atoll.models import MLP, CentroidNet, ConvNet4C3F, LiResNet, SmallConvNet

MODELS = {
    "MLP": lambda: MLP((1, 4, 4), 3, hidden=(16, 16), input_range="centered"),
    "MLP with MinMax": lambda: MLP((6,), 3, hidden=(16, 16), activation="minmax", input_range="centered"),
    "SmallConvNet": lambda: SmallConvNet((1, 8, 8), 5, widths=(4, 8), hidden=16, input_range="[-1,1]"),
    "4C3F": lambda: ConvNet4C3F((1, 8, 8), 5, activation="minmax", initialization="orthogonal"),
    "LiResNet": lambda: LiResNet((3, 16, 16), 5, depth=2, width=8, features=16, input_range="centered"),
    "ResNet": lambda: LiResNet((3, 16, 16), 5, depth=1, width=8, features=16, block="conventional"),
    "ConvNet": lambda: LiResNet((3, 16, 16), 5, depth=1, width=8, features=16, block="plain"),
    "prototypes": lambda: CentroidNet((1, 8, 8), 5, per_class=8),
    "stretched prototypes": lambda: CentroidNet((1, 8, 8), 5, per_class=8, stretch=0.1),
    "encoder": lambda: CentroidNet((1, 8, 8), 5, per_class=5, encoder=lambda s, c: MLP(s, c, hidden=(8,))),
}


QUICK = ("MLP with MinMax", "SmallConvNet", "LiResNet", "encoder")  # in float32; all are quick in float64
CASES = [(name, torch.float64) for name in MODELS]
CASES += [
    pytest.param(name, torch.float32, marks=() if name in QUICK else pytest.mark.slow)
    for name in MODELS
    if name != "4C3F"  # without training, rounding in float32 leaves it no radius
]


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_the_checker_proves_the_radii_of_the_certifier(name, precision, tmp_path):
    torch.manual_seed(0)
    model = MODELS[name]().to(precision).eval()
    certifier, x = certifier_for(model, radii=(0.1, 0.3)), torch.rand(40, *model.input_shape).to(precision)
    certificate = certifier(x)
    proof = write_proof(tmp_path / "f", certifier, x, certificate)
    assert (proof.claims, proof.points) == (int((certificate.radius > 0).sum()), 40)
    assert proof.claims > 20
    result = check(tmp_path / "f")
    assert result.problems == []
    assert result.proven.all()
    assert result.header["subject"] == certifier.model.digest
    for prediction, radius in (
        (certificate.prediction, 100 * certificate.radius),
        ((certificate.prediction + 1) % 3, certificate.radius),
    ):
        write_proof(tmp_path / "f", certifier, x, Certificate(prediction, radius))
        assert not check(tmp_path / "f").proven.any()


def test_planes_that_do_not_suffice_have_multipliers(tmp_path):
    torch.manual_seed(0)
    model = MODELS["stretched prototypes"]().double()
    certifier, x = certifier_for(model, radii=(0.1, 0.3)), torch.rand(40, *model.input_shape).double()
    write_proof(tmp_path / "f", certifier, x, certifier(x))
    result = check(tmp_path / "f")
    assert len(result.arrays["dual.point"]) > 0
    planes = certifier_for(model)
    assert (certifier(x).radius > planes(x).radius * 1.01).any()
    write_proof(tmp_path / "f", planes, x, planes(x))  # single planes are enough for their own radii
    result = check(tmp_path / "f")
    assert result.proven.all()
    assert "dual.point" not in result.arrays


def test_bounds_of_large_layers_are_proven_too(tmp_path):
    torch.manual_seed(0)
    model = SmallConvNet((1, 8, 8), 5, widths=(4, 8), hidden=16).double()
    certifier, x = GloRo.proven(model, budget=1.0), torch.rand(20, 1, 8, 8).double()
    assert "torus" in {layer.method for layer in certifier.layers}
    write_proof(tmp_path / "f", certifier, x, certifier(x))
    assert check(tmp_path / "f").proven.all()


def test_operations_without_a_rule_are_refused_by_the_checker(tmp_path):
    torch.manual_seed(0)
    model = MLP((4,), 3, hidden=(8,), activation="gelu").double()
    certifier, x = GloRo.proven(model), torch.rand(5, 4).double()
    write_proof(tmp_path / "f", certifier, x, certifier(x))
    result = check(tmp_path / "f")
    assert not result.proven.any()
    assert result.problems[0].startswith("aten.gelu.default is not supported (")


def test_nothing_to_prove_and_estimates_are_refused(tmp_path):
    certifier, x = GloRo.proven(MLP((2,), 2).double()), torch.rand(2, 2).double()
    with pytest.raises(InputError, match="expected at least one certified point, got none"):
        write_proof(tmp_path / "f", certifier, x, Certificate(torch.zeros(2).long(), torch.zeros(2).double()))
    estimate = GloRo(MLP((2,), 2), certifier.constants)
    with pytest.raises(InputError, match="expected a certifier with proven constants"):
        write_proof(tmp_path / "f", estimate, x, certifier(x))
    with pytest.raises(ProofError):
        check(tmp_path / "f")
