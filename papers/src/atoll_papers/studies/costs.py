"""Time and peak memory of training steps relative to a baseline, on random images."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from atoll.data.base import batches
from atoll.distributed import default_device
from atoll.runs.recipe import build_recipe
from atoll.runs.run import Run
from atoll.runs.train import build_trainer
from atoll.studies.base import Cell, Claim, Numbers, Scale, Study, StudyResults
from atoll.studies.claims import claim_above, claim_increase
from atoll.studies.table import Column, Table
from atoll.training.methods import MeasureWCI
from atoll.training.trainer import Trainer
from atoll_papers.cost import Noise, added, alternate, peak_memory, seconds
from atoll_papers.studies.measure import mean_table

SMALL_VIT = "model={class_path: ViT, init_args: {patch_size: 4, width: 192, depth: 6, heads: 3}}"
EXACT = "exact"
NOTICED = 1.05  # a noticeable cost, relative to the baseline


def noisy(recipe: str, overrides: tuple[str, ...], shape: tuple[int, ...], points: int) -> Trainer:
    """The trainer of a recipe with random images, before its first step."""
    # The labels are also random; if the weights moved, exact Taylor terms would diverge within a few steps.
    built = build_recipe(recipe, *overrides, "optimizer.lr=1e-12", "pretrained=null")
    trainer = build_trainer(replace(built, data=Noise(shape, points)))
    for method in trainer.methods:
        method.setup(trainer)
    return trainer


def step(recipe: str, overrides: tuple[str, ...], shape: tuple[int, ...], pgd: int) -> Callable[[], object]:
    """A training step with ``pgd`` attack steps."""
    size = build_recipe(recipe, *overrides).trainer.batch_size
    return step_of(noisy(recipe, (*overrides, f"attack.steps={pgd}"), shape, size))


def step_of(trainer: Trainer) -> Callable[[], object]:
    """A training step on the first batch."""
    size = trainer.settings.batch_size
    batch = next(batches(trainer.data.train, [torch.arange(size)], device=trainer.device))
    return lambda: trainer.train_step(batch)


@dataclass(frozen=True)
class Costs:
    """Recipes and repetitions at a scale.

    Args:
        recipes: recipe of each method, followed by overrides for this method; the first is the baseline.
        shape: shape of the images.
        overrides: overrides for every recipe.
        rounds: number of alternating steps with and without the method.
        repeats: number of repetitions.
        memory: whether to measure peak memory, in separate processes.
    """

    recipes: Mapping[str, Sequence[str]]
    shape: tuple[int, ...]
    overrides: tuple[str, ...] = ()
    rounds: int = 11
    repeats: int = 3
    memory: bool = True


def smoke(recipes: Mapping[str, Sequence[str]]) -> Costs:
    """Settings for small recipes that take seconds."""
    return Costs(recipes, (1, 8, 8), ("trainer.batch_size=8",), rounds=3, repeats=1, memory=False)


class CostTable(Study):
    """Base class of studies that compare the cost of methods.

    The added time does not depend on the number of attack steps, but measurement noise grows with the duration of a
    step.  So the added time is measured with PGD-1 and compared with the duration of a step with PGD-10.
    """

    costs: Mapping[Scale, Costs]

    def cells(self, scale: Scale) -> list[Cell]:
        costs = self.costs[scale]
        return [Cell(row, repeat) for row in costs.recipes for repeat in range(costs.repeats)]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        costs = self.costs[scale]
        base, ours = (
            functools.partial(step, recipe, (*costs.overrides, *own), costs.shape)
            for recipe, *own in (next(iter(costs.recipes.values())), costs.recipes[cell.row])
        )
        whole = base(10)
        whole()
        length = min(seconds(whole) for _ in range(3))
        same = base.args == ours.args
        numbers: Numbers = {"time": 1.0 if same else 1 + added(ours(1), base(1), costs.rounds) / length}
        size = build_recipe(*base.args[:1], *costs.overrides).trainer.batch_size
        numbers["images"] = size / (length * numbers["time"])
        if costs.memory:
            device = default_device().type
            peaks = [
                peak_memory(functools.partial(make, 1), whole=True, device=device)
                for make in ([base] if same else [base, ours])
            ]
            numbers |= {"megabytes": peaks[-1] / 1e6, "memory": peaks[-1] / peaks[0]}
        return numbers

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        columns = {
            "time": Column("time / base", "low", 3),
            "images": Column("images per second", digits=1),
            "memory": Column("peak memory / base", "low", 3),
            "megabytes": Column("peak memory, MB", "low", 0),
        }
        return {"Cost": mean_table(results, columns)}

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            "Cost of a whole training step with PGD-10 on random images. Peak memory includes weights, optimizer state,"
            " averages and activations. Ratios compare neighboring measurements, so they are reliable on a busy"
            " machine; images per second are not. Repetitions replace seeds."
        ]


def _flat_minima(net: str, *overrides: str) -> Costs:
    titles = ("base", "TrH", "SWA", "S2O", "AWP")
    recipes = {title: [f"trh-cifar/cifar10-{net}-at-{title.lower()}"] for title in titles}
    return Costs(recipes, (3, 32, 32), (*overrides, "trainer.batch_size=32"))


class TrHCost(CostTable):
    """Time and memory of methods for flat minima."""

    name = "trh-cost"
    title = "Cost of methods for flat minima"
    reference = "TrH, table 2"
    published = 5.5 / 5.2  # images per second without and with TrH
    costs = {  # noqa: RUF012
        "smoke": smoke({"base": ["digits-flat/at-base"], "TrH": ["digits-flat/at-trh"]}),
        "cpu": _flat_minima("vit_b16", SMALL_VIT),
        "paper": _flat_minima("vit_l16"),
    }

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        pairs = [("TrH", row) for row in results.rows if row in ("SWA", "AWP")]
        time = f"TrH adds almost no time (published: {self.published:.2f} times the base)"
        memory = "TrH adds almost no memory (at most 1 %)"
        return [
            claim_above(time, {"TrH": results.values("TrH", "time")}, round(self.published, 2), sign=-1),
            claim_above(memory, {"TrH": results.values("TrH", "memory")}, 1.01, sign=-1),
            claim_increase("TrH takes less time than SWA and AWP", results, pairs, "time", sign=-1),
            claim_increase("TrH takes less memory than SWA and AWP", results, pairs, "memory", sign=-1),
        ]


def _taylor_terms(net: str, *overrides: str) -> Costs:
    base, *others = (f"rat/cifar10-{net}-linf-trades-{term}" for term in ("0th", "1st", "both"))
    return Costs({"TRADES": [base], **taylor_rows(*others)}, (3, 32, 32), overrides)


def taylor_rows(first: str, both: str, *overrides: str) -> dict[str, list[str]]:
    """Recipes for the surrogate and the exact terms of both orders; the paper uses the surrogate."""
    recipes = {"first": first, "first and second": both}
    exact = {f"{title}, {EXACT}": [recipe, *overrides, f"methods.0.terms={EXACT}"] for title, recipe in recipes.items()}
    return {title: [recipe, *overrides] for title, recipe in recipes.items()} | exact


class RATCost(CostTable):
    """Time and memory of the Taylor terms of RAT."""

    name = "rat-cost"
    title = "Cost of RAT's Taylor terms"
    reference = "RAT, table 6"
    costs = {  # noqa: RUF012
        "smoke": smoke(
            {
                "TRADES": ["digits-flat/trades-base"],
                **taylor_rows(*(2 * ["digits-flat/trades-rat"]), "methods.0.sigma=0.01"),
            }
        ),
        "cpu": _taylor_terms("preact18", "trainer.batch_size=32"),
        "paper": _taylor_terms("wrn34"),
    }

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        exact = [row for row in results.rows if row.endswith(EXACT)]
        ours = [row for row in results.rows if row not in ("TRADES", *exact)]
        more = [
            claim_increase(
                f"Exact Taylor terms take more {name} than their surrogate",
                results,
                [(row, row.removesuffix(f", {EXACT}")) for row in exact],
                name,
            )
            for name in ("time", "memory")
        ]
        published = [
            claim_above(
                f"The surrogate terms take noticeably more {name} (at least {NOTICED:g} times TRADES; published:"
                f" {first} with the first term, {both} with both)",
                {row: results.values(row, name) for row in ours},
                NOTICED,
            )
            for name, first, both in (("time", "1.3", "1.42"), ("memory", "1.60", "2.05"))
        ]
        return [*published, *more]


@dataclass(frozen=True)
class WCINet:
    """A recipe that measures WCI, the shape and number of its images, and its overrides."""

    recipe: str
    shape: tuple[int, ...]
    images: int
    overrides: tuple[str, ...] = ()


class WCICost(Study):
    """Time of a WCI measurement relative to a training step and to an epoch."""

    name = "wci-cost"
    title = "Cost of measuring the Weight-Curvature Index"
    reference = "WCI, table 2"
    nets = {  # noqa: RUF012
        "smoke": {
            "small ConvNet": WCINet(
                "mnist-wci/piecewise", (1, 8, 8), 1000, ("methods.0.points=16", "trainer.batch_size=16")
            )
        },
        "cpu": {
            "small ConvNet, 60,000 images": WCINet(
                "mnist-wci/piecewise", (1, 28, 28), 60_000, ("methods.0.points=512",)
            ),
            "PreAct ResNet-18 at a quarter of its width, 50,000 images": WCINet(
                "wci/cifar10-piecewise", (3, 32, 32), 50_000, ("model.width=16", "trainer.batch_size=32")
            ),
        },
        "paper": {
            "PreAct ResNet-18, CIFAR-10 and CIFAR-100": WCINet("wci/cifar10-piecewise", (3, 32, 32), 50_000),
            "PreAct ResNet-18, SVHN": WCINet("wci/svhn-piecewise", (3, 32, 32), 73_257),
        },
    }

    def cells(self, scale: Scale) -> list[Cell]:
        return [Cell(net, repeat) for net in self.nets[scale] for repeat in range(1 if scale == "smoke" else 3)]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        net = self.nets[scale][cell.row]
        trainer = noisy(net.recipe, net.overrides, net.shape, 512)
        (method,) = trainer.methods
        assert isinstance(method, MeasureWCI)
        times = alternate(lambda: method.measure(trainer), step_of(trainer), 3)
        steps = net.images / trainer.settings.batch_size
        share = statistics.median(measured / stepped for measured, stepped in times) / steps
        return {
            "measurement": statistics.median(measured for measured, _ in times),
            "step": statistics.median(stepped for _, stepped in times),
            "every epoch": 1 + share,
            "rule": 1 + share / 2,  # half of the epochs
        }

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        columns = {
            "step": Column("training step, s", digits=3),
            "measurement": Column("WCI measurement, s", digits=3),
            "every epoch": Column("training with WCI every epoch / without", "low", 3),
            "rule": Column("training with the rule (in the second half) / without", "low", 3),
        }
        return {"Cost": mean_table(results, columns)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        claim = f"Training takes significantly longer with WCI every epoch (at least {NOTICED:g} times as long)"
        return [claim_above(claim, {row: results.values(row, "every epoch") for row in results.rows}, NOTICED)]

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            "Measured on random images, with 512 points per WCI measurement unless noted. Repetitions replace seeds."
            " Test time is not measured, because the network is the same with and without WCI."
        ]
