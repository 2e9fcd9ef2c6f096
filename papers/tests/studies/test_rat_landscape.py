"""Shapes of known losses; claims about handmade numbers."""

from __future__ import annotations

import pytest
import torch

from atoll.studies import Cell
from atoll.studies.base import Numbers
from atoll_papers.studies.rat_landscape import RATLandscape, shape
from study_cases import make_results, outcomes


def test_shape_of_a_bowl() -> None:
    """a^2 + 2 b^2 on a grid of step h bends by 2 h^2 and 4 h^2, and rises by that of the corner."""
    grid = torch.linspace(-1, 1, 5, dtype=torch.float64)
    values = shape(grid[:, None] ** 2 + 2 * grid[None, :] ** 2)
    assert values["rise"] == pytest.approx(3.0)
    assert values["bend"] == pytest.approx((2 + 4) / 2 * 0.5**2)


def numbers(cell: Cell) -> Numbers:
    ours = cell.row.endswith("RAT")
    grids = [[[0.0, 1.0, 0.0]] * 3] * 2
    return {"rise": 2.0 - ours + 0.01 * cell.seed, "bend": 1.0 + 0.01 * cell.seed, "grids": grids, "radius": 0.1}


def test_claims() -> None:
    study = RATLandscape()
    assert outcomes(study, make_results(study, numbers)) == ["supported", "contradicted"]


@pytest.mark.parametrize("row", RATLandscape.rows)
def test_missing_rows(row: str) -> None:
    study = RATLandscape()
    assert outcomes(study, make_results(study, numbers, failed=lambda cell: cell.row == row)) == ["not testable"] * 2
