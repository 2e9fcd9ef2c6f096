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
from benchmarks.results.flat_training import train

PILOT = 100  # the seed that chooses the threshold; not among those reported
SEEDS = (0, 1, 2, 3)
PLAIN = ("piecewise", "cosine", "onedrop")  # rows of the book that measure from the first epoch on
CHANGES, BETWEEN = "changes from one measurement to the next", "seeds apart from their mean at the same epoch"
LAST = "last epoch, all runs of all schedules"
GAPS = {"gap_error": "robust error", "gap_loss": "robust loss"}

Array = NDArray[np.float64]


def epochs(run: Run, *names: str) -> Array:
    """Some metrics at the epochs that have them: ``(names, epochs)``."""
    records = [r for r in run.metrics if r["kind"] == "epoch" and all(name in r for name in names)]
    return np.array([[r[name] for r in records] for name in names])


def threshold(pilot: Run) -> float:
    """The index when the rate first drops, half-way through the run, to two digits."""
    epoch, index = epochs(pilot, "epoch", "wci")
    half = pilot.recipe["trainer"]["epochs"] / 2
    return float(f"{index[epoch == half].item():.2g}")


def trained(jobs: dict[Path, tuple[str, int, list[str]]]) -> dict[Path, Run]:
    """All runs, as many at a time as there are cores, one thread each."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        todo = [folder for folder in jobs if not (folder / "result.json").exists()]
        for folder in pool.map(lambda folder: (train(folder, *jobs[folder]), folder)[1], todo):
            print(folder.name, flush=True)
    return {folder: open_run(folder) for folder in jobs}


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
        LAST: fit(*np.unique(last, axis=0).T),  # a rule that never acts is its schedule once more
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
    seeds = [one for name, one in found.items() if name.startswith("seed")]
    held = all(one.r > 0 and one.p < 0.05 for one in seeds)
    beyond = [name for name in (CHANGES, BETWEEN, LAST) if found[name].r_interval[0] > 0]
    return (
        f"- WCI goes with the gap in {title}: by the paper's test (r > 0 and p < 0.05 over the epochs of every seed)"
        f" this {'held' if held else 'did not hold'}. Without the help of time the interval of r is above 0 for"
        f" {' and '.join(beyond) or 'none of the three'}."
    )


def accuracies(runs: dict[str, list[Run]]) -> list[str]:
    lines = [
        "| learning rate | robust, last | robust, best on validation | clean, last | gap in error, last | WCI, last |",
        "|" + " --- |" * 6,
    ]
    for name, each in runs.items():
        results = [run.result or {} for run in each]
        robust = [mean([100 * r[which]["robust"]["value"] for r in results]) for which in ("last", "best")]
        clean = mean([100 * r["last"]["clean"]["value"] for r in results])
        gap = mean([100 * epochs(run, "gap_error")[0, -1] for run in each])
        index = mean([epochs(run, "wci")[0, -1] for run in each])
        lines.append(f"| {name} | " + " | ".join(map(str, [*robust, clean, gap, index])) + " |")
    return [*lines, ""]


def differences(runs: dict[str, list[Run]], ours: str) -> dict[str, Estimate]:
    """The last robust accuracy under the rule minus that of the others, seed by seed, in points."""
    others = {f"{name}, last": robust(runs[name], "last") for name in runs if name != ours}
    others["early stopping: piecewise, best"] = robust(runs["piecewise"], "best")
    mine = robust(runs[ours], "last")
    return {name: mean([a - b for a, b in zip(mine, theirs, strict=True)]) for name, theirs in others.items()}


def robust(runs: list[Run], which: str) -> list[float]:
    return [100 * run.result[which]["robust"]["value"] for run in runs if run.result is not None]


def half_width(one: Estimate) -> float:
    """Of the 95 % interval of a mean over seeds (Student's t)."""
    return float(t.ppf(0.975, len(SEEDS) - 1)) * one.standard_error


def beating(apart: dict[str, Estimate], ours: str) -> str:
    beaten = [name for name, one in apart.items() if one.value > half_width(one)]
    better = [name for name, one in apart.items() if one.value < -half_width(one)]
    held = len(beaten) == len(apart)
    return (
        f"- The rule ({ours}) beats the other learning rates: this {'held' if held else 'did not hold'}."
        f" With an interval that excludes 0 it is better than {'; '.join(beaten) or 'none'}, and worse than"
        f" {'; '.join(better) or 'none'}."
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


def page(runs: dict[str, list[Run]], tau: float, ours: str, picture: str) -> list[str]:
    found = {title: correlations(runs, gap) for gap, title in GAPS.items()}
    apart = differences(runs, ours)
    return [
        "# WCI and robust overfitting",
        "",
        f"AT (PGD-10, linf 0.2) of a small ConvNet on 1,000 images of MNIST, 32 epochs, {len(SEEDS)} seeds; book"
        " `mnist-wci`. WCI and the gap (test minus training, 256 points each, the training's attack) every other epoch."
        " Robust accuracy is that under PGD-20 on all 10,000 test images, in %; mean ± standard error over seeds.",
        "",
        "    python -m benchmarks.results.wci runs/wci docs/results/wci.md",
        "",
        "The rule, `WCISchedule`: 0.05, a tenth of it after half of the run, and from then on times"
        " min(1, τ / average of WCI). The index adds up the layers of a net, so the paper's τ = 100 for its PreAct"
        f" ResNet-18 need not suit this one; τ = {tau:g} is WCI when the rate first drops, in a pilot run with a seed"
        f" ({PILOT}) that is not among those reported. `onedrop` is the schedule under the rule, without it.",
        "",
        *accuracies(runs),
        f"| {ours}, last, minus | robust accuracy, points, seed by seed | 95 % interval |",
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
        beating(apart, ours),
    ]


def main(folder: Path, out: Path, overrides: list[str]) -> None:
    pilot = folder / f"onedrop-{PILOT}"
    tau = threshold(trained({pilot: ("mnist-wci/onedrop", PILOT, overrides)})[pilot])
    rows = {name: (f"mnist-wci/{name}", overrides) for name in PLAIN}
    for value in (100.0, tau):
        rows[f"rule, τ = {value:g}"] = ("mnist-wci/rule", [*overrides, f"methods.0.threshold={value}"])
    folders = {(n, s): folder / f"{n.replace(', τ = ', '-')}-{s}" for s in SEEDS for n in rows}
    found = trained({path: (rows[n][0], s, rows[n][1]) for (n, s), path in folders.items()})
    runs = {name: [found[folders[name, seed]] for seed in SEEDS] for name in rows}
    picture = out.with_suffix(".png")
    out.parent.mkdir(parents=True, exist_ok=True)
    plot(runs, picture)
    out.write_text("\n".join(page(runs, tau, list(rows)[-1], picture.name)) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
