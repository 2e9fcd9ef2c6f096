r"""Traces of the generalized Gauss-Newton matrix, layer by layer, by ordinary backward passes.

With the Jacobian J of the logits of a point and the Hessian :math:`\Phi` of its loss in logit space, the matrix is the
mean of :math:`J^T \Phi J` over the points (Schraudolph, "Fast curvature matrix-vector products for second-order
gradient descent", 2002).  The diagonal block of a layer equals that of the Hessian if the logits are piecewise linear
in the layer (``atoll.graph.linearity``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from atoll.curvature.risk import EmpiricalRisk, Vector, derivative, flatten, shared
from atoll.distributed import all_sum
from atoll.errors import check_count
from atoll.losses.base import Loss, Outputs, hessian_blocks
from atoll.modules import preserve_buffers
from atoll.rng import PointRNG


def ggn_trace_samples(risk: EmpiricalRisk, index: Tensor, probes: Sequence[int], seed: object) -> Tensor:
    r"""Return an unbiased estimate of each layer's trace per probe, summed over some points: ``(probes, layers)``.

    With :math:`\Phi_n = B_n B_n^T` and a vector of random signs :math:`s_n` for each point,

    .. math:: E\,\Big\|\sum_n J_{n,k}^T B_n s_n\Big\|^2 = \sum_n \mathrm{Tr}\, J_{n,k}^T \Phi_n J_{n,k},

    and one backward pass computes the sum for all layers k.  If :math:`\Phi` has negative eigenvalues (losses that
    compare clean and adversarial logits), a separate pass for them is subtracted.

    >>> from atoll.losses import Standard
    >>> model = torch.nn.Linear(1, 2, bias=False).eval()
    >>> _ = model.weight.data.zero_()
    >>> risk = EmpiricalRisk(model, Standard(), torch.ones(1, 1), torch.tensor([0]))
    >>> ggn_trace_samples(risk, torch.tensor([0]), range(2), 0)  # with two classes B has one column: exact
    tensor([[0.5000],
            [0.5000]], dtype=torch.float64)
    """
    total = torch.zeros(len(probes), len(risk.names), dtype=torch.float64, device=risk.device)
    for row, sign, product in _vjps(risk, index, probes, seed):
        total[row] += sign * _squared_norms(product)
    return total


def diagonal(risk: EmpiricalRisk, *, probes: int = 8, group: int = 8, seed: object = 0) -> Vector:
    r"""Return an unbiased estimate of the diagonal of the matrix, from the same passes with squares instead of norms.

    >>> from atoll.losses import Standard
    >>> model = torch.nn.Linear(1, 2, bias=False).eval()
    >>> _ = model.weight.data.zero_()
    >>> diagonal(EmpiricalRisk(model, Standard(), torch.ones(1, 1), torch.tensor([0])))[0].tolist()
    [[0.25], [0.25]]
    """
    check_count(1, probes=probes, group=group)
    total = torch.zeros(risk.size, dtype=risk.parameters[0].dtype, device=risk.device)
    for index in shared(len(risk), group):
        for _, sign, product in _vjps(risk, index, range(probes), seed):
            total += sign * flatten(product).square()
    return risk.split(all_sum(total) / (len(risk) * probes))


def exact_gauss_newton(risk: EmpiricalRisk, index: Tensor) -> Tensor:
    r"""Return the exact trace of every layer, summed over some points, with a backward pass per point and class.

    .. math:: \mathrm{Tr}\, J_k^T \Phi J_k = \sum_j \lambda_j \|J_k^T u_j\|^2, \qquad \Phi = \sum_j \lambda_j u_j u_j^T.
    """
    total = torch.zeros(len(risk.parameters), dtype=torch.float64, device=risk.device)
    for eigenvalue, product in _summands(risk, index, risk.parameters):
        total += eigenvalue * _squared_norms(product)
    return total


def block_factor(risk: EmpiricalRisk, layer: int) -> tuple[Tensor, Tensor]:
    r"""Return rows f and signs s such that the block of a layer is :math:`\frac1N \sum_a s_a f_a f_a^T`.

    There is one row, and one backward pass, for each point and logit.  Every process computes all of them.
    """
    rows, signs = [], []
    for eigenvalue, (product,) in _summands(risk, torch.arange(len(risk)), [risk.parameters[layer]]):
        rows.append(eigenvalue.abs().sqrt() * product.double().flatten())
        signs.append(eigenvalue.sign())
    return torch.stack(rows), torch.stack(signs)


def logit_hessian(loss: Loss, out: Outputs, y: Tensor) -> Tensor:
    """Return second derivatives of the loss with respect to the logits (clean, adversarial): ``(points, size, size)``.

    >>> from atoll.losses import Standard
    >>> logit_hessian(Standard(), Outputs(logits=torch.zeros(1, 2)), torch.tensor([0])).tolist()
    [[[0.25, -0.25], [-0.25, 0.25]]]
    """
    both = {"clean": out.logits, "adversarial": out.adv_logits}
    double = {name: g.detach().double() for name, g in both.items() if g is not None}
    blocks = hessian_blocks(loss, Outputs(logits=double.get("clean"), adv_logits=double.get("adversarial")), y)
    count, classes = next(iter(double.values())).shape
    zero = all_logits(out).new_zeros(count, classes, classes, dtype=torch.float64)

    def block(row: str, column: str) -> Tensor:
        if row == column:
            return blocks.get(row, zero)
        cross = blocks.get("cross", zero)
        return cross if row == "clean" else cross.transpose(1, 2)

    return torch.cat([torch.cat([block(a, b) for b in double], 2) for a in double], 1).detach()


def all_logits(out: Outputs) -> Tensor:
    """Concatenate clean and adversarial logits, if they exist, with one row per point."""
    return torch.cat([g for g in (out.logits, out.adv_logits) if g is not None], 1)


@torch.enable_grad()
def _factors(risk: EmpiricalRisk, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits with their graph, and eigenvalues and eigenvectors of the Hessian of the loss in logit space."""
    out, y = risk.outputs(index)
    phi = logit_hessian(risk.loss, out, y)
    eigenvalues, vectors = torch.linalg.eigh(phi.nan_to_num(0, 0, 0))
    # Non-finite numbers must appear in the sum over all processes, not as an error in one of them.
    return all_logits(out), torch.where(phi.isfinite().all(2), eigenvalues, torch.nan), vectors


