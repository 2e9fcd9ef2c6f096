"""The Weight-Curvature Index during training, and the learning rate that follows it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atoll.curvature.gap import robust_gap
from atoll.curvature.risk import EmpiricalRisk, check_deterministic
from atoll.curvature.wci import WCI, wci
from atoll.data.base import sample
from atoll.errors import InputError, check_range
from atoll.modules import evaluation_mode
from atoll.training.methods.base import METHODS, Method, Step

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.training.trainer import Trainer


@METHODS.register()
@dataclass(eq=False, kw_only=True)
class MeasureWCI(Method):
    """Records the Weight-Curvature Index of the run's own loss and attack; training itself is not changed.

    At the end of an epoch the metrics get ``wci``, ``wci_standard_error``, ``wci_negative`` (traces that were clipped),
    and both factors of its bound, ``wci_weight_norm`` and ``wci_root_trace``.  Points, random starts and random vectors
    are the same every time, so that what changes is the model.  For losses without an attack it is the index of the
    plain loss.

    Args:
        start: share of the run before the first measurement.
        interval: epochs between measurements.
        points: random training points, without augmentation.
        probes: random vectors for each group of points.
        gap: measure the robust generalization gap as well (``gap_error``, ``gap_loss`` and their parts), on as many
            training and test points, with the run's attack.  For studies only; nothing depends on it.
    """

    start: float = 0.0
    interval: int = 1
    points: int = 512
    probes: int = 2
    gap: bool = False
    nonlinear: Mapping[str, str] | None = field(default=None, init=False)  # the same for all weights of a model

    def __post_init__(self) -> None:
        check_range("[0, 1)", start=self.start)
        check_range("[1, inf)", interval=self.interval, points=self.points)
        check_range("[2, inf)", probes=self.probes)

    def setup(self, trainer: Trainer) -> None:
        """Refuse at once what could not be measured after the first epoch."""
        if self.gap and trainer.attack is None:
            raise InputError(f"gap: expected a loss with an attack, got {type(trainer.loss).__name__}")
        like = next(trainer.model.parameters())
        with evaluation_mode(trainer.model):
            check_deterministic(trainer.model, sample(trainer.data.train, 16, trainer.seed, "wci")[0].to(like))

    def due(self, trainer: Trainer) -> bool:
        """Whether there is a measurement at the end of this epoch."""
        return trainer.epoch >= self.start * trainer.settings.epochs and trainer.epoch % self.interval == 0

    def after_epoch(self, trainer: Trainer, metrics: MutableMapping[str, float]) -> None:
        if not self.due(trainer):
            return
        result = self.measure(trainer)
        metrics.update(wci=result.index.value, wci_standard_error=result.index.standard_error)
        metrics.update({f"wci_{name}": getattr(result, name) for name in ("negative", "weight_norm", "root_trace")})
        if self.gap:
            assert trainer.attack is not None
            train, test = (self.sample(trainer, split) for split in ("train", "test"))
            seed = (trainer.seed, "wci")
            both = robust_gap(trainer.model, train, test, trainer.attack, seed=seed).to_json()
            metrics.update({f"gap_{name}": part["value"] for name, part in both.items()})

    def measure(self, trainer: Trainer) -> WCI:
        """The index of the model as it is."""
        (x, y), seed = self.sample(trainer, "train"), (trainer.seed, "wci")
        with evaluation_mode(trainer.model):
            known: dict[str, Any] = {"nonlinear": self.nonlinear}
            if trainer.attack is None:
                risk = EmpiricalRisk(trainer.model, trainer.loss, x, y, **known)
            else:
                risk = EmpiricalRisk.attacked(trainer.model, trainer.loss, x, y, trainer.attack, seed=seed, **known)
            self.nonlinear = risk.nonlinear
            return wci(risk, max_probes=self.probes, seed=seed)

    def sample(self, trainer: Trainer, split: str) -> tuple[Tensor, Tensor]:
        """The same points every time."""
        return sample(trainer.data.split(split), self.points, trainer.seed, "wci", split)


@METHODS.register()
@dataclass(eq=False, kw_only=True)
class WCISchedule(MeasureWCI):
    r"""The schedule's learning rate, lowered in proportion where the Weight-Curvature Index is above a threshold.

    .. math:: \eta = \eta_\mathrm{schedule}\, \min\Big(1, \frac{\tau}{\overline{\mathrm{WCI}}}\Big), \qquad
              \overline{\mathrm{WCI}} \leftarrow s\,\overline{\mathrm{WCI}} + (1 - s)\,\mathrm{WCI}.

    After "Understanding Adversarially Robust Generalization via Weight-Curvature Index", section 4, whose algorithm is
    lost; its prose fixes this much: a threshold, above which the rate falls inversely with curvature.  The schedule
    underneath is ``OneDrop`` there: 0.1, and 0.01 after half of the run, when the rule sets in.  A method and not a
    ``Schedule``, because those are functions of time alone.

    Args:
        threshold: :math:`\tau`, up to which the rate is the schedule's.  The paper takes 100 for its PreAct ResNet-18;
            the index adds up layers, so nets of other sizes need another one.
        smoothing: s, how much of the average stays; the first measurement starts it.
        start: share of the run before the first measurement.
        interval: epochs between measurements.

    ``points``, ``probes`` and ``gap`` are those of ``MeasureWCI``.

    >>> rule = WCISchedule(threshold=100.0, smoothing=0.5)
    >>> [rule.follow(wci) for wci in (80.0, 320.0, 200.0)]  # averages 80, 200, 200
    [1.0, 0.5, 0.5]
    """

    threshold: float = 100.0
    smoothing: float = 0.5
    start: float = 0.5
    average: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("(0, inf]", threshold=self.threshold)
        check_range("[0, 1)", smoothing=self.smoothing)

    def after_epoch(self, trainer: Trainer, metrics: MutableMapping[str, float]) -> None:
        super().after_epoch(trainer, metrics)
        if self.due(trainer):
            self.follow(metrics["wci"])

    def follow(self, index: float) -> float:
        """Take a new measurement into the average; returns the factor from now on."""
        before = index if self.average is None else self.average
        self.average = self.smoothing * before + (1 - self.smoothing) * index
        return self.factor

    @property
    def factor(self) -> float:
        """On the schedule's learning rate."""
        return 1.0 if self.average is None or self.average <= self.threshold else self.threshold / self.average

    def before_step(self, trainer: Trainer, step: Step) -> None:
        for group in trainer.optimizer.param_groups:  # set by the trainer at the beginning of every step
            group["lr"] *= self.factor

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.average = state["average"]
