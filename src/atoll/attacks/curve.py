"""Accuracy against eps, from attacks that find the smallest perturbation of every point."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import Tensor, nn

from atoll.attacks.diagnostics import EvaluationWarning
from atoll.attacks.evaluate import MISCLASSIFIED, Evaluation, evaluate
from atoll.attacks.suites import minimal
from atoll.data.base import Split
from atoll.display import Displayed, TextTable
from atoll.distributed import is_main
from atoll.files import write_atomic
from atoll.measure import OnProgress
from atoll.stats import Accuracy, percent_interval
from atoll.threat import AttackNorm, ThreatModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ANY_DISTANCE = 1e30  # the radius of a threat model cannot be infinite
GRID = 100  # quantiles of the distances at which a curve is stored
ROWS = 10  # quantiles that a table shows


@dataclass(frozen=True)
class MinimalSummary:
    """What one attack contributes to a curve.

    Args:
        name: name of the attack.
        median: median distance of its adversarial inputs over the correctly classified points; None if it breaks less
            than half of them.
        closest: number of points for which no other attack finds a closer adversarial input.
        forward: forward passes, in rows.
        backward: backward passes, in rows.
        seconds: duration.
    """

    name: str
    median: float | None
    closest: int
    forward: int
    backward: int
    seconds: float


@dataclass(frozen=True)
class Curve(Displayed):
    """Accuracy against eps: the share of points whose closest known adversarial input is farther away than eps.

    This is an upper bound at every eps, because there may be closer adversarial inputs.  Points that no attack breaks
    count as robust at every eps.

    Args:
        norm: norm of the distances.
        eps: quantiles of the distances, and the eps of other attacks on these points.
        accuracy: accuracy at each eps.
        median: median distance of the correctly classified points, an upper bound; None if less than half are broken.
        attacks: the attacks that measured the distances.

    >>> distance = torch.tensor([0.0, 0.1, 0.3, math.inf], dtype=torch.float64)
    >>> curve = Curve.from_distances(distance, torch.arange(4) > 0, "linf")
    >>> curve.eps, curve.median
    ((0.0, 0.1, 0.3), 0.3)
    >>> curve.at(0.2)
    50.00 % [15.0, 85.0]
    """

    norm: AttackNorm
    eps: tuple[float, ...]
    accuracy: tuple[Accuracy, ...]
    median: float | None
    attacks: tuple[MinimalSummary, ...] = ()

    @staticmethod
    def from_distances(
        distance: Tensor,
        correct: Tensor,
        norm: AttackNorm,
        attacks: tuple[MinimalSummary, ...] = (),
        marks: tuple[float, ...] = (),
    ) -> Curve:
        """Return the curve of points with these distances.

        Args:
            distance: distance of each point to its closest adversarial input; infinity if there is none.
            correct: which points are classified correctly without an attack.
            norm: norm of the distances.
            attacks: the attacks that measured the distances.
            marks: further eps to include.
        """
        finite = distance[correct & distance.isfinite()].double().sort().values
        place = torch.linspace(0, len(finite) - 1, GRID + 1).round().long()
        grid = sorted({0.0, *marks, *(finite[place].tolist() if len(finite) else ())})
        own = distance.where(correct, 0.0).double()
        accuracy = tuple(Accuracy(int((own > eps).sum()), len(own)) for eps in grid)
        return Curve(norm, tuple(grid), accuracy, _median(distance[correct]), attacks)

    def at(self, eps: float) -> Accuracy:
        """Accuracy at the largest stored eps that is not above this one: an upper bound of that at ``eps``."""
        return self.accuracy[max(i for i, stored in enumerate(self.eps) if stored <= eps)]

    def table(self) -> TextTable:
        """The curve at a few eps."""
        count = len(self.eps)
        places = sorted({round(i * (count - 1) / ROWS) for i in range(ROWS + 1)})
        rows = [[f"{self.eps[i]:.4g}", *percent_interval(self.accuracy[i])] for i in places]
        names = ", ".join(attack.name for attack in self.attacks)
        median = "none (less than half of the points are broken)" if self.median is None else f"{self.median:.4g}"
        notes = [f"median distance of correctly classified points ({self.norm}): at most {median}"]
        return TextTable(f"accuracy is at most ({names})", [f"eps ({self.norm})", "accuracy %", "95 %"], rows, notes)

    def plot(self) -> Figure:
        """Plot accuracy against eps with its 95 % interval."""
        from matplotlib.figure import Figure  # slow to import

        figure = Figure(figsize=(5, 3.5), layout="constrained")
        axis = figure.subplots()
        low, high = zip(*(accuracy.interval for accuracy in self.accuracy), strict=True)
        axis.step(self.eps, [100 * accuracy.value for accuracy in self.accuracy], where="post")
        axis.fill_between(self.eps, [100 * v for v in low], [100 * v for v in high], step="post", alpha=0.2)
        axis.set_xlabel(f"eps ({self.norm})")
        axis.set_ylabel("accuracy in % (at most)")
        axis.set_ylim(0, 100)
        return figure


def measure_curve(
    model: nn.Module,
    split: Split,
    threat: ThreatModel,
    evaluation: Evaluation,
    *,
    seed: object = 0,
    device: torch.device | str = "cpu",
    folder: Path | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[Curve, tuple[EvaluationWarning, ...]]:
    """Measure accuracy against eps, and return it with the warnings of the evaluation behind it.

    Each point has the distance of the closest adversarial input of all ``minimal`` attacks and of the evaluation at the
    eps of the threat model, so that the curve is never above the robust accuracy of that evaluation.

    Args:
        model: maps inputs to logits.
        split: the points.
        threat: norm and bounds of the perturbations, and the eps of the evaluation.
        evaluation: result of other attacks on the same points; its batch size is used again.
        seed: seed of the random streams.
        device: where to compute.
        folder: where to store the distances (``distances.safetensors``) and, in ``curve``, the progress.
        on_progress: called with the name of the attack, the number of finished points, and the total.
    """
    attacks = minimal(dataclasses.replace(threat, eps=ANY_DISTANCE))
    result = evaluate(
        model,
        split,
        attacks,
        batch_size=evaluation.batch_size,
        seed=seed,
        device=device,
        folder=None if folder is None else folder / "curve",
        on_progress=on_progress,
    )
    correct = (result.broken_by != MISCLASSIFIED) & (evaluation.broken_by != MISCLASSIFIED)
    measured, known = result.distance.double(), evaluation.distance.double()
    known = known.clamp_max(threat.radius).where(known.isfinite(), math.inf)  # rounding may place a point outside
    distance = torch.cat([measured, known], dim=1).amin(1).where(correct, 0.0)
    summaries = tuple(
        MinimalSummary(
            attack.name,
            _median(own[correct]),
            int((correct & own.isfinite() & (own <= distance)).sum()),
            attack.forward,
            attack.backward,
            attack.seconds,
        )
        for attack, own in zip(result.attacks, measured.T, strict=True)
    )
    if folder is not None and is_main():
        columns = dict(zip(attacks, measured.T.contiguous(), strict=True))
        write_atomic(folder / "distances.safetensors", save({"distance": distance, **columns}))
    marks = (threat.radius,) if evaluation.attacks else ()
    return Curve.from_distances(distance, correct, threat.norm, summaries, marks), result.warnings


def _median(distance: Tensor) -> float | None:
    """Lower median of distances; None if it is infinite or there are none."""
    median = float(distance.double().median()) if len(distance) else math.inf
    return median if median < math.inf else None
