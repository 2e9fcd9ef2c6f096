"""Trace-of-Hessian regularization (Wang et al., "Improving Robust Generalization by Direct PAC-Bayesian Bound
Minimization")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from atoll.errors import InputError, check_range
from atoll.losses.base import LogitCurvature, Loss, Outputs
from atoll.models.base import Classifier
from atoll.training.methods.base import METHODS, Method, Step

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer

Ramp = Literal["constant", "linear", "multistep"]


def ramp(kind: Ramp, progress: float) -> float:
    """Share of lambda at ``progress`` in [0, 1] of the run.

    >>> [ramp("multistep", p) for p in (0.0, 0.1, 0.5)], ramp("linear", 0.25)
    ([0.01, 0.1, 1.0], 0.25)
    """
    if kind == "linear":
        return progress
    if kind == "multistep":
        return 0.01 if progress < 0.1 else 0.1 if progress < 0.5 else 1.0
    return 1.0


@METHODS.register()
@dataclass(eq=False, kw_only=True)
class TrH(Method):
    r"""Adds :math:`\lambda\,\mathrm{Tr}(H)` of the loss to it, and :math:`\gamma \|\theta\|^2`.

    ``top``: the trace with respect to the weight of a linear head, from the loss's curvature in logit space,

    .. math:: \sum_k \|z\|^2 \frac{\partial^2 l}{\partial g_k^2} + 2 (z \cdot z') \frac{\partial^2 l}{\partial g_k
              \partial g'_k} + \|z'\|^2 \frac{\partial^2 l}{\partial {g'_k}^2},

    differentiated through z, z' and the logits, so it shapes the whole net, at no extra pass.  With ``bias`` each of
    the three factors grows by 1.  ``full``: the trace over all parameters, for small nets without batch norm; exact
    where the net is piecewise linear in each weight (ReLU).

    Args:
        lambda_: weight of the trace.
        schedule: of lambda over the run.
        layers: ``top`` or ``full``.
        bias: count the head's bias among the parameters.
        gamma: weight of the squared norm of all parameters.
    """

    lambda_: float = 1e-3
    schedule: Ramp = "constant"
    layers: Literal["top", "full"] = "top"
    bias: bool = False
    gamma: float = 0.0

    def __post_init__(self) -> None:
        check_range("[0, inf)", lambda_=self.lambda_, gamma=self.gamma)

    def setup(self, trainer: Trainer) -> None:
        model = trainer.model
        if self.layers == "top" and not (isinstance(model, Classifier) and isinstance(model.head, nn.Linear)):
            raise InputError(f"TrH: expected a Classifier with a linear head, got {type(model).__name__}")
        if self.layers == "full" and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
            raise InputError(
                "TrH: with layers=full, examples must not depend on each other, but the model has batch norm"
            )

    def on_loss(self, trainer: Trainer, step: Step) -> None:
        weight = self.lambda_ * ramp(self.schedule, min(1.0, step.epoch / trainer.settings.epochs))
        if not weight:
            return
        if self.layers == "top":
            trace = top_trace(trainer.loss.curvature(step.out, step.y), step.out, bias=self.bias)
        else:
            trace = full_trace(trainer.model, trainer.loss, step.x, step.x_adv, step.y)
        step.terms["trh"] = weight * trace

    @torch.no_grad()
    def before_step(self, trainer: Trainer, step: Step) -> None:
        if self.gamma:
            for parameter in trainer.model.parameters():
                if parameter.grad is not None:
                    scale = trainer.scaler.get_scale()  # gradients are still scaled under mixed precision
                    parameter.grad.add_(parameter, alpha=2 * self.gamma * scale)


def top_trace(curvature: LogitCurvature, out: Outputs, *, bias: bool = False) -> Tensor:
    """Trace of each example's Hessian with respect to the weight (and bias) of the linear head."""
    z, z_adv, one = out.features, out.adv_features, float(bias)
    total = torch.zeros(())
    if curvature.clean is not None and z is not None:
        total = total + curvature.clean.sum(1) * (z.square().sum(1) + one)
    if curvature.cross is not None and z is not None and z_adv is not None:
        total = total + 2 * curvature.cross.sum(1) * ((z * z_adv).sum(1) + one)
    if curvature.adversarial is not None and z_adv is not None:
        total = total + curvature.adversarial.sum(1) * (z_adv.square().sum(1) + one)
    return total


def full_trace(model: nn.Module, loss: Loss, x: Tensor, x_adv: Tensor | None, y: Tensor) -> Tensor:
    r"""Trace of each example's Hessian with respect to all parameters of a net that is linear in each of them.

    A ReLU net's logits are piecewise linear in any single weight, so :math:`\partial^2 l / \partial w^2 =
    (\partial g / \partial w)^T \, \nabla^2_g l \; (\partial g / \partial w)` and the trace needs per-example Jacobians
    of the logits only: memory for batch x 2 classes x parameters.
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    buffers = dict(model.named_buffers())

    def logits(weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
        batch: Tensor = torch.func.functional_call(model, (weights, buffers), (inputs[None],))
        return batch[0]

    def value(both: tuple[Tensor, ...], label: Tensor) -> Tensor:
        clean = both[0][None] if loss.uses_clean else None
        out = Outputs(logits=clean, adv_logits=both[-1][None] if x_adv is not None else None)
        return torch.stack(list(loss.values(out, label[None]).values())).sum()

    def trace(points: tuple[Tensor, ...], label: Tensor) -> Tensor:
        g = tuple(logits(parameters, point) for point in points)
        hessian = torch.func.hessian(value)(g, label)
        jacobians = [torch.func.jacrev(logits)(parameters, point) for point in points]
        total = torch.zeros((), dtype=g[0].dtype, device=g[0].device)
        for i, left in enumerate(jacobians):
            for j, right in enumerate(jacobians):
                products = sum(
                    (torch.einsum("kp,lp->kl", left[n].flatten(1), right[n].flatten(1)) for n in parameters),
                    torch.zeros_like(hessian[i][j]),
                )
                total = total + (hessian[i][j] * products).sum()
        return total

    points = tuple(p for p in (x if loss.uses_clean else None, x_adv) if p is not None)
    traces: Tensor = torch.func.vmap(trace)(points, y)
    return traces
