"""Checked Hessian-vector products, and the dense Hessian of small networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.curvature.check import DoubleRisk, check_gradient, check_hessian
from atoll.curvature.risk import EmpiricalRisk, Vector, derivative, flatten, shared
from atoll.distributed import all_sum
from atoll.errors import InputError
from atoll.modules import preserve_buffers

NOT_FINITE = "the loss or its derivatives are not finite at these weights and points"
LIMIT = 20_000  # largest number of parameters for a dense Hessian, which takes 1.6 GB in float32
_ROWS = 32  # number of rows to compute at a time
_STEP = 1e-6  # step of differences, in units of the weights


class HessianProducts:
    """Products of the Hessian of the mean loss with vectors.

    Uses double backward passes if they agree with differences of gradients (``atoll.curvature.check``).  Otherwise, for
    example for operations that can be differentiated only once, uses differences of gradients in float64.

    Args:
        risk: the loss as a function of the weights.
        seed: seed of the check.

    Raises:
        InputError: the gradient is not the derivative of the loss, so there is no meaningful Hessian.

    >>> from atoll.losses import Standard
    >>> model = torch.nn.Linear(2, 2, bias=False).eval()
    >>> _ = model.weight.data.zero_()
    >>> products = HessianProducts(EmpiricalRisk(model, Standard(), torch.tensor([[1.0, 0.0]]), torch.tensor([0])))
    >>> products([torch.eye(2)])[0].tolist(), products.message
    ([[0.25, 0.0], [-0.25, 0.0]], 'the double backward pass agrees with differences of gradients')
    """

    def __init__(self, risk: EmpiricalRisk, *, seed: object = 0) -> None:
        check = check_hessian(risk, seed=seed)
        self.risk, self.by_differences, self.message = risk, check.passed is False, check.message
        if self.by_differences:
            gradient = check_gradient(risk, seed=seed)
            if not gradient.passed:
                raise InputError(f"model: the curvature cannot be measured, because {gradient.message}")
            if any(getattr(term, "stop_clean_gradient", False) for _, term in risk.loss.terms.values()):
                raise InputError(
                    f"loss: stop_clean_gradient is not supported with differences of gradients, but {check.message}"
                )
            self.message = f"differences of gradients, because {check.message}"

    def __call__(self, vector: Sequence[Tensor]) -> Vector:
        """Return the product of the Hessian of the mean loss with a vector."""
        risk = self.risk
        total = torch.zeros(risk.size, dtype=risk.parameters[0].dtype, device=risk.device)
        for index in shared(len(risk), risk.micro_batch):
            total += flatten(self.sums(index, [vector])[0])
        mean = all_sum(total) / len(risk)
        if not mean.isfinite().all():
            raise InputError(NOT_FINITE)
        return risk.split(mean)

    def sums(self, index: Tensor, vectors: Sequence[Sequence[Tensor]]) -> list[Vector]:
        """Return products with the Hessian of the summed loss of some points; all vectors share the first passes."""
        risk = self.risk
        if self.by_differences:
            double = DoubleRisk(risk, index)
            return [[p.to(w) for p, w in zip(_difference(double, v), risk.parameters, strict=True)] for v in vectors]
        with preserve_buffers(risk.model):
            gradient = risk.gradient_graph(index)
            return [derivative(gradient, risk.parameters, v, retain_graph=True) for v in vectors]


def _difference(double: DoubleRisk, vector: Sequence[Tensor]) -> Vector:
    v = [part.double() for part in vector]
    length = float(flatten(v).norm())
    if not length:
        return [torch.zeros_like(part) for part in v]
    step = _STEP * max(float(flatten(double.weights).detach().norm()), 1e-3) / length
    after, before = (double.moved(v, sign * step)[1] for sign in (1, -1))
    return [(a - b) / (2 * step) for a, b in zip(after, before, strict=True)]


def hessian(
    risk: EmpiricalRisk, rows: Tensor | Sequence[int] | None = None, *, products: HessianProducts | None = None
) -> Tensor:
    """Return the Hessian of the mean loss, ``(parameters, parameters)``, or some of its rows, one product per row.

    Args:
        risk: the loss as a function of the weights.
        rows: indices of the rows; all if None.
        products: Hessian-vector products; created and checked here if None.

    >>> from atoll.losses import Standard
    >>> model = torch.nn.Linear(1, 2, bias=False).eval()
    >>> _ = model.weight.data.zero_()
    >>> hessian(EmpiricalRisk(model, Standard(), torch.ones(1, 1), torch.tensor([0]))).tolist()
    [[0.25, -0.25], [-0.25, 0.25]]
    >>> hessian(EmpiricalRisk(model, Standard(), torch.ones(1, 1), torch.tensor([0])), torch.tensor([1])).tolist()
    [[-0.25, 0.25]]
    """
    if risk.size > LIMIT:
        raise InputError(f"model: expected at most {LIMIT:,} parameters for a dense Hessian, got {risk.size:,}")
    rows = torch.arange(risk.size) if rows is None else torch.as_tensor(rows)
    if rows.dtype != torch.int64 or rows.dim() != 1 or ((rows < 0) | (rows >= risk.size)).any():
        raise InputError(f"rows: expected integers in [0, {risk.size - 1}], got {rows.tolist()}")
    products = products or HessianProducts(risk)
    with preserve_buffers(risk.model):
        return _rows(risk, rows, products)


def _rows(risk: EmpiricalRisk, rows: Tensor, products: HessianProducts) -> Tensor:
    total = torch.zeros(len(rows), risk.size, dtype=risk.parameters[0].dtype, device=risk.device)
    for index in shared(len(risk), risk.micro_batch):
        gradient = None if products.by_differences else flatten(risk.gradient_graph(index))
        for part_rows, sums in zip(torch.split(rows.to(risk.device), _ROWS), torch.split(total, _ROWS), strict=True):
            vectors = torch.nn.functional.one_hot(part_rows, risk.size).to(total.dtype)
            if gradient is None:
                sums += torch.stack([flatten(p) for p in products.sums(index, [risk.split(v) for v in vectors])])
                continue
            parts = torch.autograd.grad(
                gradient, risk.parameters, vectors, retain_graph=True, is_grads_batched=True, allow_unused=True
            )
            columns = torch.split(sums, [p.numel() for p in risk.parameters], 1)
            for column, part in zip(columns, parts, strict=True):
                if part is not None:  # None for a parameter that the loss does not depend on
                    column += part.reshape(len(part_rows), -1)
    return all_sum(total) / len(risk)
