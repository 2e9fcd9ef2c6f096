"""Projected gradient descent (Madry et al., 2018) and the fast gradient sign method (Goodfellow et al., 2015)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from atoll.attacks.base import ATTACKS, Attack, check_labels
from atoll.errors import LARGEST_STEPS, InputError, check_count
from atoll.losses.objectives import OBJECTIVES, Objective, margin
from atoll.rng import PointRNG
from atoll.threat import ThreatModel, number

Start = Literal["uniform", "gaussian", "clean"]


PUBLISHED_STEPS = {"linf": 1 / 4, "l2": 15 / 128}  # step sizes in units of eps


def _step_size(step_size: float | str | None, threat: ThreatModel, steps: int) -> float:
    if step_size == "published" and threat.norm in PUBLISHED_STEPS:
        return PUBLISHED_STEPS[threat.norm] * threat.radius
    if step_size in (None, "published"):
        return 2.5 * threat.radius / steps
    return number(step_size, "step_size")


@ATTACKS.register()
class PGD(Attack):
    r"""Projected gradient descent: repeated steps in the steepest direction of the objective, projected onto the ball.

    .. math:: x' \leftarrow \Pi\big(x' + \alpha\, \mathrm{steepest}(\nabla_{x'} \ell(x'))\big)

    Costs one forward and one backward pass per step, plus one forward pass in total for the ``kl`` objective (the clean
    prediction) and, with several restarts, one forward pass per restart (to select the best).

    Args:
        threat: the threat model.
        objective: ``ce``, ``kl``, ``margin`` (CW) or ``dlr``.
        steps: number of gradient steps.
        step_size: in input units, a number or a fraction; ``2.5 eps / steps`` if None.  ``published`` is the step size
            of the papers' tables: eps / 4 for linf (2/255 at 8/255) and 15/128 eps for l2; for l1 the same as None.
        start: ``uniform`` in the ball, ``gaussian`` (clean + 0.001 N(0, I), as in TRADES) or ``clean``.  The default is
            gaussian for ``kl``, whose gradient vanishes at the clean point, and uniform otherwise.
        restarts: number of independent runs.  For each point, the first run that succeeds is returned, or the one with
            the highest objective if none does.
        targeted: treat ``y`` as the target class and minimize the objective.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> PGD(ThreatModel("linf", 0.2), steps=10)(model, torch.tensor([[0.6, 0.4]]), torch.tensor([0]))
    tensor([[0.4000, 0.6000]])
    """

    def __init__(
        self,
        threat: ThreatModel,
        objective: Objective = "ce",
        *,
        steps: int = 20,
        step_size: float | str | None = None,
        start: Start | None = None,
        restarts: int = 1,
        targeted: bool = False,
    ) -> None:
        super().__init__(threat)
        if objective not in OBJECTIVES:
            raise InputError(f"objective: expected one of {', '.join(OBJECTIVES)}, got {objective!r}")
        check_count(1, LARGEST_STEPS, steps=steps, restarts=restarts)
        if targeted and objective == "kl":
            raise InputError("targeted: not supported with the kl objective")
        if objective == "kl" and start == "clean":
            raise InputError("objective: kl has zero gradient at the clean point, where this attack starts")
        self.objective: Objective = objective
        self.steps = steps
        self.step_size = _step_size(step_size, threat, steps)
        self.start: Start = start or ("gaussian" if objective == "kl" else "uniform")
        self.restarts = restarts
        self.targeted = targeted

    def search(self, model: nn.Module, x: Tensor, y: Tensor, streams: PointRNG) -> Tensor:
        clean = None
        if self.objective == "kl":
            with torch.no_grad():
                clean = model(x)
        runs = (self._ascend(model, x, y, clean, streams) for _ in range(self.restarts))
        best = next(runs)
        if self.restarts == 1:
            return best
        best_score = self._score(model, best, y, clean)
        for x_adv in runs:
            score = self._score(model, x_adv, y, clean)
            better = score > best_score
            best[better], best_score[better] = x_adv[better], score[better]
        return best

    def _ascend(self, model: nn.Module, x: Tensor, y: Tensor, clean: Tensor | None, streams: PointRNG) -> Tensor:
        objective = OBJECTIVES[self.objective]
        step = -self.step_size if self.targeted else self.step_size
        x_adv = self._initial(x, streams)
        for iteration in range(self.steps):
            x_adv.requires_grad_()
            with torch.enable_grad():
                logits = model(x_adv)
                if iteration == 0:
                    check_labels(logits, y, self.known_classes)
                loss = objective(logits, y, clean).sum()
            (gradient,) = torch.autograd.grad(loss, x_adv)
            x_adv = self.threat.project(x_adv.detach().add_(self.threat.steepest(gradient), alpha=step), x)
        return x_adv

    def _initial(self, x: Tensor, streams: PointRNG) -> Tensor:
        if self.start == "uniform":
            return self.threat.random_start(x, streams)
        if self.start == "gaussian":
            return self.threat.project(x + 0.001 * streams.normal(*x.shape[1:], dtype=x.dtype), x)
        return x.clone()

    @torch.no_grad()
    def _score(self, model: nn.Module, x_adv: Tensor, y: Tensor, clean: Tensor | None) -> Tensor:
        """Return the objective, ranking every success above every failure."""
        logits = model(x_adv)
        sign = -1 if self.targeted else 1
        value = sign * OBJECTIVES[self.objective](logits, y, clean)
        success = sign * margin(logits, y if y.dim() == 1 else y.argmax(1)) > 0
        return torch.where(success, torch.inf, value)


@ATTACKS.register()
class FGSM(PGD):
    """Fast gradient sign method: one step of size eps from the clean point.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> FGSM(ThreatModel("linf", 0.1))(model, torch.tensor([[0.6, 0.4]]), torch.tensor([0]))
    tensor([[0.5000, 0.5000]])
    """

    def __init__(self, threat: ThreatModel, objective: Objective = "ce", *, targeted: bool = False) -> None:
        super().__init__(threat, objective, steps=1, step_size=threat.radius, start="clean", targeted=targeted)


# Names used in the papers' tables: PGD-20, PGD-10, CW-20 and so on.
ATTACKS.add_numbered("PGD", PGD, "steps", 20, step_size="published")
ATTACKS.add_numbered("CW", PGD, "steps", 20, objective="margin", step_size="published")
# Settings of the tables in the RAT paper, for eps 0.031.
ATTACKS.add_numbered("RAT-PGD", PGD, "steps", 20, step_size=0.003)
ATTACKS.add_numbered("RAT-CW", PGD, "steps", 20, objective="margin", step_size=0.003)
