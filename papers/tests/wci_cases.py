"""Handmade curves of WCI and the robust gap."""

from __future__ import annotations

import math

import numpy as np

from atoll.studies import Cell
from atoll.studies.base import Numbers

EPOCHS = [float(epoch) for epoch in range(2, 34, 2)]


def curves(index: list[float], gap: list[float], norm: list[float] | None = None) -> Numbers:
    norm = norm or [1.0] * len(index)
    return {
        "curves": {
            "epoch": EPOCHS[: len(index)],
            "wci": index,
            "gap_error": gap,
            "gap_loss": [3 * g for g in gap],
            "gap_test_error": gap,
            "learning_rate": [0.1] * len(index),
            "wci_weight_norm": norm,
            "wci_root_trace": [i / n for i, n in zip(index, norm, strict=True)],
        }
    }


def noise(cell: Cell, purpose: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.random.default_rng([len(cell.row), ord(cell.row[-1]), cell.seed, purpose]).normal(size=len(EPOCHS))


def together(cell: Cell) -> Numbers:
    """The gap follows WCI."""
    index = 100 + 10 * noise(cell, 0)
    return curves(list(index), list(0.01 * index + 0.001 * noise(cell, 1)))


def product(cell: Cell) -> Numbers:
    """The gap follows WCI, the product of two factors that have nothing in common."""
    norm, root = (np.exp(0.3 * noise(cell, purpose)) for purpose in (4, 5))
    index = norm * root
    return curves(list(index), list(0.01 * index + 0.001 * noise(cell, 1)), list(norm))


def opposite(cell: Cell) -> Numbers:
    """The gap falls when WCI rises."""
    index = 100 + 10 * noise(cell, 0)
    return curves(list(index), list(5 - 0.01 * index + 0.001 * noise(cell, 1)))


def only_time(cell: Cell) -> Numbers:
    """Both grow, and have nothing else in common."""
    ramp = np.arange(len(EPOCHS))
    return curves(list(100 + 10 * ramp + noise(cell, 0)), list(0.1 + 0.01 * ramp + 0.001 * noise(cell, 1)))


def apart(cell: Cell) -> Numbers:
    return curves(list(100 + noise(cell, 0)), list(0.1 + 0.01 * noise(cell, 1)))


def factors(cell: Cell, norm: tuple[float, float], root: tuple[float, float]) -> Numbers:
    """Factors of the bound that change by e to these powers before and after the drop at epoch 16."""
    time = [(min(epoch, 16) - 2) / 14 for epoch in EPOCHS], [max(epoch - 16, 0) / 16 for epoch in EPOCHS]
    wobble = 1 + 0.01 * cell.seed
    sizes = [math.exp(wobble * (norm[0] * a + norm[1] * b)) for a, b in zip(*time, strict=True)]
    roots = [math.exp(root[0] * a + root[1] * b) for a, b in zip(*time, strict=True)]
    both = curves([s * r for s, r in zip(sizes, roots, strict=True)], EPOCHS, sizes)
    moved = {"weight_norm": (wobble * norm[0], wobble * norm[1]), "root_trace": root}
    names = {f"{part} {when}": two[k] for part, two in moved.items() for k, when in enumerate(("before", "after"))}
    return both | {"drop": 16.0} | names


def rates(cell: Cell, gains: dict[str, float], best: float = 0.0) -> Numbers:
    robust = 70 + cell.seed + gains.get(cell.row, 0.0) + 0.05 * noise(cell, 3)[0]
    values = only_time(cell) | {"last robust": robust, "best robust": robust + best, "last clean": 95.0}
    values |= {"last AutoAttack": robust - 5, "best AutoAttack": robust + best - 5}
    return values | {f"last {name}": series[-1] for name, series in values["curves"].items()}


def anything(cell: Cell) -> Numbers:
    return rates(cell, {}) | factors(cell, (1.0, 0.1), (0.2, 0.8))
