"""Sum and spread of all eigenvalues of the Hessian, without computing the eigenvalues."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from atoll.curvature.check import check_linearity
from atoll.curvature.ggn import block_factor
from atoll.curvature.products import hessian
from atoll.curvature.risk import EmpiricalRisk


@dataclass(frozen=True)
class Moments:
    """Number, sum and sum of squares of the eigenvalues of a symmetric matrix."""

    count: int
    sum: float
    squares: float

    @property
    def std(self) -> float:
        """Standard deviation of the eigenvalues."""
        return math.sqrt(max(0.0, self.squares / self.count - (self.sum / self.count) ** 2))


def moments(problem: EmpiricalRisk) -> dict[str, Moments]:
    r"""Sum and spread of the eigenvalues of the whole Hessian (under ``""``) and of each parameter's block, exactly.

    .. math:: \sum_i \lambda_i = \mathrm{Tr}\, H, \qquad \sum_i \lambda_i^2 = \|H\|_F^2.

    Only feasible for small networks.  If the network is piecewise linear in each parameter (ReLU), the rows of the
    largest parameter are not needed: outside of the parameter's block, they are columns of the other rows, and the sum
    of squares of the block follows from inner products of points and logits.  For an MLP 100-100, this saves 94 % of
    the products.

    >>> from atoll.losses import Standard
    >>> model = torch.nn.Linear(1, 2, bias=False).eval()
    >>> _ = model.weight.data.zero_()
    >>> whole = moments(EmpiricalRisk(model, Standard(), torch.ones(1, 1), torch.tensor([0])))[""]
    >>> whole.count, whole.sum, whole.std
    (2, 0.5, 0.25)
    """
    sizes = [p.numel() for p in problem.parameters]
    spans = torch.split(torch.arange(problem.size), sizes)
    skipped = sizes.index(max(sizes)) if len(sizes) > 1 and check_linearity(problem).passed else None
    computed = [k for k in range(len(sizes)) if k != skipped]
    matrix = hessian(problem, torch.cat([spans[k] for k in computed])).double()
    rows = dict(zip(computed, torch.split(matrix, [sizes[k] for k in computed]), strict=True))
    blocks: dict[str, Moments] = {}
    outside = 0.0  # sum of squares outside the blocks
    for k, name in enumerate(problem.names):
        if k in rows:
            block = rows[k][:, spans[k]]
            trace, squares = float(block.diagonal().sum()), float(block.square().sum())
            outside += float(rows[k].square().sum()) - squares
            if skipped is not None:  # the skipped rows in these columns
                outside += float(rows[k][:, spans[skipped]].square().sum())
        else:
            factor, signs = block_factor(problem, k)
            gram = factor @ factor.T / len(problem)
            trace, squares = float(signs @ gram.diagonal()), float(signs @ gram.square() @ signs)
        blocks[name] = Moments(sizes[k], trace, squares)
    parts = blocks.values()
    whole = Moments(problem.size, sum(part.sum for part in parts), outside + sum(part.squares for part in parts))
    return {"": whole} | blocks
