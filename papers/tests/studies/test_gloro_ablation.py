"""Claims and tables of handmade accuracies; pairs of the published grid."""

from __future__ import annotations

import pytest

from atoll.stats import Estimate
from atoll_papers.studies.gloro_ablation import GRIDS, pairs
from study_cases import STUDIES, outcomes, results_of

STUDY = STUDIES["gloro-ablation"]
ABLATION = list(GRIDS["cpu"].recipes)


def ablation(emma: float = 0, liresnet: float = 0, depth: float = 0, others: float = 0) -> dict[str, float]:
    """VRA by row; the arguments say what each part of its name adds."""
    vra = {}
    for row in ABLATION:
        loss, block, blocks = row.split("-")
        vra[row] = 50 + emma * (loss == "emma") + liresnet * (block == "liresnet")
        vra[row] += (depth if block == "liresnet" else others) * int(blocks[1:])
    return vra


@pytest.mark.parametrize(
    ("vra", "expected"),
    [
        (ablation(emma=2, liresnet=9, depth=1, others=-1), ["supported", "supported", "supported", "supported"]),
        (ablation(emma=-2, liresnet=-9, depth=-1, others=1), ["contradicted"] * 4),
        (ablation(emma=2, liresnet=9, depth=1, others=1), ["supported", "supported", "supported", "contradicted"]),
    ],
)
def test_claims(vra: dict[str, float], expected: list[str]) -> None:
    assert outcomes(STUDY, results_of(vra)) == expected
    assert outcomes(STUDY, results_of(vra, seeds=1)) == ["not testable"] * 4


def test_tables() -> None:
    tables = STUDY.tables(results_of(ablation(emma=2, depth=1)))
    loss, block, full = tables.values()
    assert [column.name for column in loss.columns] == ["liresnet, l4", "convnet, l4"]
    vra = {row: values[1].value for row, values in loss.rows.items() if isinstance(values[1], Estimate)}
    assert vra == pytest.approx({"trades": 50.033, "emma": 52.033}, abs=1e-3)
    assert [loss.mark(row, 1) for row in loss.rows] == [None, "best"]  # the better loss, not the better network
    assert [column.name for column in block.columns] == ["emma, l4", "emma, l2", "emma, l8"]
    assert len(full.rows) == len(ABLATION) == 11


def test_pairs_of_the_published_grid() -> None:
    grid = list(GRIDS["paper"].recipes)
    assert len([row for row in grid if row.startswith("tiny-")]) == 2 + 1 + 6
    assert len(pairs(grid, "loss")) == 6  # three data sets, two blocks
    # EMMA: two data sets, three depths, two blocks, and the ConvNet on Tiny-ImageNet; TRADES: ConvNets on all three.
    assert len(pairs(grid, "block")) == 2 * 3 * 2 + 1 + 3
    assert ("cifar10-emma-liresnet-l36", "cifar10-emma-liresnet-l6") in pairs(grid, "depth")
    assert all(set(pair) <= set(grid) for which in ("loss", "block", "depth") for pair in pairs(grid, which))
