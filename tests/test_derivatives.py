"""Second derivatives of every fused operation, in every mode, against differences of first derivatives in float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp

from atoll.derivatives import call_with, elementary_operations
from atoll.errors import InputError
from atoll.training.methods.rat import check_taylor_terms, taylor_terms


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


def square(z: Tensor) -> Tensor:
    return z.view(-1, 6, 6)


def positive(z: Tensor) -> Tensor:
    return square(z) @ square(z).mT + torch.eye(6, dtype=z.dtype)


def shifted(z: Tensor) -> Tensor:
    return square(z) + 4 * torch.eye(6, dtype=z.dtype)


def image(z: Tensor) -> Tensor:
    return z.view(-1, 1, 6, 6)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(6, 6, batch_first=True)

    def forward(self, z: Tensor) -> Tensor:
        output: Tensor = self.inner(square(z))[0]
        return output


def lookup(z: Tensor) -> Tensor:
    table = z[0].view(6, 6)
    return z + F.embedding(torch.arange(len(z)) % 6, table).square().repeat(1, 6)


# Of 36 features of every point.  Piecewise linear ones are squared, so that they have second derivatives.
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "F.normalize": F.normalize,
    "F.normalize of a part": lambda z: F.normalize(square(z), dim=2, eps=1e-3),
    "cosine_similarity": lambda z: F.cosine_similarity(square(z), square(z).flip(1) + 1, dim=2),
    "pairwise_distance": lambda z: F.pairwise_distance(square(z), square(z).flip(1).sin()),
    "cdist": lambda z: torch.cdist(square(z), square(z)[:, :3].sin()),
    "torch.norm": lambda z: torch.norm(square(z), dim=1),
    "Tensor.norm": lambda z: square(z).norm(dim=(1, 2), keepdim=True),
    "linalg.norm": lambda z: torch.linalg.norm(square(z), dim=2),
    "vector_norm": lambda z: torch.linalg.vector_norm(square(z), dim=2),
    "matrix_norm": lambda z: torch.linalg.matrix_norm(square(z))[:, None],
    "std": lambda z: square(z).std(2),
    "var": lambda z: square(z).var(2),
    "logsumexp": lambda z: square(z).logsumexp(2),
    "softmax": lambda z: z.softmax(1),
    "log_softmax": lambda z: z.log_softmax(1),
    "layer norm": lambda z: F.layer_norm(z, (36,)),
    "group norm": lambda z: F.group_norm(z, 4),
    "instance norm": lambda z: F.instance_norm(square(z)),
    "torch.instance_norm": lambda z: torch.instance_norm(square(z), None, None, None, None, True, 0.1, 1e-5, False),
    "torch.batch_norm": lambda z: torch.batch_norm(z.T, None, None, None, None, True, 0.1, 1e-5, False).T,
    "attention": lambda z: F.scaled_dot_product_attention(image(z), image(z).sin(), image(z)),
    "PReLU": lambda z: F.prelu(z, z[0, :1]).square(),
    "CELU": F.celu,
    "ELU": F.elu,
    "SiLU": F.silu,
    "Mish": F.mish,
    "GELU": F.gelu,
    "hardswish": F.hardswish,
    "hardsigmoid": lambda z: F.hardsigmoid(z).square(),
    "GLU": F.glu,
    "pixel shuffle": lambda z: F.pixel_shuffle(z.view(-1, 4, 3, 3), 2).square(),
    "bilinear": lambda z: F.interpolate(image(z), scale_factor=2, mode="bilinear").square(),
    "bicubic": lambda z: F.interpolate(image(z), scale_factor=2, mode="bicubic").square(),
    "embedding": lookup,
    "einsum": lambda z: torch.einsum("bij,bjk->bik", square(z), square(z)),
    "cumsum": lambda z: z.square().cumsum(1),
    "cumprod": lambda z: square(z).cumprod(2),
    "prod": lambda z: square(z).prod(2),
    "sort": lambda z: (z.square() - 99 * torch.arange(36)).sort(1)[0],
    "topk": lambda z: (z.square() - 99 * torch.arange(36)).topk(3)[0],
    "QR": lambda z: torch.linalg.qr(shifted(z))[1],
    "Cholesky": lambda z: torch.linalg.cholesky(positive(z)),
    "inverse": lambda z: torch.inverse(shifted(z)),
    "solve": lambda z: torch.linalg.solve(shifted(z), square(z)),
    "solve from the right": lambda z: torch.linalg.solve(shifted(z), square(z), left=False),
    "solve for vectors": lambda z: torch.linalg.solve(shifted(z), square(z)[:, 0]),
    "matrix_exp": lambda z: torch.matrix_exp(0.3 * square(z)),
    "det": lambda z: torch.det(square(z))[:, None],
    "linalg.det": lambda z: torch.linalg.det(square(z))[:, None],
    "Tensor.det": lambda z: square(z).det()[:, None],
    "slogdet": lambda z: torch.slogdet(square(z))[1][:, None],
    "linalg.slogdet": lambda z: torch.linalg.slogdet(square(z)).logabsdet[:, None],
    "logdet": lambda z: torch.logdet(positive(z))[:, None],
}
# What PyTorch gets wrong, or has no derivatives of; a later version may not.
RIGHT_OR_REFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "pdist": lambda z: F.pdist(z[:1].view(6, 6)).expand(len(z), -1) * z[:, :15],
    "cdist of another power": lambda z: torch.cdist(square(z), square(z)[:, :3].sin(), p=3.0),
    "vector_norm of another power": lambda z: torch.linalg.vector_norm(square(z), 3, dim=2),
    "renorm": lambda z: torch.renorm(z, 2, 0, 1.0),
    "std_mean": lambda z: torch.std_mean(square(z), 2)[0],
    "native_layer_norm": lambda z: torch.native_layer_norm(z, (36,), None, None, 1e-5)[0],
    "grid_sample": lambda z: F.grid_sample(image(z), z.view(-1, 6, 3, 2).tanh(), align_corners=False),
    "SVD": lambda z: torch.linalg.svdvals(shifted(z)),
    "projections of SVD": lambda z: torch.linalg.svd(shifted(z))[0].square(),
    "eigh": lambda z: torch.linalg.eigvalsh(positive(z)),
    "Q": lambda z: torch.linalg.qr(shifted(z))[0],
    "cholesky_inverse": lambda z: torch.cholesky_inverse(torch.linalg.cholesky(positive(z))),
    "householder_product": lambda z: torch.linalg.householder_product(square(z), 0.1 * z[:, :6]),
    "Fourier": lambda z: torch.fft.rfft(z).abs().square(),
    "scatter_reduce": lambda z: z.scatter_reduce(1, torch.zeros(len(z), 3).long(), z[:, :3].square(), "prod"),
    "straight through": lambda z: z + (z.sign() - z).detach(),
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
}


class Applied(nn.Module):
    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.operation = nn.Linear(4, 36), operation

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(self.layer(x)).flatten(1)


def refusal(model: nn.Module, x: Tensor) -> str:
    try:
        check_taylor_terms(model, x, 2)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", [*RIGHT, *RIGHT_OR_REFUSED, *MODULES])
def test_taylor_terms_of_every_operation_are_right_or_refused(name: str) -> None:
    everything = RIGHT | RIGHT_OR_REFUSED
    model = Applied(everything[name] if name in everything else MODULES[name]()).double().eval()
    x = torch.randn(6, 4, dtype=torch.float64)
    if (sentence := refusal(model, x)) and name not in RIGHT:
        assert sentence.startswith("RAT: exact terms cannot be used for this model: ")
        return
    assert not sentence
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    u, v = ({n: torch.randn_like(p) for n, p in weights.items()} for _ in range(2))

    def at(direction: dict[str, Tensor], step: float) -> dict[str, Tensor]:
        return {n: w + step * direction[n] for n, w in weights.items()}

    def terms(at: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        model.load_state_dict(at)
        return taylor_terms(model, x, u, 2)

    first, second = terms(weights)
    gradients = torch.autograd.grad(second.square().sum(), list(model.parameters()), materialize_grads=True)
    after, middle, before = (functional_call(model, at(u, h), (x,)) for h in (1e-4, 0.0, -1e-4))
    torch.testing.assert_close(first, (after - before) / 2e-4, rtol=1e-4, atol=1e-4)
    size = float(second.detach().abs().max()) + 1
    torch.testing.assert_close(second, (after - 2 * middle + before) / 1e-8, rtol=1e-3, atol=1e-3 * size)
    slope = sum((g * d).sum() for g, d in zip(gradients, v.values(), strict=True))
    ends = [float(terms(at(v, h))[1].detach().square().sum()) for h in (1e-6, -1e-6)]
    assert float(slope) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-3, abs=1e-3 * size**2)
