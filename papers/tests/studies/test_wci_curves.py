"""Claims about handmade curves and factors."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from atoll.studies import Cell
from atoll.studies.base import Numbers
from atoll_papers.studies.wci_curves import WCICurves, WCIParts
from study_cases import make_results, outcomes
from wci_cases import apart, factors, only_time, together


@pytest.mark.parametrize(
    ("numbers", "expected"), [(together, "supported"), (only_time, "supported"), (apart, "contradicted")]
)
def test_curves(numbers: Callable[[Cell], Numbers], expected: str) -> None:
    study = WCICurves()
    assert outcomes(study, make_results(study, numbers)) == [expected, expected]


@pytest.mark.parametrize(
    ("norm", "root", "expected"),
    [
        ((1.0, 0.1), (0.2, 0.8), ["supported", "supported"]),
        ((-1.0, 0.1), (0.2, -0.8), ["supported", "supported"]),  # only absolute values count
        ((0.1, 1.0), (-0.9, 0.1), ["contradicted", "contradicted"]),
    ],
)
def test_parts(norm: tuple[float, float], root: tuple[float, float], expected: list[str]) -> None:
    study = WCIParts()
    assert outcomes(study, make_results(study, lambda cell: factors(cell, norm, root))) == expected
