"""Small nets in float64 whose Hessians can be written out.  A new kind of net joins the tests by one line."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from atoll.curvature import EmpiricalRisk
from atoll.graph.linearity import nonlinear_parameters
from atoll.models import MLP, SmallConvNet, ViT
from support import LOSSES, naive_loss

MODELS = {
    "mlp": (lambda: MLP((2,), 3, hidden=(4, 4)), (2,)),
    "conv-bn": (lambda: SmallConvNet((1, 8, 8), 3, widths=(2, 2), hidden=4, batch_norm=True), (1, 8, 8)),
    "vit": (
        lambda: ViT((1, 4, 4), 3, patch_size=2, width=4, depth=1, heads=2, mlp_ratio=1, dropout=0.1),
        (1, 4, 4),
    ),
}
RELU = ("mlp", "conv-bn")
# The losses all see the same nets; the dense Hessian of the transformer is the slow one.
CASES = [(model, loss) for model in MODELS for loss in LOSSES if model in RELU or loss in ("at", "trades")]


def make_risk(model: str = "mlp", loss: str = "at", points: int = 8, **options) -> EmpiricalRisk:
    build, shape = MODELS[model]
    with torch.random.fork_rng():
        torch.manual_seed(4)
        net = build().double()
        x = torch.rand(points, *shape, dtype=torch.float64)
        x_adv = (x + 0.2 * torch.rand_like(x)).clamp(0, 1)
        for p in net.parameters():
            p.data += 0.2 * torch.randn_like(p)
        net(x)  # batch norm gets statistics that are not 0 and 1
    net.eval()
    options.setdefault("nonlinear", nonlinear(model))
    return EmpiricalRisk(
        net, LOSSES[loss](), x, torch.arange(points) % 3, None if loss == "standard" else x_adv, **options
    )


@cache
def nonlinear(model: str) -> dict[str, str]:
    """Captured once; it does not depend on weights."""
    build, shape = MODELS[model]
    return nonlinear_parameters(build().eval(), shape)


def mean_loss(p: EmpiricalRisk):
    """The mean loss as a function of one long vector of weights: by other means than the code under test."""
    x_adv = p.x if p.x_adv is None else p.x_adv

    def value(flat: torch.Tensor) -> torch.Tensor:
        weights = dict(zip(p.names, p.split(flat), strict=True))
        logits, adv_logits = (torch.func.functional_call(p.model, weights, (inputs,)) for inputs in (p.x, x_adv))
        return naive_loss(p.loss, logits, adv_logits, p.y).mean()

    return value


def weights(p: EmpiricalRisk) -> torch.Tensor:
    return torch.cat([w.detach().flatten() for w in p.parameters])


def dense(p: EmpiricalRisk) -> torch.Tensor:
    """The true Hessian."""
    return torch.autograd.functional.hessian(mean_loss(p), weights(p))


@cache
def truth(model: str, loss: str) -> torch.Tensor:
    """The true Hessian of one of the risks above."""
    return dense(make_risk(model, loss))


def block_traces(p: EmpiricalRisk, hessian: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.sum() for part in hessian.diagonal().split([w.numel() for w in p.parameters])])


class Twice(nn.Module):
    """A ReLU net that uses one layer twice, so that it is not linear in it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(2, 2), nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.inner(x).relu()).relu())


class Fused(nn.Module):
    """PyTorch's fused attention, whose kernels have no second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(1, 3), nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x[:, None, :, None]).chunk(3, -1)
        return self.head(nn.functional.scaled_dot_product_attention(q, k, v).flatten(1))