def _summands(risk: EmpiricalRisk, index: Tensor, parameters: Sequence[Tensor]) -> Iterator[tuple[Tensor, Vector]]:
    """Yield the eigenvalue and J^T u for each point and eigenvector u of its Phi."""
    with preserve_buffers(risk.model):
        for point in torch.split(index, 1):
            logits, eigenvalues, vectors = _factors(risk, point)
            for eigenvalue, u in zip(eigenvalues[0], vectors[0].T, strict=True):
                yield eigenvalue, _vjp(logits, parameters, u[None])


def _vjps(risk: EmpiricalRisk, index: Tensor, probes: Sequence[int], seed: object) -> Iterator[tuple[int, int, Vector]]:
    """Yield row, sign and the sum over points of J^T B s for each probe."""
    with preserve_buffers(risk.model):
        logits, eigenvalues, vectors = _factors(risk, index)
        # Because of rounding, zero eigenvalues may be slightly negative.
        signs = (1, -1) if bool((eigenvalues < -1e-9 * eigenvalues.abs().max()).any()) else (1,)
        for row, probe in enumerate(probes):
            streams = PointRNG(seed, "gauss-newton", probe, index=index.to(logits.device))
            s = streams.rademacher(eigenvalues.shape[1], dtype=eigenvalues.dtype)
            for sign in signs:
                u = torch.einsum("nij,nj->ni", vectors, (sign * eigenvalues).clamp_min(0).sqrt() * s)
                yield row, sign, _vjp(logits, risk.parameters, u)


def _vjp(logits: Tensor, parameters: Sequence[Tensor], u: Tensor) -> Vector:
    """Return J^T u."""
    return derivative([logits], parameters, [u.to(logits.dtype)], retain_graph=True)


def _squared_norms(vector: Vector) -> Tensor:
    return torch.stack([part.square().sum() for part in vector]).double()
