"""Do attributions change when layers are made random?  Standard and robust nets, SM, IG and BIG."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from atoll.data.base import sample
from atoll.distributed import default_device
from atoll.explain.attributions import attribution
from atoll.explain.sanity import PASSES_BELOW, sanity_check
from atoll.runs.run import Run
from atoll.stats import Estimate
from atoll.studies.base import Answer, Cell, Claim, Found, Numbers, Scale, Study, StudyReport
from atoll.studies.claims import TOO_FEW, Difference
from atoll.studies.table import Column, Table
from atoll_papers.studies.two_nets import NETS, two_nets

BUDGET = 100  # model calls per point of each boundary search, of which there are many: as `atoll explain` has it
METHODS: Mapping[str, dict[str, Any]] = {"SM": {}, "IG": {}, "BIG": {"budget": BUDGET}}


@dataclass(frozen=True)
class Setting:
    """What a scale consists of.

    Args:
        recipe: of AT; the standard net differs in its loss only.
        seeds: how many.
        points: test points whose attributions are compared.
        overrides: for every recipe.
    """

    recipe: str
    seeds: int
    points: int
    overrides: tuple[str, ...] = ()


SETTINGS: Mapping[Scale, Setting] = {
    "smoke": Setting(
        "digits-at", 1, 5, ("model.widths=[4, 4]", "data.limit=200", "trainer.epochs=1", "attack.steps=1")
    ),
    "cpu": Setting("mnist-flat/at-base", 3, 50, ("data.limit=1000", "data.validation=0.01")),
    "paper": Setting("mnist-at", 5, 1000),
}


class SanityStudy(Study):
    """Rank correlations with the attributions of the trained net, while layers are made random from the top down."""

    name = "sanity-check"
    title = "Attributions of nets whose layers are made random"
    shows = "Thesis, figure 2.4 (which has BIG on a ResNet50 of ImageNet)"

    def cells(self, scale: Scale) -> list[Cell]:
        setting = SETTINGS[scale]
        return two_nets(setting.recipe, setting.seeds, setting.overrides)

    def measure(self, cell: Cell, run: Run | None, scale: Scale, needed: Mapping[str, Run]) -> Numbers:
        assert run is not None
        device = default_device()
        model = run.model("last").to(device)
        x = sample(run.data.test, SETTINGS[scale].points, "sanity")[0].to(device)
        numbers: Numbers = {}
        for name, options in METHODS.items():
            check = sanity_check(
                lambda net, name=name, options=options: attribution(name, net, **options),  # type: ignore[misc]
                model,
                x,
                seed=cell.seed,
            )
            means = [mean.value for mean in check.means]
            numbers[f"{name} curve"] = means
            numbers |= {f"{name} first": means[0], f"{name} all": means[-1], "layers": list(check.layers)}
        return numbers

    def conclude(self, found: Found) -> StudyReport:
        columns = [Column("top layer random"), Column("all layers random", "low")]
        rows: dict[str, list[Estimate | None]] = {}
        for row in found.rows:
            for name in METHODS:
                rows[f"{row}, {name}"] = [found.mean(row, f"{name} {when}") for when in ("first", "all")]
        verdicts = [verdict(found, name) for name in METHODS]
        words = (
            "Spearman's rank correlation of absolute attributions with those of the trained net, over the pixels that"
            " are not zero in both, mean over points. Random parameters are normal numbers of the same norm. An"
            f" attribution passes if less than {PASSES_BELOW:g} is left when all layers are random."
        )
        table = Table(columns, rows)
        return StudyReport({"Rank correlation": table}, verdicts, {"correlations": _figure(found)}, [words])


def verdict(found: Found, name: str) -> Claim:
    """Whether hardly anything of an attribution is left, in every net: by intervals over seeds, in part by means."""
    claim = f"{name} depends on the parameters of the net"
    left = {row: Difference.of(found.values(row, f"{name} all")) for row in NETS}
    if any(len(found.values(row, f"{name} all")) < 2 for row in NETS):
        return Claim(claim, "not testable", TOO_FEW)
    words = "rank correlation when all layers are random: " + "; ".join(f"{row} {each}" for row, each in left.items())
    passed = all(each.high < PASSES_BELOW for each in left.values())
    nearly = all(each.value < PASSES_BELOW for each in left.values())
    answer: Answer = "held" if passed else "held in part" if nearly else "did not hold"
    return Claim(claim, answer, words)


def _figure(found: Found) -> Figure:
    figure = Figure(figsize=(5 * len(NETS), 3.5), layout="constrained")
    axes: Any = figure.subplots(1, len(NETS), sharey=True)
    for axis, row in zip(axes, NETS, strict=True):
        for number, name in enumerate(METHODS):
            for seed, numbers in enumerate(found.of(row)):
                curve = [1.0, *numbers[f"{name} curve"]]
                axis.plot(range(len(curve)), curve, ".-", color=f"C{number}", label=name if seed == 0 else None)
        axis.set_title(row, fontsize=10)
        axis.set_xlabel("random layers, from the top")
        axis.set_ylabel("rank correlation")
        if axis.has_data():
            axis.legend(fontsize=8)
    return figure
