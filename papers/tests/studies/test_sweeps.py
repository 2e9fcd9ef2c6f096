"""Claims of parameter sweeps about handmade accuracies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll import train
from atoll.attacks import PGD
from atoll.runs.recipe import build_recipe
from atoll.studies import Cell
from atoll.studies.base import Numbers
from atoll.training.methods import RAT
from atoll_papers.studies.sweeps import SIGMAS, RATEta, RATSigma, TrHLambda, crafted_accuracy
from study_cases import make_results, outcomes


def accuracy(cell: Cell, best: str, gap: float) -> Numbers:
    """The row with ``best`` in its name is ahead by ``gap``; seeds differ a little, equally in all rows."""
    number = 50.0 + cell.seed + (gap if cell.row.endswith(best) else 0.01 * cell.seed)
    return {"clean": 90.0, "PGD-20": number, "CW-20": number, "AutoAttack": number}


@pytest.mark.parametrize(
    ("best", "gap", "expected"),
    [
        ("= 0.0005", 0.5, ["supported", "supported", "supported"]),
        ("= 0.0005", 3.0, ["supported", "supported", "contradicted"]),  # both ends are 3 points below it
        ("= 0.01", 0.5, ["contradicted", "contradicted", "supported"]),
    ],
)
def test_trh_lambda(best: str, gap: float, expected: list[str]) -> None:
    study = TrHLambda()
    assert outcomes(study, make_results(study, lambda cell: accuracy(cell, best, gap))) == expected


def test_rat_eta() -> None:
    study = RATEta()
    assert outcomes(study, make_results(study, lambda cell: accuracy(cell, "first term, η = 0.3", 1.0))) == [
        "supported",
        "contradicted",
    ]


@pytest.mark.parametrize(
    ("gaps", "weaker", "expected"),
    [
        ((0.0, 0.1, 0.2, 0.3), 3.0, ["supported", "supported", "supported"]),
        ((0.0, 0.0, 0.0, 5.0), -3.0, ["contradicted", "contradicted", "contradicted"]),
        ((0.0, 0.0, 0.0, 0.9), 0.0, ["inconclusive", "inconclusive", "inconclusive"]),
    ],
)
def test_rat_sigma(gaps: tuple[float, ...], weaker: float, expected: list[str]) -> None:
    study = RATSigma()

    def numbers(cell: Cell) -> Numbers:
        number = SIGMAS.index(float(cell.row.rpartition("= ")[2]))
        wiggle = (0.0, 0.1, -0.1)[cell.seed] * (number == 3)
        robust = 50.0 + cell.seed + gaps[number] + wiggle
        crafted = 60.0 + weaker * (number == 3) + wiggle
        return {"clean": 90.0, "PGD-20": robust, "CW-20": robust, "AutoAttack": robust, "crafted": crafted}

    assert outcomes(study, make_results(study, numbers)) == expected


def test_sigmas_and_lambdas() -> None:
    sigma = [cell for cell in RATSigma().cells("cpu") if cell.row.startswith("AT") and cell.seed == 0]
    built = [build_recipe(cell.recipe or "", *cell.overrides).methods[0] for cell in sigma]
    assert [method.sigma for method in built if isinstance(method, RAT)] == [0.0, 1e-4, 1e-3, 1e-2]
    rows = {cell.row for cell in TrHLambda().cells("paper") if cell.row.startswith("AT")}
    assert rows == {f"AT, λ = {value:g}" for value in (1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2)}


def test_the_strength_of_the_crafted_attack(tmp_path: Path) -> None:
    """Without noise it is the attack of the training on the model itself; with a lot of noise it is harmless."""
    tiny = (
        "data.limit=300",
        "trainer.epochs=4",
        "attack.steps=2",
        "trainer.test_steps=0",
        "trainer.validation_steps=1",
    )
    run = train("digits-flat/at-rat", *tiny, "methods.0.sigma=0", out=tmp_path / "run")
    model, (x, y) = run.model("best"), run.data.tensors("test", 300)
    attack = PGD(run.threat, **run.recipe["attack"]["init_args"])
    parts = torch.arange(300).chunk(2)  # at most 256 points share a draw of the noise
    x_adv = torch.cat([attack(model, x[i], y[i], seed=(run.recipe["seed"], "crafted"), index=i) for i in parts])
    clean, crafted = (100 * (model(each).argmax(1) == y).double().mean().item() for each in (x, x_adv))
    assert crafted < clean
    assert crafted_accuracy(run, 300) == pytest.approx(crafted)
    run.recipe["methods"][0]["init_args"]["sigma"] = 100.0
    assert crafted_accuracy(run, 300) > (clean + crafted) / 2


def test_missing_cells() -> None:
    study = TrHLambda()
    results = make_results(
        study, lambda cell: accuracy(cell, "0.0005", 0.5), failed=lambda cell: cell.row == "AT, λ = 0.0005"
    )
    assert outcomes(study, results) == ["not testable", "supported", "not testable"]
    alone = make_results(
        study, lambda cell: accuracy(cell, "0.0005", 0.5), failed=lambda cell: cell.name != "at-0.001-2"
    )
    assert set(outcomes(study, alone)) == {"not testable"}
