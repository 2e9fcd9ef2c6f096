"""Studies of GloRo Nets: verdicts on numbers made by hand, cells that are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from atoll.runs.train import train
from atoll.stats import Estimate
from atoll.studies import Cell, StudyResults
from atoll.studies.base import SCALES
from atoll_papers.studies.gloro_ablation import GRIDS, pairs
from atoll_papers.studies.gloro_table import COMPARISONS
from atoll_papers.studies.measure import certified, certified_as_trained
from made import STUDIES

WIGGLE = (0.0, 0.3, -0.2)  # of the seeds
ABLATION, TABLE = list(GRIDS["cpu"].recipes()), COMPARISONS["paper"]


def of(vra: Mapping[str, float], scale: str = "cpu", seeds: int = 3) -> StudyResults:
    return StudyResults(
        scale,  # type: ignore[arg-type]
        {
            Cell(row, seed): {"clean": value + 20, "ERA": value + 10, "VRA": value + WIGGLE[seed]}
            for row, value in vra.items()
            for seed in range(seeds)
        },
    )


def outcomes(name: str, results: StudyResults) -> list[str]:
    return [claim.outcome for claim in STUDIES[name].report(results).claims]


def ablation(emma: float = 0, liresnet: float = 0, depth: float = 0, others: float = 0) -> dict[str, float]:
    """What each part of a row's name adds to its VRA."""
    found = {}
    for row in ABLATION:
        loss, block, blocks = row.split("-")
        found[row] = 50 + emma * (loss == "emma") + liresnet * (block == "liresnet")
        found[row] += (depth if block == "liresnet" else others) * int(blocks[1:])
    return found


@pytest.mark.parametrize(
    ("vra", "expected"),
    [
        (ablation(emma=2, liresnet=9, depth=1, others=-1), ["supported", "supported", "supported", "supported"]),
        (ablation(emma=-2, liresnet=-9, depth=-1, others=1), ["contradicted"] * 4),
        (ablation(emma=2, liresnet=9, depth=1, others=1), ["supported", "supported", "supported", "contradicted"]),
    ],
)
def test_ablation(vra: dict[str, float], expected: list[str]) -> None:
    assert outcomes("gloro-ablation", of(vra)) == expected
    assert outcomes("gloro-ablation", of(vra, seeds=1)) == ["not testable"] * 4


def test_tables_of_the_ablation() -> None:
    tables = STUDIES["gloro-ablation"].report(of(ablation(emma=2, depth=1))).tables
    loss, block, full = tables.values()
    assert [column.name for column in loss.columns] == ["liresnet, l4", "convnet, l4"]
    found = {row: values[1].value for row, values in loss.rows.items() if isinstance(values[1], Estimate)}
    assert found == pytest.approx({"trades": 50.033, "emma": 52.033}, abs=1e-3)
    assert [loss.mark(row, 1) for row in loss.rows] == [None, "best"]  # the better loss, not the better net
    assert [column.name for column in block.columns] == ["emma, l4", "emma, l2", "emma, l8"]
    assert len(full.rows) == len(ABLATION) == 11


def test_pairs_of_the_published_grid() -> None:
    grid = list(GRIDS["paper"].recipes())
    assert len([row for row in grid if row.startswith("tiny-")]) == 2 + 1 + 6
    assert len(pairs(grid, "loss")) == 6  # three data sets, two blocks
    # EMMA: two data sets, three depths, two blocks, and the ConvNet on Tiny-ImageNet; TRADES: ConvNets on all three.
    assert len(pairs(grid, "block")) == 2 * 3 * 2 + 1 + 3
    assert ("cifar10-emma-liresnet-l36", "cifar10-emma-liresnet-l6") in pairs(grid, "depth")
    assert all(set(pair) <= set(grid) for which in ("loss", "block", "depth") for pair in pairs(grid, which))


@pytest.mark.parametrize(
    ("more", "expected"),
    [(0.0, "supported in part"), (3.0, "supported"), (-3.0, "contradicted")],
    ids=["same", "above", "below"],
)
def test_against_the_best_earlier_ones(more: float, expected: str) -> None:
    vra = {row: (net.published or 0) + more for row, net in TABLE.nets.items()}
    found = of(vra, "paper")
    findings = STUDIES["gloro-table"].report(found)
    assert findings.claims[0].outcome == expected
    assert [claim.outcome for claim in findings.claims[1:]] == ["supported", "supported"]  # the thesis's own numbers
    assert findings.tables["Accuracy in %"].rows["ImageNet, L18W588, EMMA"][3] == Estimate(35.0)


