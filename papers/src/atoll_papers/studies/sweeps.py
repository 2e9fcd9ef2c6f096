"""Sensitivity of a method to one parameter, with everything else fixed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

from atoll.modules import evaluation_mode
from atoll.runs.recipe import build_recipe
from atoll.runs.run import Run
from atoll.runs.train import build_trainer
from atoll.studies.base import Cell, Claim, Numbers, StudyResults
from atoll.studies.claims import claim_equivalent, claim_increase
from atoll.studies.table import Column, Table
from atoll.training.methods.base import Step
from atoll_papers.studies.measure import (
    ROBUST,
    RecipeStudy,
    Setting,
    accuracies,
    accuracy_table,
    describe_evaluation,
    mean_table,
)

LITTLE = 1.0  # percentage points of accuracy
BATCH = 256  # points that share a sample of the noise
LAMBDAS = (1e-5, 1e-4, 5e-4, 1e-3, 1e-2)
PUBLISHED_LAMBDAS = (1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2)
SIGMAS = (0.0, 1e-4, 1e-3, 1e-2)
ETAS = (0.05, 0.1, 0.2, 0.3, 0.4)


@dataclass(frozen=True)
class Sweep(Setting):
    """Recipes by curve, and values of the parameter."""

    values: Sequence[float]


class ParameterSweep(RecipeStudy[Sweep]):
    """Base class of studies that vary one parameter.

    Attributes:
        key: key of the parameter in recipes.
        symbol: symbol of the parameter.
        attacks: attacks besides AutoAttack.
    """

    key: str
    symbol: str
    attacks: tuple[str, ...] = ("PGD-20",)

    def row(self, curve: str, value: float) -> str:
        return f"{curve}, {self.symbol} = {value:g}"

    def recipes(self, setting: Sweep) -> Mapping[str, Sequence[str]]:
        return {
            self.row(curve, value): (*recipe, f"{self.key}={value}")
            for curve, recipe in setting.recipes.items()
            for value in setting.values
        }

    def measure_run(self, run: Run, cell: Cell, setting: Sweep) -> Numbers:
        """Measure the best checkpoint, as in the papers."""
        return accuracies(
            run, points=setting.points, attacks=self.attacks, autoattack=setting.attacks, as_rat=setting.as_rat
        )

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        return {"Accuracy in %": accuracy_table(results, "clean", *self.attacks, "AutoAttack")}

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        sweep = self.settings[results.scale]
        figure = Figure(figsize=(6, 4), layout="constrained")
        axis = figure.subplots()
        for curve in sweep.recipes:
            means = {value: results.mean(self.row(curve, value), "AutoAttack") for value in sweep.values}
            known = {value: mean for value, mean in means.items() if mean is not None}
            heights, errors = [m.value for m in known.values()], [m.standard_error for m in known.values()]
            axis.errorbar(list(known), heights, errors, marker="o", capsize=2, label=curve)
        smallest = min(value for value in sweep.values if value)
        axis.set_xscale("symlog", linthresh=smallest)  # logarithmic, but includes 0
        axis.set_xlim(left=0 if 0 in sweep.values else smallest / 2)
        axis.set_xticks(sweep.values, [f"{value:g}" for value in sweep.values])
        axis.minorticks_off()
        axis.set_xlabel(self.symbol)
        axis.set_ylabel("accuracy under AutoAttack, %")
        axis.legend()
        return {"sweep": figure}

    def notes(self, results: StudyResults) -> Sequence[str]:
        sweep = self.settings[results.scale]
        recipes = ", ".join(f"`{' '.join(recipe)}` ({curve})" for curve, recipe in sweep.recipes.items())
        evaluation = describe_evaluation(sweep.points, sweep.attacks, as_rat=sweep.as_rat)
        return [f"Best checkpoints of the recipes {recipes}. {evaluation}"]

    def best(self, results: StudyResults, curve: str, value: float) -> Claim:
        """Whether one value of the parameter is better than all others."""
        others = [other for other in self.settings[results.scale].values if other != value]
        pairs = [(self.row(curve, value), self.row(curve, other)) for other in others]
        claim = f"{curve}: {self.symbol} = {value:g} has the highest accuracy under AutoAttack"
        return claim_increase(claim, results, pairs, "AutoAttack")


class TrHLambda(ParameterSweep):
    """Robust accuracy for different weights of TrH."""

    name = "trh-lambda"
    title = "Sensitivity of TrH to its weight"
    reference = "TrH, figure 3"
    key, symbol = "methods.0.lambda_", "λ"
    published, plateau = 5e-4, (1e-4, 5e-4, 1e-3)
    settings = {  # noqa: RUF012
        "smoke": Sweep({"AT": ("digits-flat/at-trh",)}, (1e-4, 5e-4), **ROBUST["smoke"]),
        "cpu": Sweep({"AT": ("mnist-flat/at-trh",), "TRADES": ("mnist-flat/trades-trh",)}, LAMBDAS, **ROBUST["cpu"]),
        "paper": Sweep(
            {"AT": ("trh-imagenet/linf-vit_l16-at-trh",), "TRADES": ("trh-imagenet/linf-vit_l16-trades-trh",)},
            PUBLISHED_LAMBDAS,
            seeds=2,  # the paper has one seed, which cannot distinguish an effect from chance
        ),
    }

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        low, _, high = self.plateau
        curves = self.settings[results.scale].recipes
        claim = f"Little degradation (at most {LITTLE:g} point) for λ from {low:g} to {high:g}"
        ends = [(self.row(c, v), self.row(c, self.published)) for c in curves for v in (low, high)]
        return [
            *(self.best(results, curve, self.published) for curve in curves),
            claim_increase(claim, results, ends, "AutoAttack", -LITTLE),
        ]


class RATEta(ParameterSweep):
    """Robust accuracy for different weights of RAT's Taylor terms."""

    name = "rat-eta"
    title = "Sensitivity of RAT to its weight"
    reference = "RAT, table 1"
    key, symbol = "methods.0.eta", "η"
    attacks = ("PGD-20", "CW-20")
    published = {"first term": 0.3, "first and second": 0.2}  # noqa: RUF012
    settings = {  # noqa: RUF012
        "smoke": Sweep({"first term": ("digits-flat/at-rat", "methods.0.order=1")}, (0.2, 0.3), **ROBUST["smoke"]),
        "cpu": Sweep(
            {
                "first term": ("mnist-flat/trades-rat", "methods.0.order=1"),
                "first and second": ("mnist-flat/trades-rat",),
            },
            ETAS,
            **ROBUST["cpu"],
        ),
        "paper": Sweep(
            {"first term": ("rat-eta/1st-0.3",), "first and second": ("rat-eta/both-0.2",)}, ETAS, as_rat=True
        ),
    }

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        curves = self.settings[results.scale].recipes
        return [self.best(results, curve, eta) for curve, eta in self.published.items() if curve in curves]


