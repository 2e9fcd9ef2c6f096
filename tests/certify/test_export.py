"""Exported files against the certifiers they came from, run by ONNX Runtime."""

import copy
import dataclasses
from functools import partial

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from atoll.certify import GloRo, NearestCentroid
from atoll.certify.export import compare, export, run, to_onnx
from atoll.errors import InputError, UnsoundError
from atoll.export import Metadata
from atoll.export.model import run_file
from atoll.models import MLP, CentroidNet, LiResNet, SmallConvNet


def settled(model):
    """In float64, with statistics of batch norm that are not 0 and 1, and centroids among the inputs."""
    draw = torch.Generator().manual_seed(0)
    if isinstance(model, CentroidNet) and model.is_nearest_prototype:
        model.head.centroids.data.uniform_(generator=draw)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for value, least in ((module.running_mean, -0.5), (module.running_var, 1e-5), (module.weight.data, 0.5)):
                value.copy_(torch.rand(value.shape, generator=draw) + least)
    return model.double().eval()


class Hooked(nn.Module):
    """Not a model of the library: a plain module whose hook is part of the function."""

    def __init__(self):
        super().__init__()
        self.input_shape = (3,)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.net[0].register_forward_hook(lambda module, arguments, output: output / 0.3)

    def forward(self, x):
        return self.net(x)


def small(kind, *, slow=True, certify=GloRo.proven, **options):
    return pytest.param(partial(kind, **options), certify, marks=pytest.mark.slow if slow else ())


TINY = {"input_shape": (1, 8, 8), "num_classes": 3}
CONV = {**TINY, "widths": (4, 8), "hidden": 16}
POINTS = {"input_shape": (1, 4, 4), "num_classes": 3, "per_class": 6}
REJECTS = partial(NearestCentroid.proven, eta=0.05)

# A new kind of network that can be exported joins by one line.
MODELS = [
    small(MLP, input_shape=(3,), num_classes=4, bounds=None, hidden=(8,), slow=False),
    small(Hooked, slow=False),
    small(SmallConvNet, **CONV, activation="minmax", input_range="[-1,1]"),
    small(SmallConvNet, **CONV, activation="gelu"),
    small(SmallConvNet, **CONV, batch_norm=True),
    small(LiResNet, **TINY, depth=2, width=4, features=8, slow=False),
    small(LiResNet, **TINY, depth=1, width=4, features=8, block="conventional"),
    small(CentroidNet, **POINTS, certify=REJECTS, slow=False),
    small(CentroidNet, **POINTS, stretch=0.1, certify=NearestCentroid.proven),
    small(CentroidNet, **POINTS, stretch=0.1, certify=REJECTS),
    small(CentroidNet, **TINY, per_class=2, encoder=partial(MLP, hidden=(8,)), certify=REJECTS, slow=False),
]


@pytest.mark.parametrize(("build", "certify"), MODELS)
def test_the_file_agrees_with_the_certifier(build, certify, tmp_path):
    torch.manual_seed(0)
    model = settled(build())
    certifier, x = certify(model), torch.rand(40, *model.input_shape)
    original = certifier(x)
    eps = float(original.radius[original.radius > 0].median()) * (1 + 1e-6)
    exported = export(certifier, x, tmp_path / "model.onnx", eps=eps)
    assert (exported.checked, exported.abstained) == (40, int((original.radius < eps).sum()))
    assert 0 < exported.abstained < 40
    assert exported.difference < 1e-11
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert {i.name: i.type for i in session.get_inputs()} == {"x": "tensor(float)"}
    for x in (torch.rand(1, *model.input_shape), torch.rand(7, *model.input_shape), unusual(model.input_shape)):
        prediction, radius = session.run(["prediction", "radius"], {"x": x.numpy()})
        truth = certifier(x)
        np.testing.assert_allclose(radius, truth.radius.numpy(), rtol=1e-9)
        assert prediction.tolist() == truth.answer(eps).tolist()
    assert radius[:3].tolist() == [0, 0, 0]  # NaN and infinities
    assert prediction[:3].tolist() == [-1, -1, -1]


def unusual(shape):
    """Inputs that are not finite, huge, out of range, zero."""
    x = torch.rand(8, *shape)
    rows = x.view(8, -1)
    rows[0, 0], rows[1, 0], rows[2, 0] = float("nan"), float("inf"), -float("inf")
    rows[3], rows[4], rows[5], rows[6] = 1e30, 3e38, -7.0, 0.0
    return x


