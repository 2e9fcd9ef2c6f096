"""Randomized adversarial training (Jin et al., "Randomized Adversarial Training via Taylor Expansion")."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.curvature.check import Case, Deviation, first_line
from atoll.data.base import to_float
from atoll.derivatives import call_with, elementary_operations
from atoll.distributed import all_sum, world_size
from atoll.errors import InputError, check_range
from atoll.models.base import Classifier, is_linear
from atoll.modules import evaluation_mode, move_parameters, preserve_buffers, weight_matrices
from atoll.rng import generator
from atoll.training.methods.awp import AWP
from atoll.training.methods.base import METHODS, Method, Step
from atoll.training.methods.targets import divergence, rows_for, target_matrix

if TYPE_CHECKING:
    from atoll.training.trainer import Trainer


@METHODS.register()
class RAT(Method):
    r"""RAT: attacks the model with Gaussian noise u on the weights and penalizes the Taylor terms in u.

    ``surrogate``, as in the authors' code: the first and second terms become soft targets from the gradient of the
    cross-entropy with respect to the head, which needs no backward pass; the cross-entropy has weight 1 - eta.
    ``exact``: :math:`\|(J - J') u\|^2 / \sigma^2` and :math:`\|u^T (H - H') u\|^2 / \sigma^4` of the logits by
    forward-mode differentiation, with batch norm in evaluation mode.  Models for which PyTorch computes wrong terms are
    rejected.

    The paper and the authors' code differ (``docs/errata.md``).  The default is ``code``, which produced the published
    numbers:

    - ``code``: u has standard deviation 1e-4 and affects only convolutions.  With AWP there is no noise, and the
      targets come from the weights that AWP perturbs.  The second term uses the clean target for both predictions.
    - ``paper``: u has standard deviation 0.01 (called a variance in the paper) and affects all weight matrices, also
      with AWP.  The second term has two targets, like the first.

    Args:
        order: 1 for the first term, 2 for the first and second.
        eta: weight of the first term; 0.3 for order 1 and 0.2 for order 2 if None.
        second: weight of the second term in units of eta; the code uses 0.4 for PreAct ResNet-18 with AWP.
        sigma: standard deviation of the noise; that of the reading if None.
        share: probability of the true class in its targets; 2 / classes if None.
        terms: ``surrogate`` or ``exact``.
        reading: ``code`` or ``paper``.

    >>> RAT().sigma, RAT(reading="paper").sigma
    (0.0001, 0.01)
    """

    uses_clean = True

    def __init__(
        self,
        *,
        order: Literal[1, 2] = 2,
        eta: float | None = None,
        second: float = 0.5,
        sigma: float | None = None,
        share: float | None = None,
        terms: Literal["surrogate", "exact"] = "surrogate",
        reading: Literal["code", "paper"] = "code",
    ) -> None:
        self.order, self.second, self.share, self.kind, self.reading = order, second, share, terms, reading
        self.uses_batch = terms == "surrogate"
        self.eta = eta if eta is not None else (0.3 if order == 1 else 0.2)
        self.sigma = sigma if sigma is not None else (1e-4 if reading == "code" else 0.01)
        check_range("[0, 1]", eta=eta, share=share)
        check_range("[0, inf)", second=second, sigma=sigma)
        if terms == "exact" and not self.sigma:
            raise InputError("sigma: expected a number > 0 for exact terms, got 0")

    def setup(self, trainer: Trainer) -> None:
        model = trainer.model
        if self.kind == "surrogate" and not (isinstance(model, Classifier) and is_linear(model.head)):
            raise InputError(f"RAT: expected a Classifier with a linear head, got {type(model).__name__}")
        if self.kind == "exact":
            if not self.noisy_weights(model):
                raise InputError("RAT: exact terms with reading=code require convolutions, but the model has none")
            x = to_float(trainer.data.train.fetch(torch.arange(min(4, len(trainer.data.train)))))
            check_taylor_terms(model, x.to(trainer.device), self.order)

    def noisy_weights(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the weights to which noise is added."""
        if self.reading == "paper":
            return weight_matrices(model)
        convolutions = [m for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)]
        kernels = {id(p) for module in convolutions for p in module.parameters()}
        return [p for p in weight_matrices(model) if id(p) in kernels]

    @contextmanager
    def around_attack(self, trainer: Trainer, step: Step) -> Iterator[None]:
        if self.reading == "code" and any(isinstance(method, AWP) for method in trainer.methods):
            yield
            return
        with move_parameters(self.noisy_weights(trainer.model), self._noise(trainer, step)):
            yield

    def _noise(self, trainer: Trainer, step: Step) -> Iterator[Tensor]:
        """Yield the noise of this step, one matrix at a time; it is drawn again when needed, to save memory."""
        draw = generator(trainer.seed, "rat", step.number, device=trainer.device)
        for weight in self.noisy_weights(trainer.model):
            yield torch.randn(weight.shape, generator=draw, device=weight.device, dtype=weight.dtype).mul_(self.sigma)

    def on_loss(self, trainer: Trainer, step: Step) -> None:
        if step.x_adv is None:
            raise InputError("RAT: expected a loss with an attack (AT, TRADES, ...), got one without")
        if self.kind == "exact":
            first, second = self._exact(trainer, step)
        else:
            first, second = self._surrogate(step)
            step.terms["ce"] = (1 - self.eta) * step.terms["ce"]
        step.terms["first"] = self.eta * first
        if second is not None:
            step.terms["second"] = self.second * self.eta * second

    def _surrogate(self, step: Step) -> tuple[Tensor, Tensor | None]:
        g, g_adv, batch = step.out.g, step.out.g_adv, step.whole or step
        z, z_adv = batch.out.features, batch.out.adv_features
        assert z is not None
        assert z_adv is not None
        clean, adversarial = head_row_sums(batch.out.g, z, batch.y), head_row_sums(batch.out.g_adv, z_adv, batch.y)
        share = 2 / g.shape[1] if self.share is None else self.share

        def term(t_clean: Tensor, t_adv: Tensor, *, same: bool = False) -> Tensor:
            for_clean = rows_for(rat_targets(t_adv - t_clean, share), step.y)
            for_adv = for_clean if same else rows_for(rat_targets(t_clean - t_adv, share), step.y)
            return 0.5 * (divergence(for_adv, g_adv) + divergence(for_clean, g))

        first = term(clean.abs(), adversarial.abs())
        if self.order == 1:
            return first, None
        return first, term(clean.square(), adversarial.square(), same=self.reading == "code")

    def _exact(self, trainer: Trainer, step: Step) -> tuple[Tensor, Tensor | None]:
        assert step.x_adv is not None
        model = trainer.model
        noise = dict(zip(map(id, self.noisy_weights(model)), self._noise(trainer, step), strict=True))
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
    """Return row sums of the mean gradient of cross-entropy with respect to the head's weight, over all processes.

    The gradient of an example is the outer product of (p - onehot(y)) and z, so the sum of row j is
    (p - onehot(y))_j times the sum of z.
    """
    probability = logits.softmax(1)
    labels = F.one_hot(y, logits.shape[1]).to(probability.dtype) if y.dim() == 1 else y
    sums = ((probability - labels) * features.sum(1, keepdim=True)).mean(0)
    return all_sum(sums) / world_size()