class RATSigma(ParameterSweep):
    """Accuracy and strength of the training attack for different noise levels of RAT."""

    name = "rat-sigma"
    title = "How much noise RAT needs"
    reference = "RAT, section 4: sigma = 0.01 in the text, 0.0001 in the authors' code"
    key, symbol = "methods.0.sigma", "σ"
    attacks = ("PGD-20", "CW-20")
    settings = {  # noqa: RUF012
        "smoke": Sweep({"TRADES": ("digits-flat/trades-rat",)}, (0.0, 1e-2), **ROBUST["smoke"]),
        "cpu": Sweep({"AT": ("mnist-flat/at-rat",), "TRADES": ("mnist-flat/trades-rat",)}, SIGMAS, **ROBUST["cpu"]),
        "paper": Sweep({"TRADES": ("rat/cifar10-preact18-linf-trades-both",)}, SIGMAS, as_rat=True),
    }

    def measure_run(self, run: Run, cell: Cell, setting: Sweep) -> Numbers:
        return super().measure_run(run, cell, setting) | {"crafted": crafted_accuracy(run, setting.points)}

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        columns = {name: Column(name, "high") for name in ("clean", *self.attacks, "AutoAttack")}
        return {"Accuracy in %": mean_table(results, columns | {"crafted": Column("training attack")})}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        sweep = self.settings[results.scale]
        rows = {curve: [self.row(curve, value) for value in sweep.values] for curve in sweep.recipes}
        weaker = f"σ = {sweep.values[-1]:g} weakens the training attack"
        return [
            *(
                claim_equivalent(
                    f"{curve}: σ does not affect accuracy under AutoAttack (within {LITTLE:g} point)",
                    results,
                    each,
                    "AutoAttack",
                    LITTLE,
                )
                for curve, each in rows.items()
            ),
            claim_increase(weaker, results, [(each[-1], each[0]) for each in rows.values()], "crafted"),
        ]

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            *super().notes(results),
            "The training attack crafts its inputs with noise on the weights, as in training, but is evaluated without"
            " noise. A lower accuracy means a stronger attack.",
        ]


def crafted_accuracy(run: Run, points: int | None) -> float:
    """Accuracy in % of the best checkpoint on test points under its training attack, including the noise."""
    trainer = build_trainer(build_recipe(run.recipe))
    trainer.model.load_state_dict(run.model("best").state_dict())
    assert trainer.attack is not None
    x, y = run.data.tensors("test", points)
    correct = 0
    for number, index in enumerate(torch.arange(len(y)).chunk(math.ceil(len(y) / BATCH))):
        x_part, y_part = x[index].to(trainer.device), y[index].to(trainer.device)
        step = Step(x_part, y_part, index, number, 0.0, eps=run.threat.radius)
        with ExitStack() as noise:
            for method in trainer.methods:
                noise.enter_context(method.around_attack(trainer, step))
            x_adv = trainer.attack(trainer.model, step.x, step.y, seed=(trainer.seed, "crafted"), index=index)
        with torch.no_grad(), evaluation_mode(trainer.model):
            correct += int((trainer.model(x_adv).argmax(1) == step.y).sum())
    return 100 * correct / len(y)
