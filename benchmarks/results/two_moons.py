"""Eigenvalues of the Hessian on Two Moons without TrH, with top-layer TrH, with full TrH (TrH, figures 2 and 5).

    python -m benchmarks.results.two_moons runs/two-moons docs/results/two-moons.md

Finished runs and measurements are kept, so the command can be interrupted.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from atoll.attacks import PGD
from atoll.curvature import Problem, moments
from atoll.files import write_json
from atoll.recipe import build_part, rows
from atoll.run import Run, train
from atoll.training.losses import Loss
from benchmarks.results import mean

BOOK = "moons-trh"
SEEDS = (0, 1, 2, 3, 4)
EPOCHS = (0, 5, 10, 20, 40, 60, 80, 100)
PARTS = {"": "whole net", "body.1.weight": "layer 1", "body.3.weight": "layer 2", "head.weight": "layer 3"}
COLOURS = {"standard": "C0", "top": "C1", "full": "C2"}  # as in the paper

Series = dict[str, list[float]]  # by epoch, under "PART sum" and "PART std"


def measure(run: Run) -> Series:
    """Sum and standard deviation of the eigenvalues at the training points, in float64; kept in the run's folder."""
    path = run.folder / "eigenvalues.json"
    if path.exists():
        known: Series = json.loads(path.read_text())
        return known
    loss: Loss = build_part(Loss, run.recipe["loss"], "loss", trust=False)
    x, y = run.data.tensors("train")
    attack = PGD(run.threat, "ce", **run.recipe["attack"]["init_args"])
    steps_per_epoch = len(y) // run.recipe["trainer"]["batch_size"]
    found: Series = {f"{part} {what}": [] for part in PARTS for what in ("sum", "std")}
    for epoch in EPOCHS:
        model = run.model(epoch * steps_per_epoch).double()
        problem = Problem.attacked(model, loss, x.double(), y, attack, micro_batch=len(y))
        for part, values in moments(problem).items():
            if part in PARTS:
                found[f"{part} sum"].append(values.sum)
                found[f"{part} std"].append(values.std)
    write_json(path, found)
    return found


def plot(series: dict[str, list[Series]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    axes: Any = figure.subplots(2, len(PARTS), sharex=True)
    for column, (part, title) in enumerate(PARTS.items()):
        for axis, what in zip(axes[:, column], ("sum", "std"), strict=True):
            for row, runs in series.items():
                each = [mean([run[f"{part} {what}"][k] for run in runs]) for k in range(len(EPOCHS))]
                values, errors = ([getattr(e, name) for e in each] for name in ("value", "standard_error"))
                axis.errorbar(EPOCHS, values, errors, color=COLOURS[row], label=row, marker=".", capsize=2)
            axis.set_yscale("log")
            axis.set_title(f"{title}: {'sum' if what == 'sum' else 'standard deviation'}", fontsize=9)
        axes[1, column].set_xlabel("epoch")
    axes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=90)


def page(series: dict[str, list[Series]], accuracy: dict[str, list[float]], picture: str) -> str:
    lines = [
        "# Two Moons: what top-layer TrH does to the whole net",
        "",
        "AT of an MLP 100-100 on 500 points (linf 0.02, one PGD step, SGD 0.1 with momentum, 100 epochs) without TrH,"
        " with the trace of the top layer (weight 0.5) and with that of all layers (0.05): TrH, figures 2 and 5."
        f" Eigenvalues of the Hessian of the loss at the training points, exact, in float64; {len(SEEDS)} seeds,"
        " mean ± standard error. A layer is its weight matrix.",
        "",
        "    python -m benchmarks.results.two_moons runs/two-moons docs/results/two-moons.md",
        "",
    ]
    for what, title in (("sum", "Sum of the eigenvalues (trace)"), ("std", "Standard deviation of the eigenvalues")):
        lines += [f"{title}, after epoch {EPOCHS[-1]}:", ""]
        lines += ["| | " + " | ".join(PARTS.values()) + " |", "|" + " --- |" * (len(PARTS) + 1)]
        for row, runs in series.items():
            cells = [str(mean([run[f"{part} {what}"][-1] for run in runs])) for part in PARTS]
            lines.append(f"| {row} | " + " | ".join(cells) + " |")
        lines.append("")
    cells = [f"{row} {mean(values)}" for row, values in accuracy.items()]
    lines += [f"Test accuracy under PGD-20 in %: {', '.join(cells)}.", "", f"![eigenvalues over epochs]({picture})", ""]
    return "\n".join(lines + verdict(series)) + "\n"


def verdict(series: dict[str, list[Series]]) -> list[str]:
    """Whether the top layer's trace does at least nine tenths of what the full one does."""
    names = ("standard", "top", "full")
    lines = [
        "Trace of the whole net, median over seeds (smallest to largest), since single runs jump:",
        "",
        f"| after epoch | {' | '.join(names)} | top's reduction / full's |",
        "|" + " --- |" * 5,
    ]
    for k, epoch in list(enumerate(EPOCHS))[1:]:
        traces = [[run[" sum"][k] for run in series[name]] for name in names]
        cells = [f"{statistics.median(each):.3g} ({min(each):.3g} to {max(each):.3g})" for each in traces]
        standard, top, full = map(statistics.median, traces)
        share = (standard - top) / (standard - full)
        lines.append(f"| {epoch} | {' | '.join(cells)} | {share:.2f} |")
    lower = sum(a > b for a, b in zip(traces[0], traces[1], strict=True))
    word = "held" if share >= 0.9 else "held in part" if lower == len(SEEDS) else "did not hold"
    return [
        *lines,
        "",
        f"The paper's claim, that top-layer regularization lowers the whole net's trace nearly as well as full, {word}:"
        f" after epoch {EPOCHS[-1]} top is below standard in {lower} of {len(SEEDS)} seeds, by"
        f" {100 * (1 - top / standard):.0f} % in the median against {100 * (1 - full / standard):.0f} % for full."
        ' ("Nearly" is taken as nine tenths of the reduction.)',
    ]


def main(runs: Path, out: Path) -> None:
    torch.set_num_threads(1)
    series: dict[str, list[Series]] = {}
    accuracy: dict[str, list[float]] = {}
    for row in rows(BOOK):
        name = row.partition("/")[2]
        for seed in SEEDS:
            keep = f"trainer.keep_epochs={list(EPOCHS)}"
            run = train(row, f"seed={seed}", keep, out=runs / f"{name}-{seed}", resume=True)
            assert run.result is not None
            accuracy.setdefault(name, []).append(100 * run.result["last"]["robust"]["value"])
            series.setdefault(name, []).append(measure(run))
            print(name, seed, flush=True)
    picture = out.with_suffix(".png")
    out.parent.mkdir(parents=True, exist_ok=True)
    plot(series, picture)
    out.write_text(page(series, accuracy, picture.name))
    print(out.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
