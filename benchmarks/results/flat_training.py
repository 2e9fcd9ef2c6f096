"""AT and TRADES with base, SWA, S2O, AWP, AWPT, TrH and RAT on a small part of MNIST, three seeds, best and last.

    python -m benchmarks.results.flat_training runs/flat docs/results/flat-training.md [override ...]

Overrides go to every recipe (say, where the data are).  Finished runs are kept, so the command can be interrupted.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from atoll.attacks import PGD
from atoll.attacks.evaluate import evaluate
from atoll.recipe import rows
from atoll.run import open_run

BOOK = "mnist-flat"
SEEDS = (0, 1, 2)


def train(folder: Path, row: str, seed: int, overrides: list[str]) -> None:
    """One run in a process of its own, on one thread, so that two of them fill two cores and any machine agrees."""
    command = [sys.executable, "-m", "atoll", "train", row, f"seed={seed}", *overrides, "--json", "--resume"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--out", str(folder)], env=environment, check=True, stdout=subprocess.DEVNULL)


def measure(folder: Path, weights: str) -> dict[str, float]:
    """Test accuracy of best and last, and the gap of the last one to its own training points, all under PGD-20."""
    run = open_run(folder)
    result = run.result
    assert result is not None
    found: dict[str, Any] = result if weights == "raw" else result[weights]
    attack = {"robust": PGD(run.threat, steps=20)}
    train = evaluate(run.model("last", weights), run.data.split("train"), attack, seed="evaluation")["robust"].value
    return {
        "best clean": found["best"]["clean"]["value"],
        "best robust": found["best"]["robust"]["value"],
        "last clean": found["last"]["clean"]["value"],
        "last robust": found["last"]["robust"]["value"],
        "gap": train - found["last"]["robust"]["value"],
    }


def main(runs: Path, table: Path, overrides: list[str]) -> None:
    cells = [(row, seed, runs / f"{row.partition('/')[2]}-{seed}") for seed in SEEDS for row in rows(BOOK)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        todo = [cell for cell in cells if not (cell[2] / "result.json").exists()]
        for row, seed, _ in pool.map(lambda c: (train(c[2], c[0], c[1], overrides), c)[1], todo):
            print(row, seed, flush=True)
    lines = [
        "| method | best: clean | best: PGD-20 | last: clean | last: PGD-20 | last: train - test |",
        "|" + " --- |" * 6,
    ]
    for row in rows(BOOK):
        name = row.partition("/")[2]
        weights = "swa" if name.endswith("swa") else "raw"
        seeds = [measure(folder, weights) for other, _, folder in cells if other == row]
        columns = []
        for key in seeds[0]:
            values = [100 * seed[key] for seed in seeds]
            columns.append(f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}")
        lines.append(f"| {name} | " + " | ".join(columns) + " |")
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text("\n".join(lines) + "\n")
    print(table.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
