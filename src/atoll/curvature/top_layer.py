"""The trace of the Hessian with respect to a linear head, in closed form."""

from __future__ import annotations

import torch
from torch import nn

from atoll.curvature.problem import Problem, shared
from atoll.distributed import all_sum
from atoll.errors import InputError
from atoll.models.base import Classifier
from atoll.training.losses.base import Outputs
from atoll.training.methods.trh import top_trace


def top_layer(problem: Problem, *, bias: bool = False) -> float:
    """The exact trace with respect to the weight (and bias) of a linear head: a forward pass, no differentiation.

    >>> from atoll.curvature.trace import traces
    >>> from atoll.models import MLP
    >>> from atoll.training.losses import Standard
    >>> problem = Problem(MLP((2,), 2).eval(), Standard(), torch.rand(3, 2), torch.tensor([0, 1, 0]))
    >>> abs(top_layer(problem) - traces(problem, "exact")["head.weight"].value) < 1e-5
    True
    """
    model = problem.model
    if not (isinstance(model, Classifier) and isinstance(model.head, nn.Linear)):
        raise InputError(f"model: expected a Classifier with a linear head, got {type(model).__name__}")
    total = torch.zeros((), dtype=torch.float64, device=problem.device)
    for index in shared(len(problem), problem.micro_batch):
        x, x_adv, y = problem.inputs(index)
        with torch.no_grad():
            z, z_adv = (None if inputs is None else model.features(inputs) for inputs in (x, x_adv))
            g, g_adv = (None if features is None else model.head(features) for features in (z, z_adv))
            out = Outputs(g, z, g_adv, z_adv)
            total += top_trace(problem.loss.curvature(out, y), out, bias=bias).double().sum()
    return float(all_sum(total)) / len(problem)
