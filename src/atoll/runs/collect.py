"""Collect the results of many runs in one table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.attacks.measure import AttackResult
from atoll.attacks.power import Power
from atoll.certify.measure import CertifyResult
from atoll.curvature.measure import CurvatureResult
from atoll.errors import AtollError, InputError
from atoll.measure import Result
from atoll.runs.folders import run_folders
from atoll.runs.run import Run, open_run
from atoll.stats import Accuracy, Estimate, SampledAccuracy

if TYPE_CHECKING:
    import pandas


NO_NUMBERS = {"clean": "-", "robust": "-", "verified": "-", "WCI": "-"}


def find_runs(root: Path | str) -> Iterator[Run]:
    """Yield all runs below a folder, in alphabetical order; the folder itself may be a run."""
    for folder in run_folders(root):
        try:
            yield open_run(folder)
        except AtollError:
            continue


def results(root: Path | str = "runs", kind: str | None = None) -> pandas.DataFrame:
    """Return the results of all runs below a folder as a data frame with one row per result.

    Columns are the run, the checkpoint, the settings (``settings.attacks``) and every scalar of the result; accuracies
    and estimates also have columns for their intervals (``robust.low``, ``robust.high``).

    Args:
        root: folder of runs, or the folder of one run.
        kind: kind of results, such as ``attack``; all kinds if None.
    """
    try:
        import pandas
    except ImportError:
        raise InputError("results requires pandas; run `pip install pandas`") from None
    root = Path(root)
    rows = [row(run, result, root) for run in find_runs(root) for result in run.results(kind)]
    return pandas.DataFrame(rows)


def row(run: Run, result: Result, root: Path) -> dict[str, Any]:
    """Return one result as flat numbers and strings."""
    origin = result.subject.origin
    values: dict[str, Any] = {
        "run": str(run.folder.relative_to(root)) if run.folder != root else run.folder.name,
        "kind": result.kind,
        "checkpoint": run.checkpoint_name(origin),
        "step": origin.step,
        "weights": origin.weights,
        "stale": result.stale,
        "points": result.points,
        "seconds": result.seconds,
        "date": result.environment.date if result.environment else "",
        "digest": result.subject.digest,
        "folder": str(result.folder) if result.folder else "",
    }
    values |= {f"settings.{name}": value for name, value in result.settings.to_json().items() if _is_scalar(value)}
    for name, value in vars(result).items():
        if name not in ("subject", "settings", "environment", "folder", "stale", "inputs"):
            values |= _flat(name, value)
    return values


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _flat(name: str, value: object) -> dict[str, Any]:
    """Return a number with its interval, the accuracies of a sequence by name, or nothing."""
    if isinstance(value, Accuracy | Estimate | SampledAccuracy):
        low, high = value.interval
        return {name: value.value, f"{name}.low": low, f"{name}.high": high}
    if isinstance(value, Power):
        return _flat(name, value.share)
    if _is_scalar(value):
        return {name: value}
    columns: dict[str, Any] = {}
    if isinstance(value, tuple):
        for part in value:
            accuracy = getattr(part, "accuracy", None)
            label = getattr(part, "name", None) or getattr(part, "eps", None)
            if isinstance(accuracy, Accuracy) and label is not None:
                columns |= _flat(f"{name}.{label}", accuracy)
    if isinstance(value, dict):
        for key, part in value.items():
            if isinstance(part, Accuracy | Estimate | int | float):
                columns |= _flat(f"{name}.{key}", part)
    return columns


def overview(run: Run) -> tuple[str, dict[str, str]]:
    """Return the state of a run (finished, not finished or damaged) and its main numbers."""
    try:
        return "finished" if run.is_finished else "not finished", main_numbers(run)
    except AtollError:  # `atoll report` says what is wrong
        return "damaged", dict(NO_NUMBERS)


def list_run(folder: Path) -> list[Any] | None:
    """Return the overview of the run in a folder as plain data; None if it is not a run."""
    try:
        return list(overview(open_run(folder)))
    except AtollError:
        return None


def main_numbers(run: Run) -> dict[str, str]:
    """Return the main numbers of a run for a list of runs, from current results of its best checkpoint."""
    numbers = dict(NO_NUMBERS)
    for result in run.results():
        if result.stale or "best" not in run.checkpoint_name(result.subject.origin):
            continue
        if isinstance(result, AttackResult) and result.settings.split == "test":
            numbers["clean"] = f"{100 * result.clean.value:.2f}"
            robust = result.robust if result.estimate is None else result.estimate
            numbers["robust"] = f"{100 * robust.value:.2f} ({result.settings.attacks})"
        elif isinstance(result, CertifyResult) and result.settings.split == "test":
            verified = result.verified[0]
            numbers["verified"] = f"{100 * verified.accuracy.value:.2f} (l2 {verified.eps:.3g})"
        elif isinstance(result, CurvatureResult):
            numbers["WCI"] = f"{result.wci} ({result.loss})"
    return numbers
