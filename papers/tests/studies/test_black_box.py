"""Transferred attacks compared with attacks by hand; claims about handmade numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.attacks.suites import get_attack
from atoll.runs.run import Run
from atoll.runs.train import train
from atoll.studies import Cell
from atoll.studies.base import Numbers
from atoll_papers.studies.black_box import RaySTable, TransferTable
from study_cases import make_results, outcomes


def numbers(cell: Cell) -> Numbers:
    if cell.row.endswith("surrogate"):
        return {}
    better = cell.row.endswith("RAT")
    return {
        "clean": 90.0,
        "PGD-20": 60.0 + better + 0.1 * cell.seed,
        "CW-20": 60.0 - better + 0.1 * cell.seed,
        "ADBD": 0.04 + 0.002 * better + 0.001 * cell.seed,
        "RayS": 56.0 + better * (cell.seed - 0.5),
    }


def test_claims() -> None:
    transfer, rays = TransferTable(), RaySTable()
    assert outcomes(transfer, make_results(transfer, numbers)) == ["supported", "contradicted"]
    assert outcomes(rays, make_results(rays, numbers)) == ["supported", "inconclusive"]


ROWS = [(TransferTable(), ending) for ending in ("surrogate", "AWP", "RAT")]
ROWS += [(RaySTable(), ending) for ending in ("TRADES", "RAT")]


@pytest.mark.parametrize(("study", "ending"), ROWS, ids=lambda value: getattr(value, "name", value))
def test_one_row_proves_nothing(study: TransferTable | RaySTable, ending: str) -> None:
    results = make_results(study, numbers, failed=lambda cell: not cell.row.endswith(ending))
    assert results.numbers
    assert set(outcomes(study, results)) == {"not testable"}


def test_transferred_inputs_are_those_of_the_surrogate(tiny_run: Run, tmp_path: Path) -> None:
    """The same by hand: PGD on the surrogate, then a forward pass of the defender."""
    study = TransferTable()
    cells = {cell.row.partition(": ")[2]: cell for cell in study.cells("smoke")}
    defender = cells["AWP + RAT"]
    assert defender.depends_on == (cells["surrogate"].name,)
    run = train(defender.recipe, *defender.overrides, out=tmp_path / "run")
    result = study.measure(defender, run, "smoke", {"surrogate": tiny_run})
    x, y = run.data.tensors("test", study.setting(defender, "smoke").points)
    model, attack = run.model(), get_attack("PGD-20", run.threat)
    with torch.no_grad():
        # Only these are attacked.  In another batch, rounding would differ, and with it the signs of PGD.
        correct = (model(x).argmax(1) == y).nonzero().squeeze(1)
    x_adv = attack(tiny_run.model(), x[correct], y[correct], seed=(0, "PGD-20 (transfer)"), index=correct)
    with torch.no_grad():
        robust = (model(x_adv).argmax(1) == y[correct]).sum().item()
    assert result["PGD-20"] == pytest.approx(100 * robust / len(x))
    assert study.measure(cells["surrogate"], tiny_run, "smoke", {}) == {}
    (stored,) = (r for r in run.results("attack") if r.surrogate is not None)  # type: ignore[attr-defined]
    assert stored.surrogate.origin.run == tiny_run.folder.name  # type: ignore[attr-defined]


def test_rays_is_at_most_clean_accuracy(tiny_run: Run) -> None:
    study = RaySTable()
    result = study.measure(study.cells("smoke")[0], tiny_run, "smoke", {})
    x, y = tiny_run.data.tensors("test", 10)
    with torch.no_grad():
        assert result["clean"] == pytest.approx(100 * (tiny_run.model()(x).argmax(1) == y).double().mean().item())
    assert 0 <= result["RayS"] <= result["clean"]
    assert result["ADBD"] > 0
