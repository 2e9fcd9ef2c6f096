"""Parameters that count as linear, against differences of gradients in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from atoll.graph.linearity import nonlinear_parameters
from models.cases import MODELS


class Square(torch.autograd.Function):
    """Looks linear by its name, but is not."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ (w * w).T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ (w * w), 2 * w * (g.T @ x)


Square.__name__ = Square.__qualname__ = "Linear"


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(6, 8)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Square.apply(x, self.weight).relu())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(x).relu()))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (2, 4))
        out = nn.functional.scaled_dot_product_attention(self.query(x), x, self.value(x))
        return self.head(out.mean(1))


class Gated(nn.Module):
    """Nonlinear in its inputs alone, a branch by comparison, a division by a constant, and a parameter nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.unused = nn.Linear(8, 8), nn.Linear(8, 3), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x.sigmoid()) / 3
        return self.head(torch.where(z > 0, z, -2 * z) * x.exp())


def dense(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 3))


def conv(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1), *layers, nn.Flatten(), nn.Linear(36, 3)
    )


# net, and the names of the parameters that must be reported
NETS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "ReLU": (lambda: dense(nn.ReLU(), nn.Linear(8, 8), nn.LeakyReLU()), set()),
    "batch norm": (lambda: conv(nn.BatchNorm2d(4), nn.ReLU()), set()),
    "max pooling": (lambda: conv(nn.MaxPool2d(2, padding=1), nn.ReLU(), nn.UpsamplingNearest2d((3, 3))), set()),
    "PReLU": (lambda: dense(nn.PReLU()), set()),
    "gates": (Gated, set()),
    "tanh": (lambda: dense(nn.Tanh()), {"0.weight", "0.bias"}),
    "GELU before ReLU": (lambda: dense(nn.GELU(), nn.Linear(8, 8), nn.ReLU()), {"0.weight", "0.bias"}),
    "layer norm": (lambda: dense(nn.LayerNorm(8), nn.ReLU()), {"0.weight", "0.bias"}),
    "RMS norm": (lambda: dense(nn.RMSNorm(8)), {"0.weight", "0.bias"}),
    "group norm": (lambda: conv(nn.GroupNorm(2, 4)), {"1.weight", "1.bias"}),
    "instance norm": (lambda: conv(nn.InstanceNorm2d(4)), {"1.weight", "1.bias"}),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))),
        {"0.parametrizations.weight.original1"},
    ),
    "a Function named Linear": (Custom, {"weight"}),
    "tied layers": (Tied, {"layer.weight"}),
    "attention": (Attention, {"query.weight", "query.bias"}),
}


@pytest.mark.parametrize("name", NETS)
def test_reported_parameters_are_those_that_are_not_linear(name: str) -> None:
    make, reported = NETS[name]
    model = make().double().eval()
    reasons = nonlinear_parameters(model, (8,))
    assert {n for n in reasons if n in reported} == reported
    x, weights = torch.rand(4, 8, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    curved = {n for n, p in model.named_parameters() if bends(model, p, x, weights)}
    assert curved <= reasons.keys()
    assert reported <= curved or name == "instance norm"  # a bias before the mean is subtracted has no effect
    assert all(reason for reason in reasons.values())


def bends(model: nn.Module, parameter: nn.Parameter, x: Tensor, weights: Tensor) -> bool:
    """Whether a sum of logits has a second derivative along a random direction of one parameter."""

    def gradient() -> Tensor:
        (g,) = torch.autograd.grad((model(x) * weights).sum(), [parameter], allow_unused=True)
        return torch.zeros_like(parameter) if g is None else g

    v, h = torch.randn_like(parameter), 1e-7
    with torch.no_grad():
        parameter.add_(h * v)
    after = gradient()
    with torch.no_grad():
        parameter.sub_(h * v)
    before = gradient()
    return bool((after - before).norm() > 1e-5 * h * (before.norm() + 1))


def test_reasons_name_operation_and_place() -> None:
    reasons = nonlinear_parameters(dense(nn.Tanh()).eval(), (8,))
    assert reasons["0.weight"] == "tanh is not piecewise linear in 0.weight (module 1, Tanh)"


QUICK = ("mlp", "4c3f", "small-bn-gelu", "liresnet", "centroid")


@pytest.mark.parametrize(
    "case", [c if c.name in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in MODELS], ids=str
)
def test_which_models_are_piecewise_linear(case):
    smooth = {"6c2f-softplus": "softplus", "small-bn-gelu": "gelu"}
    smooth |= {c.name: "native_layer_norm" for c in MODELS if c.name.startswith("vit")}
    model = case.build().eval()
    reasons = nonlinear_parameters(model, tuple(case.images().shape[1:]))
    if case.name in smooth:
        assert smooth[case.name] in {reason.partition(" ")[0] for reason in reasons.values()}
    elif case.name.startswith(("hybrid", "liresnet", "resnet", "centroid", "orthogonal")) or "householder" in case.name:
        # standardized weights, norms, distances, Cayley transforms, angles
        assert reasons
    else:
        assert not reasons
