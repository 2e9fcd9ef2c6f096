"""Randomized weights by Taylor expansion (Jin et al., "Randomized Adversarial Training via Taylor Expansion")."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.distributed import all_sum, world_size
from atoll.errors import InputError, check_range
from atoll.models.base import Classifier
from atoll.modules import evaluation_mode, move_parameters, weight_matrices
from atoll.rng import generator
from atoll.training.methods.base import METHODS, Method, Step
from atoll.training.methods.targets import divergence, rows_for, target_matrix

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


@METHODS.register()
class RAT(Method):
    r"""Makes adversarial inputs at :math:`\theta + u`, u Gaussian, and penalizes the Taylor terms in u.

    ``surrogate``, after the authors' code: the first and second term become soft targets built from the gradient of
    the cross-entropy with respect to the head, which needs no backward pass; the cross-entropy is weighted 1 - eta.
    ``exact``: :math:`\|(J - J') u\|^2 / \sigma^2` and :math:`\|u^T (H - H') u\|^2 / \sigma^4` of the logits by
    forward-mode differentiation, with batch norm in evaluation mode.

    Args:
        order: 1 for the first term, 2 for the first and second.
        eta: weight of the first term (half of it for the second); 0.3 for order 1 and 0.2 for order 2 if None.
        sigma: standard deviation of the noise on the weight matrices.
        terms: ``surrogate`` or ``exact``.
    """

    uses_clean = True

    def __init__(
        self,
        *,
        order: Literal[1, 2] = 2,
        eta: float | None = None,
        sigma: float = 0.01,
        terms: Literal["surrogate", "exact"] = "surrogate",
    ) -> None:
        self.order, self.sigma, self.kind = order, sigma, terms
        self.eta = eta if eta is not None else (0.3 if order == 1 else 0.2)
        check_range("[0, 1]", eta=eta)
        check_range("[0, inf)", sigma=sigma)
        if terms == "exact" and not sigma:
            raise InputError("sigma: the exact terms need noise, got 0")

    def setup(self, trainer: Trainer) -> None:
        model = trainer.model
        if self.kind == "surrogate" and not (isinstance(model, Classifier) and isinstance(model.head, nn.Linear)):
            raise InputError(f"RAT: expected a Classifier with a linear head, got {type(model).__name__}")

    @contextmanager
    def around_attack(self, trainer: Trainer, step: Step) -> Iterator[None]:
        with move_parameters(weight_matrices(trainer.model), self._noise(trainer, step)):
            yield

    def _noise(self, trainer: Trainer, step: Step) -> Iterator[Tensor]:
        """The draw of this step, one matrix at a time; drawn again where it is needed again, so nothing is kept."""
        draw = generator(trainer.seed, "rat", step.number, device=trainer.device)
        for weight in weight_matrices(trainer.model):
            yield torch.randn(weight.shape, generator=draw, device=weight.device, dtype=weight.dtype).mul_(self.sigma)

    def on_loss(self, trainer: Trainer, step: Step) -> None:
        if step.x_adv is None:
            raise InputError("RAT: expected a loss with an attack (AT, TRADES, ...), got one without")
        if self.kind == "exact":
            first, second = self._exact(trainer, step)
        else:
            first, second = self._surrogate(trainer, step)
            step.terms["ce"] = (1 - self.eta) * step.terms["ce"]
        step.terms["first"] = self.eta * first
        if second is not None:
            step.terms["second"] = 0.5 * self.eta * second

    def _surrogate(self, trainer: Trainer, step: Step) -> tuple[Tensor, Tensor | None]:
        g, g_adv, z, z_adv = step.out.g, step.out.g_adv, step.out.features, step.out.adv_features
        assert z is not None
        assert z_adv is not None
        clean, adversarial = head_row_sums(g, z, step.y), head_row_sums(g_adv, z_adv, step.y)

        def term(t_clean: Tensor, t_adv: Tensor) -> Tensor:
            for_adv, for_clean = rat_targets(t_clean - t_adv), rat_targets(t_adv - t_clean)
            return 0.5 * (divergence(rows_for(for_adv, step.y), g_adv) + divergence(rows_for(for_clean, step.y), g))

        second = term(clean.square(), adversarial.square()) if self.order == 2 else None
        return term(clean.abs(), adversarial.abs()), second

    def _exact(self, trainer: Trainer, step: Step) -> tuple[Tensor, Tensor | None]:
        assert step.x_adv is not None
        model = trainer.model
        noise = dict(zip(map(id, weight_matrices(model)), self._noise(trainer, step), strict=True))
        tangents = {n: noise.get(id(p), torch.zeros_like(p)) for n, p in model.named_parameters()}
        with evaluation_mode(model):
            first, second = taylor_terms(model, torch.cat([step.x, step.x_adv]), tangents, self.order)
        size = len(step.x)
        difference = (first[:size] - first[size:]).square().sum(1) / self.sigma**2
        if second is None:
            return difference, None
        return difference, (second[:size] - second[size:]).square().sum(1) / self.sigma**4


@torch.no_grad()
def head_row_sums(logits: Tensor, features: Tensor, y: Tensor) -> Tensor:
    """Row sums of the mean cross-entropy gradient with respect to the head's weight, over all processes.

    The gradient of example b is the outer product of (p - onehot(y)) and z, so row j sums to their product with sum z.
    """
    probability = logits.softmax(1)
    labels = F.one_hot(y, logits.shape[1]).to(probability.dtype) if y.dim() == 1 else y
    sums = ((probability - labels) * features.sum(1, keepdim=True)).mean(0)
    return all_sum(sums) / world_size()


def rat_targets(values: Tensor) -> Tensor:
    """One value per class to a matrix of targets: shifted to minimum 0, the same values shared out in every row."""
    return target_matrix((values - values.min()).expand(len(values), -1))


def taylor_terms(model: nn.Module, x: Tensor, tangents: dict[str, Tensor], order: int) -> tuple[Tensor, Tensor | None]:
    """J u and, for order 2, u^T H u of the logits with respect to the parameters, by forward mode; differentiable."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    buffers = dict(model.named_buffers())

    def logits(weights: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(model, (weights, buffers), (x,))
        return output

    def first(weights: dict[str, Tensor]) -> Tensor:
        derivative: Tensor = torch.func.jvp(logits, (weights,), (tangents,))[1]
        return derivative

    if order == 1:
        return first(parameters), None
    derivatives: tuple[Tensor, Tensor] = torch.func.jvp(first, (parameters,), (tangents,))  # type: ignore[assignment]
    return derivatives
