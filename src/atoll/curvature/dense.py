"""The whole Hessian of a small net."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.curvature.risk import EmpiricalRisk, shared
from atoll.distributed import all_sum
from atoll.errors import InputError

LIMIT = 20_000  # parameters: in float32 the matrix takes 1.6 GB then
_ROWS = 32  # at a time


def hessian(problem: EmpiricalRisk, rows: Tensor | None = None) -> Tensor:
    """All second derivatives of the mean loss, ``(parameters, parameters)``, or some rows: a product for each row.

    >>> from atoll.losses import Standard
    >>> model = torch.nn.Linear(1, 2, bias=False).eval()
    >>> _ = model.weight.data.zero_()
    >>> hessian(EmpiricalRisk(model, Standard(), torch.ones(1, 1), torch.tensor([0]))).tolist()
    [[0.25, -0.25], [-0.25, 0.25]]
    >>> hessian(EmpiricalRisk(model, Standard(), torch.ones(1, 1), torch.tensor([0])), torch.tensor([1])).tolist()
    [[-0.25, 0.25]]
    """
    if problem.size > LIMIT:
        raise InputError(f"model: a dense Hessian is for at most {LIMIT:,} parameters, this net has {problem.size:,}")
    rows = torch.arange(problem.size) if rows is None else rows
    total = torch.zeros(len(rows), problem.size, dtype=problem.parameters[0].dtype, device=problem.device)
    for index in shared(len(problem), problem.micro_batch):
        slope = torch.cat([part.reshape(-1) for part in problem.slope(index)])
        for chosen, sums in zip(torch.split(rows.to(problem.device), _ROWS), torch.split(total, _ROWS), strict=True):
            vectors = torch.nn.functional.one_hot(chosen, problem.size).to(slope.dtype)
            parts = torch.autograd.grad(
                slope, problem.parameters, vectors, retain_graph=True, is_grads_batched=True, materialize_grads=True
            )
            sums += torch.cat([part.reshape(len(chosen), -1) for part in parts], 1)
    return all_sum(total) / len(problem)


def blocks(problem: EmpiricalRisk, matrix: Tensor) -> dict[str, Tensor]:
    """The diagonal blocks of a dense Hessian, one for each parameter."""
    found, start = {}, 0
    for name, p in zip(problem.names, problem.parameters, strict=True):
        found[name] = matrix[start : start + p.numel(), start : start + p.numel()]
        start += p.numel()
    return found