@pytest.mark.parametrize("gap", [0.0, 2.0**-53, 1e-9])
def test_near_ties(gap):
    """Logits x_0 and x_1 + gap at inputs with x_0 = x_1."""
    model = MLP((2,), 2, hidden=()).double()
    model.head.weight.data.copy_(torch.eye(2))
    model.head.bias.data.copy_(torch.tensor([0.0, gap]))
    certifier, x = GloRo.proven(model), torch.tensor([[0.5, 0.5], [1.0, 1.0], [0.1, 0.1]])
    prediction, radius = run(to_onnx(certifier, 0.0), x)
    assert prediction.tolist() == ([1] * 3 if gap == 1e-9 else [-1] * 3)  # less than rounding proves nothing
    np.testing.assert_allclose(radius, [gap / 2**0.5 if gap == 1e-9 else 0.0] * 3, rtol=1e-5)
    np.testing.assert_allclose(radius, certifier(x).radius, rtol=1e-9)


@pytest.mark.parametrize(("stretch", "eta"), [pytest.param(0.0, 0.0, marks=pytest.mark.slow), (0.1, 0.05)])
def test_centroid_nets_in_files_use_single_planes(stretch, eta, tmp_path):
    """They never claim more than Python, whose radii may be larger."""
    torch.manual_seed(0)
    model = settled(CentroidNet((1, 4, 4), 3, per_class=6, stretch=stretch))
    x = torch.rand(60, 1, 4, 4)
    planes = NearestCentroid.proven(model, eta=eta)
    eps = float(planes(x).radius.max()) * (1 - 1e-6)
    certifier = copy.copy(planes)
    certifier.radii = [eps]
    exported = export(certifier, x, tmp_path / "model.onnx", eps=eps)
    prediction, radius = run((tmp_path / "model.onnx").read_bytes(), x)
    refined = certifier(x).radius
    assert (radius <= refined * (1 + 1e-9)).all()
    assert (refined > radius * (1 + 1e-6)).any()
    assert torch.equal(prediction >= 0, radius >= eps)
    assert exported.abstained == int((radius < eps).sum())


def test_the_largest_input_bounds_the_radius():
    model = MLP((2,), 2, hidden=()).double()
    certifier = GloRo.proven(model)
    certifier.largest_input = 1.0
    x = torch.tensor([[0.0, 0.9], [3.0, 0.0], [0.0, 1e-3]])
    _, radius = run(to_onnx(certifier, 0.0), x)
    size = x.double().norm(dim=1)
    assert (radius <= (1 - size).clamp_min(0)).all()
    assert radius[1] == 0
    np.testing.assert_allclose(radius, certifier(x).radius, rtol=1e-12)


def test_float32_networks_stay_in_float32(tmp_path):
    torch.manual_seed(0)
    model = MLP((3,), 4, hidden=(16,), activation="gelu").eval()
    certifier, x = GloRo.proven(model), torch.rand(50, 3)
    exported = export(certifier, x, tmp_path / "model.onnx", eps=0.0)
    assert exported.difference < 1e-4
    prediction, radius = run((tmp_path / "model.onnx").read_bytes(), x)
    double = GloRo.proven(model.double())(x)
    assert (radius < double.radius * (1 + 1e-5)).all()  # rounding costs some of the radius
    assert torch.equal(prediction[prediction >= 0], double.prediction[prediction >= 0])
    weights = onnx.load(tmp_path / "model.onnx").graph.initializer
    assert any(w.data_type == onnx.TensorProto.FLOAT and list(w.dims) == [3, 16] for w in weights)


@pytest.fixture(scope="module")
def linear():
    torch.manual_seed(0)
    return GloRo.proven(MLP((3,), 2, hidden=()).double())


def test_files_with_certificates_say_so(linear):
    x = torch.rand(20, 3)
    content = to_onnx(linear, 0.1, Metadata(classes=("cat", "dog")))
    stored = {entry.key: entry.value for entry in onnx.load_from_string(content).metadata_props}
    expected = {"norm": "l2", "eps": "0.1", "precision": "float64", "classes": '["cat", "dog"]'}
    assert {key: stored[key] for key in expected} == expected
    assert stored["function_digest"] == linear.model.digest == linear(x).function
    logits, label = run_file(content, x, "logits", "label")
    torch.testing.assert_close(logits, linear.model(x.double()))
    assert torch.equal(label, linear(x).prediction)  # also if the file abstains


