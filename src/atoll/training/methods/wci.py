"""The Weight-Curvature Index during training, and a learning rate that depends on it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atoll.curvature.gap import robust_gap
from atoll.curvature.risk import EmpiricalRisk, check_deterministic
from atoll.curvature.wci import WCI, wci
from atoll.data.base import sample
from atoll.errors import InputError, check_count, check_range
from atoll.modules import evaluation_mode
from atoll.training.methods.base import METHODS, Method, Step

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.training.trainer import Trainer


@METHODS.register()
@dataclass(eq=False, kw_only=True)
class MeasureWCI(Method):
    """Records the Weight-Curvature Index for the loss and attack of the run, without changing the training.

    After an epoch, the metrics contain ``wci``, ``wci_standard_error``, ``wci_negative`` (number of clipped traces),
    and both factors of its bound, ``wci_weight_norm`` and ``wci_root_trace``.  Points, random starts and random vectors
    are the same every time, so that changes are due to the model.  For losses without an attack, it is the index of the
    plain loss.

    Args:
        start: share of the run before the first measurement.
        interval: number of epochs between measurements.
        points: number of random training points, without augmentation.
        probes: number of random vectors for each group of points.
        gap: also measure the robust generalization gap (``gap_error``, ``gap_loss`` and their parts) on the same number
            of training and test points, with the attack of the run.  For studies only; it does not affect the run.
    """

    start: float = 0.0
    interval: int = 1
    points: int = 512
    probes: int = 2
    gap: bool = False
    nonlinear: Mapping[str, str] | None = field(default=None, init=False)  # the same for all weights of a model

    def __post_init__(self) -> None:
        check_range("[0, 1)", start=self.start)
        check_count(1, interval=self.interval, points=self.points)
        check_count(2, probes=self.probes)

    def setup(self, trainer: Trainer) -> None:
        """Raise an InputError now if the measurement would fail after the first epoch."""
        if self.gap and trainer.attack is None:
            raise InputError(f"gap: expected a loss with an attack, got {type(trainer.loss).__name__}")
        like = next(trainer.model.parameters())
        with evaluation_mode(trainer.model):
            check_deterministic(trainer.model, sample(trainer.data.train, 16, trainer.seed, "wci")[0].to(like))

    def due(self, trainer: Trainer) -> bool:
        """Whether to measure at the end of this epoch."""
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
        """Measure the index of the current model."""
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
        """Return random points, the same every time."""
        return sample(trainer.data.split(split), self.points, trainer.seed, "wci", split)


@METHODS.register()
@dataclass(eq=False, kw_only=True)
class WCISchedule(MeasureWCI):
    r"""Reduces the scheduled learning rate in proportion if the Weight-Curvature Index exceeds a threshold.

    .. math:: \eta = \eta_\mathrm{schedule}\, \min\Big(1, \frac{\tau}{\overline{\mathrm{WCI}}}\Big), \qquad
              \overline{\mathrm{WCI}} \leftarrow s\,\overline{\mathrm{WCI}} + (1 - s)\,\mathrm{WCI}.

    Follows "Understanding Adversarially Robust Generalization via Weight-Curvature Index", section 4.  The algorithm is
    missing from the paper; the text only says that above a threshold, the rate is inversely proportional to the
    curvature.  The paper uses it with ``OneDrop``: 0.1, and 0.01 in the second half of the run, where the rule applies.
    This is a method rather than a ``Schedule``, because schedules are functions of time only.

    Args:
        threshold: :math:`\tau`; below it, the learning rate follows the schedule.  The paper uses 100 for its PreAct
            ResNet-18.  The index is a sum over layers, so networks of other sizes need another threshold.
        smoothing: s, the decay rate of the average, which starts at the first measurement.
        start: share of the run before the first measurement.
        interval: number of epochs between measurements.

    For ``points``, ``probes`` and ``gap`` see ``MeasureWCI``.

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
        check_range("(0, inf)", threshold=self.threshold)
        check_range("[0, 1)", smoothing=self.smoothing)

    def after_epoch(self, trainer: Trainer, metrics: MutableMapping[str, float]) -> None:
        super().after_epoch(trainer, metrics)
        if self.due(trainer):
            self.follow(metrics["wci"])

    def follow(self, index: float) -> float:
        """Update the average with a new measurement and return the new factor."""
        before = index if self.average is None else self.average
        self.average = self.smoothing * before + (1 - self.smoothing) * index
        return self.factor

    @property
    def factor(self) -> float:
        """Factor on the scheduled learning rate."""
        return 1.0 if self.average is None or self.average <= self.threshold else self.threshold / self.average

    def before_step(self, trainer: Trainer, step: Step) -> None:
        for group in trainer.optimizer.param_groups:  # the trainer sets the rate at the beginning of every step
            group["lr"] *= self.factor

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.average = state["average"]
