"""WCI and robust overfitting on a small part of MNIST: does it follow the robust gap, does its learning rate help?

    python -m benchmarks.results.wci runs/wci docs/results/wci.md [override ...]

Overrides go to every recipe (say, where the data are).  Finished runs are kept, so the command can be interrupted.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from atoll.curvature import Estimate, Fit, analyse, fit
from atoll.run import Run, open_run
from benchmarks.results import mean
from benchmarks.results.flat_training import attack, train

SEEDS = (0, 1, 2, 3)
THRESHOLDS = (100, 10)  # both ends of the paper's range
DROP = 16  # epoch after which the rate first falls
POINTS = 4000  # test images for PGD-20
CHANGES, BETWEEN = "changes from one measurement to the next", "seeds apart from their mean at the same epoch"
LAST = "last epoch, all runs of all schedules"
GAPS = {"gap_error": "robust error", "gap_loss": "robust loss"}

Array = NDArray[np.float64]
Robust = dict[str, list[dict[str, float]]]  # accuracy of the last and the best checkpoint, by row and seed


def epochs(run: Run, *names: str) -> Array:
    """Some metrics at the epochs that have them: ``(names, epochs)``."""
    records = [r for r in run.metrics if r["kind"] == "epoch" and all(name in r for name in names)]
    return np.array([[r[name] for r in records] for name in names])


def finished(folder: Path, row: str, seed: int, overrides: list[str]) -> dict[str, float]:
    """Train, unless that is done, and attack the last and the best checkpoint; in processes of one thread."""
    if not (folder / "result.json").exists():
        train(folder, row, seed, [*overrides, "trainer.test_steps=0"])
    found = {which: 100 * attack(folder, "raw", which, "PGD-20", POINTS) for which in ("last", "best")}
    print(folder.name, found, flush=True)
    return found


def correlations(runs: dict[str, list[Run]], gap: str) -> dict[str, Fit]:
    """The paper's correlations over epochs, and three that time alone cannot make."""
    both = np.stack([epochs(run, "wci", gap) for run in runs["piecewise"]])  # (seeds, 2, epochs)
    index, gaps = both[:, 0], both[:, 1]
    found = analyse(*({f"seed {k}": list(row) for k, row in enumerate(part)} for part in (index, gaps)))
    last = np.array([epochs(run, "wci", gap)[:, -1] for each in runs.values() for run in each])
    return {
        **found.seeds,
        "all seeds and epochs": found.pooled,
        CHANGES: fit(np.diff(index).ravel(), np.diff(gaps).ravel()),
        BETWEEN: fit(*((part - part.mean(0)).ravel() for part in (index, gaps))),
        LAST: fit(*last.T),
    }


def correlation_table(found: dict[str, Fit], title: str) -> list[str]:
    lines = [f"Gap in {title} against WCI:", ""]
    lines += ["| | pairs | Pearson r | 95 % interval | p | slope | 95 % interval | R² |", "|" + " --- |" * 8]
    for name, one in found.items():
        interval, slope = (f"[{low:.2g}, {high:.2g}]" for low, high in (one.r_interval, one.slope_interval))
        numbers = f"{one.r:.2f} | {interval} | {one.p:.1g} | {one.slope:.2g} | {slope} | {one.r_squared:.2f}"
        lines.append(f"| {name} | {one.n} | {numbers} |")
    return [*lines, ""]


def tracking(found: dict[str, Fit], title: str) -> str:
    """The paper's claim by its own test, and by those that do not gain from time."""
    seeds = [one for name, one in found.items() if name.startswith("seed ")]
    held = all(one.r > 0 and one.p < 0.05 for one in seeds)
    beyond = [name for name in (CHANGES, BETWEEN, LAST) if found[name].r_interval[0] > 0]
    return (
        f"- WCI goes with the gap in {title}: by the paper's test (r > 0 and p < 0.05 over the epochs of every seed)"
        f" this {'held' if held else 'did not hold'}. Without the help of time the interval of r is above 0 for"
        f" {' and '.join(beyond) or 'none of the three'}."
    )


def accuracies(runs: dict[str, list[Run]], robust: Robust) -> list[str]:
    lines = [
        "| learning rate | robust, last | robust, best on validation | clean, last | gap in error, last | WCI, last |"
        " rate, last |",
        "|" + " --- |" * 7,
    ]
    for name, each in runs.items():
        columns = [[seed[which] for seed in robust[name]] for which in ("last", "best")]
        columns.append([100 * run.result["last"]["clean"]["value"] for run in each if run.result is not None])
        for key, scale in (("gap_error", 100), ("wci", 1), ("learning_rate", 1)):
            columns.append([scale * epochs(run, key)[0, -1] for run in each])
        lines.append(f"| {name} | " + " | ".join(str(mean(column)) for column in columns) + " |")
    return [*lines, ""]


def differences(robust: Robust, ours: str) -> dict[str, Estimate]:
    """The last robust accuracy under a rule minus that of the others, seed by seed, in points."""
    others = {(name, "last") for name in robust if not name.startswith("rule")} | {("piecewise", "best")}
    return {
        f"{ours}, last, minus {name}, {which}": mean(
            [mine["last"] - other[which] for mine, other in zip(robust[ours], robust[name], strict=True)]
        )
        for name, which in sorted(others)
    }