@pytest.mark.parametrize(("vra", "expected"), [(60.0, "supported"), (30.0, "not testable")])
def test_nets_with_less_data_can_only_win(vra: float, expected: str) -> None:
    rows = dict.fromkeys(COMPARISONS["cpu"].nets, vra)
    assert STUDIES["gloro-table"].report(of(rows, seeds=2)).claims[0].outcome == expected


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["gloro-table", "gloro-ablation", "lipschitz-tightness", "threat-switching"])
def test_missing_cells(name: str, scale: str) -> None:
    study = STUDIES[name]
    cells = study.cells(scale)  # type: ignore[arg-type]
    numbers = {"clean": 90.0, "VRA": 50.0, "ERA": 60.0, "upper": 3.0, "lower": 2.0, "local": 1.0}
    numbers |= {"share": 66.7, "local share": 33.3, "mean": 10.0, "first half": 12.0}
    series = {"epochs": [2, 3], "switching": [12.0, 8.0]}
    for left in (cells[:1], cells[-1:]):
        lost = {cell: "it failed" for cell in cells if cell not in left}
        found = StudyResults(scale, dict.fromkeys(left, numbers | series), lost)  # type: ignore[arg-type]
        findings = study.report(found)
        assert {claim.outcome for claim in findings.claims} == {"not testable"}
        assert len(next(reversed(findings.tables.values())).rows) == len({cell.row for cell in cells})


def constants(standard: Sequence[float], gloro: Sequence[float], share: tuple[float, float]) -> StudyResults:
    return StudyResults(
        "cpu",
        {
            Cell(f"MNIST, {row}", seed): {
                "upper": upper,
                "lower": upper * part,
                "local": upper * part / 2,
                "share": 100 * part + 0.1 * WIGGLE[seed],
                "local share": 50 * part,
            }
            for row, uppers, part in (("standard", standard, share[0]), ("GloRo", gloro, share[1]))
            for seed, upper in enumerate(uppers)
        },
    )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (constants([5e4, 6e4, 5e4], [2.0, 2.1, 2.2], (0.003, 0.8)), ["supported", "supported", "supported"]),
        (constants([50, 60, 50], [2.0, 2.1, 2.2], (0.1, 0.8)), ["supported in part", "supported", "supported"]),
        (constants([2.0, 2.1, 2.2], [2.1, 2.0, 2.3], (0.8, 0.5)), ["contradicted", "contradicted", "contradicted"]),
    ],
)
def test_tightness(results: StudyResults, expected: list[str]) -> None:
    assert outcomes("lipschitz-tightness", results) == expected


@pytest.mark.parametrize(("slope", "expected"), [(1.0, "supported"), (-1.0, "contradicted")])
def test_threats(slope: float, expected: str) -> None:
    found = StudyResults(
        "cpu",
        {
            Cell(f"{classes} classes", seed): {
                "epochs": [2, 3],
                "switching": [9.0, 8.0],
                "mean": 30 + slope * classes + WIGGLE[seed],
                "first half": 9.0,
            }
            for classes in (3, 5, 10)
            for seed in range(3)
        },
    )
    assert outcomes("threat-switching", found) == [expected]


def test_what_is_measured_is_what_training_measured(tmp_path: Path) -> None:
    short = ("model.widths=[8, 8]", "model.hidden=16", "trainer.epochs=6", "threat.eps=0.1", "data.validation=0")
    run = train("digits-gloro", *short, out=tmp_path / "run")
    assert run.result is not None
    found = certified(run, [0.1, 0.3], attacks="PGD-20", check=5, which="last")
    last = run.result["last"]
    assert found["clean"] == pytest.approx(100 * last["clean"]["value"])
    assert found["VRA 0.1"] == pytest.approx(100 * last["vra"]["value"])
    assert 0 < found["VRA 0.3"] <= found["VRA 0.1"] <= found["ERA 0.1"] <= found["clean"]
    assert found["attacked"] == 5
    assert found["curve"]["verified"][0] * 100 == pytest.approx(found["clean"])
    same = certified_as_trained(run, points=None, attacks="PGD-20", check=0)
    assert same == {"clean": found["clean"], "VRA": found["VRA 0.1"], "ERA": found["ERA 0.1"]}
