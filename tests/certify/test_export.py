"""Exported files against the models they came from, run by ONNX Runtime."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from atoll.certify import GloRo
from atoll.certify.export import Affine, Graph, compare, export, run, to_onnx
from atoll.certify.gloro import PairwiseLipschitz
from atoll.errors import InputError, UnsoundError
from atoll.models import MLP, LiResNet, SmallConvNet


def settled(model):
    """In float64, with statistics of batch norm that are not 0 and 1."""
    draw = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for value, least in ((module.running_mean, -0.5), (module.running_var, 1e-5), (module.weight.data, 0.5)):
                value.copy_(torch.rand(value.shape, generator=draw) + least)
    return model.double().eval()


# A new kind of network that can be exported joins by one line.
MODELS = {
    "mlp": lambda: MLP((3,), 4, bounds=None),
    "convnet": lambda: SmallConvNet((1, 8, 8), 3, widths=(4, 8), hidden=16, activation="minmax", input_range="[-1,1]"),
    "batch-norm": lambda: SmallConvNet((1, 8, 8), 3, widths=(4, 8), hidden=16, batch_norm=True, input_range="[-1,1]"),
    "liresnet": lambda: LiResNet((1, 8, 8), 3, depth=3, width=4, features=8),
    "conventional": lambda: LiResNet((1, 8, 8), 3, depth=1, width=4, features=8, block="conventional"),
}


# Each takes seconds, and the others also have convolutions beside a shortcut.
SLOW = {"conventional": pytest.mark.slow, "convnet": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in MODELS])
def test_the_file_agrees_with_the_model(name, tmp_path):
    model = settled(MODELS[name]())
    certifier, x = GloRo.proven(model), torch.rand(20, *model.input_shape)
    original = certifier(x)
    eps = float(original.radius.median()) * (1 + 1e-6)
    exported = export(certifier, x, tmp_path / "model.onnx", eps=eps)
    assert (exported.checked, exported.abstained) == (20, int((original.radius < eps).sum()))
    assert exported.difference < 1e-12
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert {i.name: i.type for i in session.get_inputs()} == {"x": "tensor(float)"}
    for count in (1, 7):  # any batch size, and other points than those of the comparison
        x = torch.rand(count, *model.input_shape)
        prediction, radius = session.run(["prediction", "radius"], {"x": x.numpy()})
        truth = certifier(x)
        np.testing.assert_allclose(radius, truth.radius.numpy(), rtol=1e-9)
        assert prediction.tolist() == truth.answer(eps).tolist()


def test_eps_is_not_rounded_to_float32():
    certifier = GloRo.proven(MLP((3,), 2, hidden=()).double())
    x = torch.rand(50, 3)
    eps = certifier(x).radius * (1 - 1e-12)  # more than the difference between PyTorch and ONNX Runtime
    row = int((eps.float().double() > eps * (1 + 1e-11)).nonzero()[0])  # rounded, it would be above this radius
    prediction, radius = run(to_onnx(Graph(certifier, float(eps[row])), (3,)), x)
    assert prediction[row] >= 0
    assert torch.equal(prediction >= 0, radius >= eps[row])


def test_a_file_that_disagrees_is_not_written(tmp_path):
    model = MLP((3,), 2, hidden=()).double()
    right, x = GloRo.proven(model), torch.rand(5, 3)
    k = right.constants
    wrong = GloRo(model, PairwiseLipschitz(k.lipschitz * (1 + 1e-8), k.relative, k.absolute))
    content = to_onnx(Graph(wrong, 0.0), (3,))
    assert compare(content, wrong, x, 0.0)[0] == 0
    with pytest.raises(UnsoundError, match="does not agree with the model"):
        compare(content, right, x, 0.0)
    with pytest.raises(UnsoundError, match="does not agree with the model"):
        compare(content, wrong, x, float(wrong(x).radius.max()) + 1e-6)  # abstains elsewhere


@pytest.mark.parametrize(("row", "value"), [(0, float("nan")), (3, float("inf")), (2, -1.0)])
def test_one_wrong_radius_is_a_difference(monkeypatch, row, value):
    certifier, x = GloRo.proven(MLP((3,), 2, hidden=()).double()), torch.rand(5, 3)
    right = certifier(x.double())
    prediction, radius = right.answer(0.0), right.radius
    monkeypatch.setattr("atoll.certify.export.run", lambda content, x: (prediction, radius))
    assert compare(b"", certifier, x, 0.0) == (0, 0.0)
    radius[row] = value
    with pytest.raises(UnsoundError, match="does not agree with the model"):
        compare(b"", certifier, x, 0.0)


def test_batch_norm_is_exact_where_onnx_is_not():
    norm = settled(nn.Sequential(nn.BatchNorm2d(4)))[0]
    x = torch.rand(5, 4, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(Affine(norm)(x), norm(x), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: GloRo.proven(MLP((2,), 2)), "expected float64 weights"),
        (lambda: GloRo.proven(MLP((2,), 2, activation="gelu").double()), "ONNX Runtime has no Erf in float64"),
        (lambda: len, "cannot be exported: expected a certifier from Lipschitz constants"),
    ],
)
def test_models_that_cannot_be_exported_are_refused(build, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        export(build(), torch.rand(2, 2), tmp_path / "model.onnx", eps=0.1)
    assert not list(tmp_path.iterdir())