def test_eps_is_not_rounded_to_float32(linear):
    x = torch.rand(50, 3)
    eps = linear(x).radius * (1 - 1e-12)  # more than the difference between PyTorch and ONNX Runtime
    row = int((eps.float().double() > eps * (1 + 1e-11)).nonzero()[0])  # rounded, it would be above this radius
    prediction, radius = run(to_onnx(linear, float(eps[row])), x)
    assert prediction[row] >= 0
    assert torch.equal(prediction >= 0, radius >= eps[row])


def test_a_file_that_disagrees_is_not_written(linear, tmp_path, monkeypatch):
    constants, x = linear.constants, torch.rand(5, 3)
    wrong = dataclasses.replace(
        linear, constants=dataclasses.replace(constants, lipschitz=constants.lipschitz * (1 + 1e-8))
    )
    content = to_onnx(wrong, 0.0)
    assert compare(content, wrong, x, 0.0)[0] == 0
    with pytest.raises(UnsoundError, match="does not agree with the model"):
        compare(content, linear, x, 0.0)
    with pytest.raises(UnsoundError, match="does not agree with the model"):
        compare(content, wrong, x, float(wrong(x).radius.max()) * 1.1)  # abstains elsewhere
    monkeypatch.setattr("atoll.certify.export.to_onnx", lambda *_: content)
    with pytest.raises(UnsoundError, match="does not agree with the model"):
        export(linear, x, tmp_path / "model.onnx", eps=0.0)
    assert not list(tmp_path.iterdir())


def test_points_without_a_radius_do_not_count_as_differences(linear):
    x = torch.cat([torch.full((1, 3), float("nan")), torch.rand(4, 3)])
    assert linear(x).radius[0] == 0
    abstained, difference = compare(to_onnx(linear, 0.0), linear, x, 0.0)
    assert abstained == 1
    assert 0 <= difference < 1e-9


def test_the_largest_relative_difference_is_reported(linear, monkeypatch):
    x = torch.rand(5, 3)
    right = linear(x)
    factors = 1 + torch.tensor([1e-10, 0.0, -7e-10, 2e-10, 0.0], dtype=torch.float64)
    monkeypatch.setattr("atoll.certify.export.run", lambda content, x: (right.answer(0.0), right.radius * factors))
    assert 0 < float(right.radius.min()) <= float(right.radius.max()) < 1
    abstained, difference = compare(b"", linear, x, 0.0)
    assert abstained == 0
    assert difference == pytest.approx(7e-10, rel=1e-3)


@pytest.mark.parametrize("stretch", [0.0, 0.499])
def test_rounding_in_float32_decides_alike_in_files(stretch):
    """Next to the plane between two centroids, where a steep stretch multiplies rounding errors."""
    model = CentroidNet((4,), 2, per_class=1, stretch=stretch)
    model.head.centroids.data = torch.tensor([[[0.0, 0.0, 0.0, 0.0]], [[1.0, 0.0, 0.0, 0.0]]])
    certifier, x = NearestCentroid.proven(model), torch.zeros(200, 4)
    x[:, 0] = 0.5 - torch.linspace(0, 5e-6 if stretch else 1e-4, 200)
    truth = certifier(x).radius
    assert 20 < int((truth > 0).sum()) < 180
    _, radius = run(to_onnx(certifier, 0.0), x)
    np.testing.assert_allclose(radius, truth.numpy(), rtol=1e-6, atol=1e-13)


@pytest.mark.parametrize(("row", "value"), [(0, float("nan")), (3, float("inf")), (2, -1.0)])
def test_one_wrong_radius_is_a_difference(linear, monkeypatch, row, value):
    x = torch.rand(5, 3)
    right = linear(x)
    prediction, radius = right.answer(0.0), right.radius
    monkeypatch.setattr("atoll.certify.export.run", lambda content, x: (prediction, radius))
    assert compare(b"", linear, x, 0.0) == (0, 0.0)
    radius[row] = value
    with pytest.raises(UnsoundError, match="does not agree with the model"):
        compare(b"", linear, x, 0.0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"certifier": len}, "cannot be exported: expected GloRo.proven or NearestCentroid.proven"),
        ({"eps": -1.0}, "eps: expected a finite number >= 0, got -1.0"),
        ({"eps": float("nan")}, "eps: expected a finite number >= 0, got nan"),
        ({"x": torch.rand(0, 3)}, "x: expected at least one point"),
    ],
)
def test_what_cannot_be_exported_is_refused(linear, change, sentence, tmp_path):
    arguments = {"certifier": linear, "x": torch.rand(2, 3), "eps": 0.1, "path": tmp_path / "model.onnx"} | change
    with pytest.raises(InputError, match=sentence):
        export(**arguments)
    assert not list(tmp_path.iterdir())
