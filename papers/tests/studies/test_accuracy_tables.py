"""Tables of robust accuracy compare rows that exist."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.attacks import PGD
from atoll.attacks.measure import AttackSettings
from atoll.attacks.suites import get_attack
from atoll.errors import InputError
from atoll.studies import run_study
from atoll.studies.base import SCALES, Cell, Scale, StudyResults
from atoll.studies.engine import CellOutcome, CellRunner
from atoll.threat import ThreatModel
from atoll_papers.studies.accuracy_tables import AccuracyTable
from atoll_papers.studies.measure import accuracies
from study_cases import STUDIES


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("study", [s for s in STUDIES.values() if isinstance(s, AccuracyTable)], ids=lambda s: s.name)
def test_every_scale_has_pairs_to_compare(study: AccuracyTable, scale: Scale) -> None:
    results = StudyResults(scale, {cell: {} for cell in study.cells(scale)})
    pairs = study.pairs(results)
    assert pairs
    assert {row for pair in pairs for row in pair} <= set(results.rows)


@pytest.mark.parametrize(
    ("gain", "expected"), [((2.0, 0.0), "supported"), ((-2.0, 0.0), "contradicted"), ((0.0, 0.3), "inconclusive")]
)
def test_claims_of_rat_are_about_the_best_checkpoint(gain: tuple[float, float], expected: str) -> None:
    study = STUDIES["rat-table"]
    mean, slope = gain
    numbers = {
        cell: {
            f"{which} {name}": 50.0
            + cell.seed
            + (cell.row.endswith("both") and sign * (mean + slope * (cell.seed - 1)))
            for which, sign in (("best", 1), ("last", -1))
            for name in ("clean", "PGD-20", "CW-20", "AutoAttack")
        }
        for cell in study.cells("paper")
    }
    results = StudyResults("paper", numbers)
    assert [claim.outcome for claim in study.claims(results)] == [expected] * 4  # clean, PGD-20, CW-20, AutoAttack
    (table,) = study.tables(results).values()
    assert [column.name for column in table.columns][:4] == [
        "best: clean",
        "best: PGD-20",
        "best: CW-20",
        "best: AutoAttack",
    ]


def test_rat_has_the_rows_of_the_paper() -> None:
    """Tables 2 (12 rows of TRADES and AWP), 3 (6), 5 (8) and 8 (2), and of table 1 what the others compare with (3)."""
    rows = {cell.row for cell in STUDIES["rat-table"].cells("paper")}
    assert len(rows) == 12 + 6 + 8 + 2 + 3
    count = {
        pattern: sum(fnmatch.fnmatchcase(row, pattern) for row in rows)
        for pattern in ("*-wrn34-linf-*", "*-l2-*", "*-vgg16-*", "*-mobilenetv2-*", "*-at-*", "svhn-*", "*-1st")
    }
    assert list(count.values()) == [12, 6, 4, 4, 2, 2, 5]


def test_rat_attacks_with_its_own_radius_and_step() -> None:
    for name, objective in (("RAT-PGD-20", "ce"), ("RAT-CW-20", "margin")):
        attack = get_attack(name, ThreatModel("linf", "0.031"))
        assert isinstance(attack, PGD)
        assert (attack.objective, attack.steps, attack.step_size, attack.threat.radius) == (objective, 20, 0.003, 0.031)


@pytest.mark.parametrize(
    ("norm", "expected"), [("linf", ("RAT-PGD-20,RAT-CW-20", "0.031")), ("l2", ("PGD-20,CW-20", None))]
)
def test_measured_attacks(norm: str, expected: tuple[str, str | None]) -> None:
    class Recorder:
        threat = ThreatModel(norm, "8/255")  # type: ignore[arg-type]

        def measure(self, settings: AttackSettings, **place: str) -> SimpleNamespace:
            asked.append((settings.attacks, settings.eps))
            accuracy = dict.fromkeys(("clean", *settings.attacks.split(",")), SimpleNamespace(value=0.5))
            return SimpleNamespace(
                accuracy=accuracy, robust=SimpleNamespace(value=0.5), estimate=SimpleNamespace(value=0.4), warnings=[]
            )

    asked: list[tuple[str, str | None]] = []
    numbers = accuracies(Recorder(), attacks=("PGD-20", "CW-20"), autoattack="fast", as_rat=True)  # type: ignore[arg-type]
    assert asked == [expected, ("fast", None)]
    assert numbers == {"clean": 50.0, "PGD-20": 50.0, "CW-20": 50.0, "AutoAttack": 40.0, "alarms": []}


def test_the_paper_scale_of_trh_needs_weights_and_images(tmp_path: Path) -> None:
    """One sentence that names the override, before anything is trained; an explicit null is allowed."""
    for name, overrides, missing in (
        ("trh-table", [], "pretrained=FILE"),
        ("trh-table", ["pretrained=weights.npz"], "data.extra=FILE"),
        ("trh-table", ["*-vit_*:pretrained=weights.npz", "data.extra=null"], "hybrid_l16"),
        ("trh-lambda", ["data.root=imagenet"], "pretrained=FILE"),
    ):
        with pytest.raises(InputError, match=missing) as error:
            run_study(STUDIES[name], "paper", tmp_path, overrides=overrides)
        assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())

    def stop(runner: CellRunner, cells: Sequence[Cell]) -> Iterator[CellOutcome]:
        raise KeyboardInterrupt

    for name in ("trh-table", "trh-lambda", "rat-table"):
        overrides = ["pretrained=null", "data.extra=null"] if name != "rat-table" else []
        with pytest.raises(KeyboardInterrupt):  # it would start
            run_study(STUDIES[name], "paper", tmp_path, overrides=overrides, engine=stop)
