"""What attackers that cannot look into the model find, against attacks by hand; verdicts on numbers made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.attacks import PGD
from atoll.runs.train import train
from atoll.studies import Cell
from atoll.studies.base import Numbers
from atoll_papers.studies.black_box import RaySTable, TransferTable
from atoll_papers.studies.measure import TINY_DIGITS
from made import made, outcomes


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


def test_verdicts() -> None:
    assert outcomes(TransferTable(), made(TransferTable(), numbers)) == ["supported", "contradicted"]
    assert outcomes(RaySTable(), made(RaySTable(), numbers)) == ["supported", "supported in part"]


@pytest.mark.parametrize("study", [TransferTable(), RaySTable()], ids=lambda study: study.name)
@pytest.mark.parametrize("ending", ["RAT", "TRADES", "AWP", "surrogate"])
def test_lost_rows(study: TransferTable | RaySTable, ending: str) -> None:
    found = made(study, numbers, lost=lambda cell: not cell.row.endswith(ending))
    if found.numbers:
        assert set(outcomes(study, found)) == {"not testable"}


def test_transferred_inputs_are_those_of_the_surrogate(tmp_path: Path) -> None:
    """Made again by hand: PGD on the surrogate, then a plain pass of the defender."""
    study = TransferTable()
    cells = {cell.row.partition(": ")[2]: cell for cell in study.cells("smoke")}
    runs = {
        title: train(cell.recipe, *cell.overrides, "trainer.epochs=4", out=tmp_path / cell.name)
        for title, cell in cells.items()
        if title != "AWP"
    }
    defender = cells["AWP + RAT"]
    assert defender.depends_on == (cells["surrogate"].name,)
    found = study.measure(defender, runs["AWP + RAT"], "smoke", {"surrogate": runs["surrogate"]})
    x, y = runs["surrogate"].data.tensors("test", 20)
    model = runs["AWP + RAT"].model()
    threat = runs["surrogate"].threat
    attack = PGD(threat, steps=20, step_size=threat.radius / 4)
    with torch.no_grad():
        # Only these are attacked; in another batch, rounding would be another, and the signs of PGD with it.
        right = (model(x).argmax(1) == y).nonzero().squeeze(1)
    x_adv = attack(runs["surrogate"].model(), x[right], y[right], seed=("evaluation", "PGD-20"), index=right)
    with torch.no_grad():
        standing = (model(x_adv).argmax(1) == y[right]).sum().item()
    assert found["PGD-20"] == pytest.approx(100 * standing / 20)
    assert study.measure(cells["surrogate"], runs["surrogate"], "smoke", {}) == {}


def test_rays_leaves_no_more_than_is_right_without_an_attack(tmp_path: Path) -> None:
    study = RaySTable()
    cell = study.cells("smoke")[0]
    run = train("digits-flat/trades-base", *TINY_DIGITS, "trainer.epochs=4", out=tmp_path / "run")
    found = study.measure(cell, run, "smoke", {})
    x, y = run.data.tensors("test", 10)
    with torch.no_grad():
        assert found["clean"] == pytest.approx(100 * (run.model()(x).argmax(1) == y).double().mean().item())
    assert 0 <= found["RayS"] <= found["clean"]
    assert found["ADBD"] > 0