def half_width(one: Estimate) -> float:
    """Of the 95 % interval of a mean over seeds (Student's t)."""
    return float(t.ppf(0.975, len(SEEDS) - 1)) * one.standard_error


def beating(apart: dict[str, Estimate]) -> str:
    better = [name for name, one in apart.items() if one.value > half_width(one)]
    worse = [name for name, one in apart.items() if one.value < -half_width(one)]
    return (
        f"- The rule beats other learning rates and early stopping: this"
        f" {'held' if len(better) == len(apart) else 'did not hold'}. Of the {len(apart)} differences above,"
        f" {len(better)} are above 0 with their whole interval, {len(worse)} below."
    )


def plot(runs: dict[str, list[Run]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes: Any = figure.subplots(2, 3)
    curves = [("wci", "WCI"), ("gap_error", "gap in robust error"), ("gap_loss", "gap in robust loss")]
    curves += [("gap_test_error", "robust test error"), ("learning_rate", "learning rate")]
    for axis, (key, title) in zip(axes.flat, curves, strict=False):
        for number, (name, each) in enumerate(runs.items()):
            series = np.stack([epochs(run, "epoch", key) for run in each])
            axis.plot(series[0, 0], series[:, 1].mean(0), color=f"C{number}", label=name)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("epoch", fontsize=8)
        if key in ("wci", "learning_rate"):
            axis.set_yscale("log")
    for number, run in enumerate(runs["piecewise"]):
        axes[1, 2].plot(*epochs(run, "wci", "gap_error"), ".", color=f"C{number}", label=f"seed {number}")
    axes[1, 2].set_title("gap in robust error against WCI, piecewise", fontsize=9)
    axes[0, 0].legend(fontsize=7)
    axes[1, 2].legend(fontsize=7)
    figure.savefig(path, dpi=90)


def page(runs: dict[str, list[Run]], robust: Robust, picture: str) -> list[str]:
    found = {title: correlations(runs, gap) for gap, title in GAPS.items()}
    apart: dict[str, Estimate] = {}
    for name in runs:
        apart |= differences(robust, name) if name.startswith("rule") else {}
    drops = [epochs(run, "epoch", "wci") for run in runs["piecewise"]]
    at_drop = mean([index[epoch == DROP].item() for epoch, index in drops])
    gain = mean([seed["best"] - seed["last"] for seed in robust["piecewise"]])
    return [
        "# WCI and robust overfitting",
        "",
        f"AT (PGD-10, linf 0.2) of a small ConvNet on 1,000 images of MNIST, 32 epochs, {len(SEEDS)} seeds; book"
        " `mnist-wci`. WCI and the gap (test minus training, 256 points each, the training's attack) every other epoch."
        f" Robust accuracy is that under PGD-20 on the first {POINTS:,} test images, in %; mean ± standard error over"
        " seeds.",
        "",
        "    python -m benchmarks.results.wci runs/wci docs/results/wci.md",
        "",
        "The rule, `WCISchedule`: 0.05, a tenth of it after half of the run, and from then on times"
        " min(1, τ / average of WCI), for both ends of the paper's range of τ, chosen after a pilot with another seed."
        f" WCI is {at_drop} when the rate drops (piecewise), so τ = 100 hardly acts: it stands for the schedule without"
        " the rule. Early stopping is the best checkpoint on 600 validation images; in piecewise it gains"
        f" {gain} points, so what grows here is the gap, while the robust accuracy hardly falls.",
        "",
        *accuracies(runs, robust),
        "| robust accuracy in points, seed by seed | difference | 95 % interval |",
        "| --- | --- | --- |",
        *(f"| {n} | {a} | [{a.value - half_width(a):.2g}, {a.value + half_width(a):.2g}] |" for n, a in apart.items()),
        "",
        f"![WCI, gaps, robust test error and learning rate]({picture})",
        "",
        "## Correlations",
        "",
        "Over the epochs of the piecewise runs, as in the paper. WCI and gap both rise while a net is trained, and"
        " neighbouring epochs are alike, so r is large and p small for any two such numbers; the last three rows are"
        " those that time alone cannot make. Only in the last row is every pair a run of its own; all other intervals"
        " are too narrow.",
        "",
        *(line for title, one in found.items() for line in correlation_table(one, title)),
        "## Whether the paper's claims held here",
        "",
        *(tracking(one, title) for title, one in found.items()),
        beating(apart),
    ]


def main(folder: Path, out: Path, overrides: list[str]) -> None:
    rows = {name: (f"mnist-wci/{name}", overrides) for name in ("piecewise", "cosine")}
    for tau in THRESHOLDS:
        rows[f"rule, τ = {tau}"] = ("mnist-wci/rule", [*overrides, f"methods.0.threshold={tau}"])
    jobs = [(seed, name, folder / f"{name.replace(', τ = ', '-')}-{seed}") for seed in SEEDS for name in rows]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = list(pool.map(lambda job: finished(job[2], rows[job[1]][0], job[0], rows[job[1]][1]), jobs))
    robust: Robust = {row: [one for (_, name, _), one in zip(jobs, done, strict=True) if name == row] for row in rows}
    runs = {row: [open_run(path) for _, name, path in jobs if name == row] for row in rows}
    picture = out.with_suffix(".png")
    out.parent.mkdir(parents=True, exist_ok=True)
    plot(runs, picture)
    out.write_text("\n".join(page(runs, robust, picture.name)) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
