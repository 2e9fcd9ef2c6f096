"""AT and TRADES with base, SWA, S2O, AWP, AWPT, TrH and RAT on a small part of MNIST, three seeds, best and last.

    python -m benchmarks.results.flat_training runs/flat runs/flat/table.md [override ...]

Overrides go to every recipe (say, where the data are).  Finished runs are kept, so the command can be interrupted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from atoll.attacks import PGD
from atoll.attacks.evaluate import evaluate
from atoll.recipe import rows
from atoll.run import open_run

BOOK = "mnist-flat"
SEEDS = (0, 1, 2)
POINTS = 500  # test points for AutoAttack


def train(folder: Path, row: str, seed: int, overrides: list[str]) -> None:
    """One run in a process of its own, on one thread, so that two of them fill two cores and any machine agrees."""
    command = [sys.executable, "-m", "atoll", "train", row, f"seed={seed}", *overrides, "--json", "--resume"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--out", str(folder)], env=environment, check=True, stdout=subprocess.DEVNULL)


def attack(folder: Path, weights: str, which: str, attacks: str = "fast", points: int = POINTS) -> float:
    """Robust accuracy on some test points; finished evaluations are kept, as trainings are."""
    command = [sys.executable, "-m", "atoll", "attack", str(folder), "--attacks", attacks, "--points", str(points)]
    command += ["--checkpoint", which, "--weights", weights, "--batch-size", "250", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: float = json.loads(done.stdout)[str(folder)]["robust"]["value"]
    return found


def measure(folder: Path, weights: str) -> dict[str, float]:
    """Test accuracy of best and last, and the gap of the last one to its own training points under PGD-20."""
    run = open_run(folder)
    result = run.result
    assert result is not None
    found: dict[str, Any] = result if weights == "raw" else result[weights]
    pgd = {"robust": PGD(run.threat, steps=20)}
    train = evaluate(run.model("last", weights), run.data.split("train"), pgd, seed="evaluation").robust.value
    return {
        "best clean": found["best"]["clean"]["value"],
        "best PGD": found["best"]["robust"]["value"],
        "best AA": attack(folder, weights, "best"),
        "last clean": found["last"]["clean"]["value"],
        "last PGD": found["last"]["robust"]["value"],
        "last AA": attack(folder, weights, "last"),
        "gap": train - found["last"]["robust"]["value"],
    }


def weights_of(row: str) -> str:
    """Which weights a row is about."""
    return "swa" if row.endswith("swa") else "raw"


def main(runs: Path, table: Path, overrides: list[str]) -> None:
    cells = [(row, seed, runs / f"{row.partition('/')[2]}-{seed}") for seed in SEEDS for row in rows(BOOK)]
    torch.set_num_threads(1)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        todo = [cell for cell in cells if not (cell[2] / "result.json").exists()]
        for row, seed, _ in pool.map(lambda c: (train(c[2], c[0], c[1], overrides), c)[1], todo):
            print(row, seed, flush=True)
        measured = dict(zip(cells, pool.map(lambda c: measure(c[2], weights_of(c[0])), cells), strict=True))
    lines = [
        "| method | best: clean | PGD-20 | AutoAttack | last: clean | PGD-20 | AutoAttack | train - test, PGD-20 |",
        "|" + " --- |" * 8,
    ]
    for row in rows(BOOK):
        seeds = [found for (other, _, _), found in measured.items() if other == row]
        columns = []
        for key in seeds[0]:
            values = [100 * seed[key] for seed in seeds]
            columns.append(f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}")
        lines.append(f"| {row.partition('/')[2]} | " + " | ".join(columns) + " |")
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text("\n".join(lines) + "\n")
    print(table.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
