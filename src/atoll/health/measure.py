"""The measurement of the health of data and model, used by ``Run.health``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from atoll.data.base import Data, Split, SubSplit, sample_rows
from atoll.display import TextTable
from atoll.health.data import DataScan, check_data, scan_data
from atoll.health.finding import Finding
from atoll.health.model import check_model
from atoll.measure import MEASUREMENTS, Context, Measurement, Result, Settings, select
from atoll.stats import Accuracy, percent
from atoll.subject import Subject

POINTS = 500


@dataclass(frozen=True, kw_only=True)
class HealthSettings(Settings):
    """Settings of the health checks.

    Args:
        points: number of points on which the model is checked, drawn at random from the split.
    """

    kind: ClassVar[str] = "health"
    points: int | None = POINTS


@dataclass(frozen=True, kw_only=True)
class HealthResult(Result):
    """Clean accuracy, and what looks wrong with the data or the model.

    Args:
        clean: accuracy on the points.
        findings: what looks wrong; empty for sound data and a sound model.
        compared: number of test and training images that were compared with each other.
    """

    kind: ClassVar[str] = "health"
    settings: HealthSettings
    clean: Accuracy
    findings: tuple[Finding, ...]
    compared: dict[str, int]

    def table(self) -> TextTable:
        rows = [["clean accuracy, %", percent(self.clean)], ["findings", str(len(self.findings))]]
        return TextTable(self._title, ["", "value"], rows, [str(finding) for finding in self.findings])


def draw_points(split: Split, points: int | None, seed: int) -> Split:
    """Random points of a split, because the images of many data sets are sorted by class."""
    return SubSplit(split, sample_rows(split, len(split) if points is None else points, "health", seed))


@MEASUREMENTS.register("health", own_name=False)
class MeasureHealth(Measurement):
    """Health checks of data and model."""

    settings = HealthSettings
    result = HealthResult

    def __init__(self) -> None:
        self._scan: DataScan | None = None

    def inputs(self, subject: Subject, settings: HealthSettings) -> Split:
        return draw_points(select(subject.data, settings.split, None), settings.points, settings.seed)

    def depends_on(self, subject: Subject, settings: HealthSettings, context: Context) -> tuple[str, ...]:
        """Return the digest of the data, whose test images are compared with the training images."""
        return (self._scanned(subject.data, context).digest,)

    def measure(self, subject: Subject, settings: HealthSettings, context: Context) -> dict[str, Any]:
        scan = self._scanned(subject.data, context)
        points = self.inputs(subject, settings)
        context.on_progress("checking the model", 0, 1)
        accuracy, findings = check_model(
            subject.model, subject.data, points, conventions=subject.conventions, device=context.device
        )
        context.on_progress("checking the model", 1, 1)
        findings += check_data(scan, subject.data.classes)
        return {"clean": accuracy, "findings": tuple(findings), "compared": scan.compared}

    def _scanned(self, data: Data, context: Context) -> DataScan:
        """Read the data once for the digest and for the checks."""
        if self._scan is None:
            self._scan = scan_data(data, lambda done, total: context.on_progress("reading images", done, total))
        return self._scan