def rat_targets(values: Tensor, share: float) -> Tensor:
    """Return a matrix of targets from one value per class; the values are shifted to minimum 0."""
    return target_matrix((values - values.min()).expand(len(values), -1), share)


def taylor_terms(model: nn.Module, x: Tensor, tangents: dict[str, Tensor], order: int) -> tuple[Tensor, Tensor | None]:
    """Return J u and, for order 2, u^T H u of the logits with respect to the parameters; both are differentiable.

    Uses forward-mode differentiation.

    >>> square = nn.Sequential(layer := nn.Linear(1, 1, bias=False), layer)  # w^2 x
    >>> first, second = taylor_terms(square, torch.ones(1, 1), {"0.weight": torch.ones(1, 1)}, 2)
    >>> torch.equal(first, 2 * layer.weight), second
    (True, tensor([[2.]], grad_fn=<AddBackward0>))
    """
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    return _directional(lambda weights: call_with(model, weights, x), parameters, tangents, order)


def _directional(
    logits: Callable[[dict[str, Tensor]], Tensor], weights: dict[str, Tensor], tangents: dict[str, Tensor], order: int
) -> tuple[Tensor, Tensor | None]:
    def first(weights: dict[str, Tensor]) -> Tensor:
        derivative: Tensor = torch.func.jvp(logits, (weights,), (tangents,))[1]
        return derivative

    with elementary_operations():
        if order == 1:
            return first(weights), None
        derivatives: tuple[Tensor, Tensor] = torch.func.jvp(first, (weights,), (tangents,))  # type: ignore[assignment]
        return derivatives


