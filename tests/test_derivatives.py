"""Second derivatives of every fused operation, in every mode, against differences of first derivatives in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp

from atoll.derivatives import call_with, elementary_operations


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return output


class StandardizedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.view(1, self.out_channels, -1)
        weight = nn.functional.batch_norm(rows, None, None, training=True).view_as(self.weight)
        return nn.functional.conv2d(x, weight, self.bias)


def conv_net(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Tanh(), nn.Flatten(), nn.Linear(36, 3))


def dense_net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *layers, nn.Tanh(), nn.Linear(8, 3))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer norm": (lambda: dense_net(nn.LayerNorm(8)), (8,)),
    "layer norm over two dimensions": (lambda: conv_net(nn.LayerNorm((3, 3))), (2, 5, 5)),
    "layer norm without weights": (lambda: dense_net(nn.LayerNorm(8, elementwise_affine=False)), (8,)),
    "RMS norm": (lambda: dense_net(nn.RMSNorm(8)), (8,)),
    "group norm": (lambda: conv_net(nn.GroupNorm(2, 4)), (2, 5, 5)),
    "instance norm": (lambda: conv_net(nn.InstanceNorm2d(4)), (2, 5, 5)),
    "affine instance norm": (lambda: conv_net(nn.InstanceNorm2d(4, affine=True)), (2, 5, 5)),
    "instance norm with running statistics": (
        lambda: conv_net(nn.InstanceNorm2d(4, track_running_stats=True)),
        (2, 5, 5),
    ),
    "batch norm": (lambda: conv_net(nn.BatchNorm2d(4)), (2, 5, 5)),
    "standardized weights": (
        lambda: nn.Sequential(StandardizedConv(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 3)),
        (2, 5, 5),
    ),
    "weight norm": (lambda: dense_net(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))), (8,)),
    "weight norm over all": (lambda: dense_net(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8), dim=None)), (8,)),
    "attention": (lambda: nn.Sequential(Attention(), nn.Flatten(), nn.Linear(40, 3)), (5, 8)),
    "transformer": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Flatten(), nn.Linear(40, 3)
        ),
        (5, 8),
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_second_derivatives(name: str) -> None:
    make, shape = NETS[name]
    model = make().double().eval()
    x = torch.randn(3, *shape, dtype=torch.float64)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    v = {n: torch.randn_like(p) for n, p in weights.items()}

    def loss(w: dict[str, Tensor]) -> Tensor:
        return functional_call(model, w, (x,)).square().sum()

    def moved(h: float) -> dict[str, Tensor]:
        return {n: p + h * v[n] for n, p in weights.items()}

    def flat(tree: dict[str, Tensor]) -> Tensor:
        return torch.cat([tree[n].flatten() for n in weights])

    step = 1e-5
    truth = (flat(grad(loss)(moved(step))) - flat(grad(loss)(moved(-step)))) / (2 * step)
    along = float(truth @ flat(v))
    with elementary_operations():
        assert torch.allclose(functional_call(model, weights, (x,)), model(x))
        forward_forward = jvp(lambda w: jvp(loss, (w,), (v,))[1], (weights,), (v,))[1]
        forward_reverse = jvp(grad(loss), (weights,), (v,))[1]
        reverse_reverse = vjp(grad(loss), weights)[1](v)[0]
        leaves = list(model.parameters())
        first = torch.autograd.grad(model(x).square().sum(), leaves, create_graph=True)
        twice = torch.autograd.grad(first, leaves, list(v.values()))
    assert float(forward_forward) == pytest.approx(along, rel=1e-5)
    for product in (flat(forward_reverse), flat(reverse_reverse), torch.cat([g.flatten() for g in twice])):
        assert (product - truth).norm() < 1e-5 * truth.norm()


def test_nothing_stays_behind() -> None:
    norm, x = nn.LayerNorm(4), torch.randn(2, 4)
    before = norm(x)
    with elementary_operations():
        norm(x)
    assert torch.equal(norm(x), before)


def test_other_weights_leave_shared_modules_and_tensors_alone() -> None:
    layer, twin = nn.Linear(3, 3), nn.Linear(3, 3)
    twin.weight = layer.weight
    model = nn.Sequential(layer, nn.BatchNorm1d(3), layer, twin).eval()
    x, own = torch.randn(4, 3), {n: t.clone() for n, t in model.state_dict().items()}
    other = {n: torch.randn_like(p) for n, p in model.named_parameters()} | {"1.running_mean": torch.ones(3)}
    output = call_with(model, other, x)
    assert all(torch.equal(t, own[n]) for n, t in model.state_dict().items())
    assert model[0].weight is model[2].weight is model[3].weight
    model.load_state_dict(
        own
        | other
        | {n.replace("0.", "2."): t for n, t in other.items() if n.startswith("0.")}
        | {"3.weight": other["0.weight"]}
    )
    assert torch.equal(model(x), output)
