"""Claims about handmade numbers, missing cells, and networks that start from others."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from atoll.studies import Cell, StudyResults
from atoll.studies.base import Numbers
from atoll_papers.studies.locality import DISTANCES, LOSSES, METHODS, SCORES, over_nets, robust_minus_standard
from study_cases import STUDIES

SEEDS, NETS = range(3), ("small", "medium", "large")


def net(clean: float, f1: float, distance: float, relative: float) -> Numbers:
    numbers: Numbers = {f"{method} {score}": f1 for method in METHODS for score in SCORES}
    numbers |= {f"{method} undefined": 0 for method in METHODS}
    numbers |= dict.fromkeys(DISTANCES, distance) | {f"{name}, relative": relative for name in DISTANCES}
    return numbers | {"clean": clean, "PGD-20": clean / 2, "points": 100, "share of the box": 0.3}


def make(gain: float = 0.1, closer: float = 0.5, relative: float = 1.0, trend: float = 0.0) -> StudyResults:
    """Robust networks gain in F1 and have ``closer`` times the distance; ``trend`` is the slope of F1 over accuracy."""
    rng = np.random.default_rng(0)
    cells: dict[Cell, Numbers] = {}
    for size in NETS:
        for seed in SEEDS:
            clean = rng.uniform(0.6, 0.9)
            epochs = [
                net(c, trend * c + (0 if trend else 0.01 * (-1) ** seed * k), 1, 1)
                for k, c in enumerate((0.2, 0.5, 0.7))
            ]
            cells[Cell(f"start, {size}", seed)] = {"epochs": epochs}
            base = 0.4 + trend * clean + (0 if trend else 0.001 * ((7 * seed + 4 * len(size)) % 9))
            cells[Cell(f"standard, {size}", seed)] = net(clean, base, 2.0 + seed, 1.0)
            for loss in LOSSES[1:]:
                cells[Cell(f"{loss}, {size}", seed)] = net(
                    clean, base + gain * (1 + 0.1 * seed), closer * (2.0 + seed) * (1 + 0.01 * seed), relative + 0.01
                )
    return StudyResults("cpu", cells)


def outcomes(name: str, results: StudyResults) -> list[str]:
    return [claim.outcome for claim in STUDIES[name].report(results).claims]


@pytest.mark.parametrize(
    ("name", "numbers", "expected"),
    [
        ("locality-robustness", make(gain=0.1), ["supported"]),
        ("locality-robustness", make(gain=-0.1), ["contradicted"]),
        ("attribution-distance", make(closer=0.5, relative=0.5), ["supported", "supported"]),
        ("attribution-distance", make(closer=0.5, relative=1.0), ["supported", "contradicted"]),
        ("attribution-distance", make(closer=1.5, relative=1.0), ["contradicted", "contradicted"]),
        ("locality-accuracy", make(trend=0.5), ["contradicted"]),
        ("locality-accuracy", make(trend=-0.5), ["supported"]),
        ("locality-accuracy", make(trend=0.0), ["inconclusive"]),  # nothing shows, but nothing is excluded
    ],
)
def test_claims(name: str, numbers: StudyResults, expected: list[str]) -> None:
    assert outcomes(name, numbers) == expected


def test_one_attribution_without_a_gain_contradicts() -> None:
    numbers = make()
    for cell, values in numbers.numbers.items():
        if cell.row.startswith("trades"):
            values["IG f1"] -= 0.3
    (claim,) = STUDIES["locality-robustness"].report(numbers).claims
    assert claim.outcome == "contradicted"
    assert "trades, IG: -0." in claim.message


@pytest.mark.parametrize("name", ["locality-accuracy", "locality-robustness", "attribution-distance"])
@pytest.mark.parametrize("row", ["start, small", "standard, small", "at, large", "trades"])
def test_missing_cells(name: str, row: str) -> None:
    whole = make()
    left = {cell: numbers for cell, numbers in whole.numbers.items() if not cell.row.startswith(row) or cell.seed == 2}
    failed = {cell: "it failed" for cell in whole.numbers if cell not in left}
    assert STUDIES[name].report(StudyResults("cpu", left, failed)).claims
    only = {cell: numbers for cell, numbers in left.items() if cell == Cell("standard, small", 2)}
    assert outcomes(name, StudyResults("cpu", only))[0] == "not testable"


def test_differences_are_of_the_same_start() -> None:
    numbers = make(gain=0.1)
    assert sorted(robust_minus_standard(numbers, "at", "SM f1")) == pytest.approx(sorted([0.1, 0.11, 0.12] * 3))
    del numbers.numbers[Cell("standard, small", 1)]  # type: ignore[attr-defined]
    assert len(robust_minus_standard(numbers, "at", "SM f1")) == 8


def test_rank_correlation() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 8))
    nets = [{"clean": a, "F": b} for a, b in zip(x, y, strict=True)]
    truth = spearmanr(x, y)
    assert over_nets(nets, "F") == pytest.approx((truth.statistic, truth.pvalue))
    assert np.isnan(over_nets([{"clean": 0.5, "F": 1.0}, {"clean": 0.5, "F": 2.0}], "F")).all()