def check_taylor_terms(model: nn.Module, x: Tensor, order: int) -> None:
    """Raise an InputError if the Taylor terms of a model or their gradients differ from finite differences (float64).

    Several operations of PyTorch have wrong derivatives of higher order in forward mode, or none.

    >>> check_taylor_terms(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), torch.rand(4, 2), 2)
    """
    tensors = {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    double = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    weights = {n: double[n].requires_grad_() for n, _ in model.named_parameters()}
    draw = generator("taylor terms", device=x.device)
    u, v = ({n: _random_direction(w, draw) for n, w in weights.items()} for _ in range(2))

    def logits(at: dict[str, Tensor]) -> Tensor:
        return call_with(model, {**double, **at}, x.double())

    def terms(at: dict[str, Tensor], order: int = order) -> Tensor:
        first, second = _directional(logits, at, u, order)
        return torch.cat([first, second]) if second is not None else first

    def moved(direction: dict[str, Tensor], step: float) -> dict[str, Tensor]:
        return {n: (w + step * direction[n]).detach() for n, w in weights.items()}

    def difference(value: Callable[[dict[str, Tensor]], Tensor], direction: dict[str, Tensor], step: float) -> Tensor:
        return ((value(moved(direction, step)) - value(moved(direction, -step))) / (2 * step)).detach()

    with evaluation_mode(model), preserve_buffers(model):
        try:
            claimed = terms(weights)
            gradients = torch.autograd.grad(claimed.square().sum(), list(weights.values()), materialize_grads=True)
            slope = torch.stack([(g * d).sum() for g, d in zip(gradients, v.values(), strict=True)]).sum()
            values = {
                "the first term": (claimed[: len(x)], partial(difference, logits, u)),
                "the second term": (claimed[len(x) :], partial(difference, partial(terms, order=1), u)),
                "the gradient": (slope, partial(difference, lambda at: terms(at).square().sum(), v)),
            }
            cases = [
                Case(name, partial(_taylor_deviation, value.detach(), truth))
                for name, (value, truth) in values.items()
                if value.numel()
            ]
            for case in cases:
                if not case.judge()[0]:
                    raise InputError(
                        f"RAT: exact terms cannot be used for this model: {case.name} differs from finite differences"
                    )
        except (RuntimeError, NotImplementedError) as error:
            raise InputError(f"RAT: exact terms cannot be used for this model: {first_line(error)}") from error


def _taylor_deviation(claimed: Tensor, difference: Callable[[float], Tensor], step: float) -> Deviation:
    truth = difference(step)
    size = float(torch.maximum(claimed.norm(), truth.norm()))
    return Deviation((claimed - truth).flatten(), size, 1e-14 * (1 + size) / step)


def _random_direction(weight: Tensor, draw: torch.Generator) -> Tensor:
    """Return a random direction with the scale of the weight."""
    noise = torch.randn(weight.shape, generator=draw, device=weight.device, dtype=weight.dtype)
    return noise * weight.detach().square().mean().sqrt().clamp_min(1e-3)
