"""Centroid Nets beside GloRo Nets: what each certifies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

from atoll.plots import plot_certified
from atoll.runs.run import Run
from atoll.studies.base import Cell, Found, Numbers, Scale, Study, StudyReport
from atoll.studies.claims import claim_increase, exceeds
from atoll.studies.table import Column, Table
from atoll_papers.studies.gloro_table import SHORT
from atoll_papers.studies.measure import certified

THESIS = 62.8  # verified robust accuracy in % at 1.58 of a GloRo Net on MNIST (table 5.1)


@dataclass(frozen=True)
class Setting:
    """What a scale consists of.

    Args:
        radii: that nets are trained for and certified at, the small one first.
        rows: recipe and overrides of each.
        seeds: how many.
        points: of the test set; None for all.
        attacks: for the empirical accuracy, as for `atoll certify`.
        check: certified points that are attacked at their radius.
    """

    radii: tuple[float, float]
    rows: Mapping[str, tuple[str, tuple[str, ...]]]
    seeds: int
    points: int | None
    attacks: str = "fast"
    check: int = 500


# Another class of data drops the arguments of the recipe, those of a cell stay.
_TURNED = "data.augment=[{class_path: RandomAffine, init_args: {degrees: 5.0, scale: 0.05}}]"
# As the recipe says.
_NARROW = ("threat.eps=0.3", "loss.target=2", "loss.tau=0.4", "model.per_class=500", "model.stretch=0")
_PART = ("data.limit=10000", "data.validation=0.02")
_FEW = "model.per_class=300"  # as many as a class has training points would be one each
SETTINGS: Mapping[Scale, Setting] = {
    "smoke": Setting(
        (0.1, 0.5),
        {
            "GloRo, 0.5": ("digits-gloro", ("model.widths=[8, 8]", "model.hidden=16", "trainer.epochs=2")),
            "Centroid, 0.5": ("digits-centroid", ("model.per_class=5", "trainer.epochs=2")),
        },
        1,
        5,
        "PGD-20",
        0,
    ),
    "cpu": Setting(
        (0.3, 1.58),
        {
            "GloRo, 0.3": ("mnist-gloro", (*SHORT, "threat.eps=0.3")),
            "GloRo, 1.58": ("mnist-gloro", SHORT),
            "Centroid, 0.3": ("mnist-centroid", (*_PART, _TURNED, *_NARROW, _FEW)),
            "Centroid, 1.58": ("mnist-centroid", (*_PART, _TURNED, _FEW)),
        },
        2,
        500,
        check=100,
    ),
    "paper": Setting(
        (0.3, 1.58),
        {
            "GloRo, 0.3": ("mnist-gloro", ("threat.eps=0.3",)),
            "GloRo, 1.58": ("mnist-gloro", ()),
            "Centroid, 0.3": ("mnist-centroid", (_TURNED, *_NARROW)),
            "Centroid, 1.58": ("mnist-centroid", (_TURNED,)),
        },
        3,
        None,
        "standard",
    ),
}


class CentroidMNIST(Study):
    """Clean, verified and empirical accuracy at two radii, and certified accuracy over all."""

    name = "centroid-mnist"
    title = "Centroid Nets and GloRo Nets on MNIST"
    shows = "Thesis, chapter 6, taken further: training on the certified radius"

    def cells(self, scale: Scale) -> list[Cell]:
        setting = SETTINGS[scale]
        return [
            Cell(row, seed, recipe, overrides)
            for row, (recipe, overrides) in setting.rows.items()
            for seed in range(setting.seeds)
        ]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, needed: Mapping[str, Run]) -> Numbers:
        assert run is not None
        setting = SETTINGS[scale]
        return certified(
            run, setting.radii, points=setting.points, attacks=setting.attacks, check=setting.check, which="last"
        )

    def conclude(self, found: Found) -> StudyReport:
        radii = SETTINGS[found.scale].radii
        names = ["clean", *(f"{kind} {eps:.4g}" for eps in radii for kind in ("VRA", "ERA"))]
        columns = [Column(name, "high") for name in names]
        table = Table(columns, {row: [found.mean(row, name) for name in names] for row in found.rows})
        wide = f"VRA {radii[1]:.4g}"
        ours, theirs = (f"{net}, {radii[1]:.4g}" for net in ("Centroid", "GloRo"))
        verdicts = [
            claim_increase(f"Centroid Nets have a higher {wide} than GloRo Nets", found, [(ours, theirs)], wide)
        ]
        if found.scale != "smoke":
            claim = f"A Centroid Net has a higher {wide} than the {THESIS} % of the thesis's GloRo Net"
            verdicts.append(exceeds(claim, found, {ours: THESIS}, wide))
        words = (
            "Rows are nets and the radius (l2) that they are trained for; accuracies of their last weights in % on"
            f" {_count(SETTINGS[found.scale].points)} test points. VRA: correct and proven not to change within the"
            " radius; ERA: correct after attacks in it"
            f" (`{SETTINGS[found.scale].attacks}`)."
        )
        return StudyReport({"Accuracy in %": table}, verdicts, {"certified": _figure(found)}, [words])


def _count(points: int | None) -> str:
    return "all" if points is None else f"the first {points:,}"


def _figure(found: Found) -> Figure:
    """Certified accuracy of the first seed of each row."""
    curves = {
        row: (torch.tensor(curve["radius"]), torch.tensor(curve["verified"]))
        for row in found.rows
        for curve in [numbers["curve"] for numbers in found.of(row)][:1]
    }
    return plot_certified(curves, SETTINGS[found.scale].radii)
