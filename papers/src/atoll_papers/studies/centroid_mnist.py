"""Certified accuracy of Centroid Nets and GloRo Nets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

from atoll.plots import plot_certified
from atoll.runs.run import Run
from atoll.studies.base import Cell, Claim, Numbers, Scale, Study, StudyResults
from atoll.studies.claims import claim_at_least, claim_increase
from atoll.studies.table import Column, Table
from atoll_papers.studies.gloro_table import SHORT, TINY_GLORO
from atoll_papers.studies.measure import certified, describe_points

THESIS = 62.8  # verified robust accuracy in % at 1.58 of a GloRo Net on MNIST (table 5.1)


@dataclass(frozen=True)
class CentroidSetting:
    """Recipes and radii of a scale.

    Args:
        radii: radii that networks are trained for and certified at, the small one first.
        rows: recipe and overrides of each row.
        seeds: number of seeds.
        points: number of test points; None for all.
        attacks: attacks for the empirical accuracy, as for `atoll certify`.
        check: number of certified points to attack at their radius.
    """

    radii: tuple[float, float]
    rows: Mapping[str, tuple[str, tuple[str, ...]]]
    seeds: int
    points: int | None
    attacks: str = "fast"
    check: int = 500


# Here because another class of data drops the arguments of the recipe, but not those of a cell.
_TURNED = "data.augment=[{class_path: RandomAffine, init_args: {degrees: 5.0, scale: 0.05}}]"
# The values that the recipe recommends for small radii.
_NARROW = ("threat.eps=0.3", "loss.target=2", "loss.tau=0.4", "model.per_class=500", "model.stretch=0")
_PART = ("data.limit=10000", "data.validation=0.02")
_FEW = "model.per_class=300"  # fewer than a class has training points
SETTINGS: Mapping[Scale, CentroidSetting] = {
    "smoke": CentroidSetting(
        (0.1, 0.5),
        {
            "GloRo, 0.5": ("digits-gloro", TINY_GLORO),
            "Centroid, 0.5": ("digits-centroid", ("data.limit=200", "model.per_class=5", "trainer.epochs=1")),
        },
        1,
        5,
        "PGD-2",
        1,
    ),
    "cpu": CentroidSetting(
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
    "paper": CentroidSetting(
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
    """Clean, verified and empirical accuracy at two radii, and certified accuracy over all radii."""

    name = "centroid-mnist"
    title = "Centroid Nets and GloRo Nets on MNIST"
    reference = "Thesis, chapter 6, taken further: training on the certified radius"

    def cells(self, scale: Scale) -> list[Cell]:
        setting = SETTINGS[scale]
        return [
            Cell(row, seed, recipe, overrides)
            for row, (recipe, overrides) in setting.rows.items()
            for seed in range(setting.seeds)
        ]

    def measure(self, cell: Cell, run: Run | None, scale: Scale, dependencies: Mapping[str, Run]) -> Numbers:
        assert run is not None
        setting = SETTINGS[scale]
        return certified(
            run, setting.radii, points=setting.points, attacks=setting.attacks, check=setting.check, which="last"
        )

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        radii = SETTINGS[results.scale].radii
        names = ["clean", *(f"{kind} {eps:.4g}" for eps in radii for kind in ("VRA", "ERA"))]
        rows = {row: [results.mean(row, name) for name in names] for row in results.rows}
        return {"Accuracy in %": Table([Column(name, "high") for name in names], rows)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        radius = f"{SETTINGS[results.scale].radii[1]:.4g}"
        ours, theirs, vra = f"Centroid, {radius}", f"GloRo, {radius}", f"VRA {radius}"
        higher = f"Centroid Nets have a higher {vra} than GloRo Nets"
        claims = [claim_increase(higher, results, [(ours, theirs)], vra)]
        if results.scale != "smoke":
            published = f"A Centroid Net has a higher {vra} than the {THESIS} % of the thesis's GloRo Net"
            claims.append(claim_at_least(published, results, {ours: THESIS}, vra))
        return claims

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        return {"certified": _figure(results)}

    def notes(self, results: StudyResults) -> Sequence[str]:
        setting = SETTINGS[results.scale]
        return [
            "Rows name the network and the l2 radius it is trained for. Accuracies of the last weights in % on"
            f" {describe_points(setting.points)} test points. VRA: correct and proven not to change within the radius."
            f" ERA: correct after attacks within it (`{setting.attacks}`)."
        ]


def _figure(results: StudyResults) -> Figure:
    """Certified accuracy of the first seed of each row."""
    curves = {
        row: (torch.tensor(curve["radius"]), torch.tensor(curve["verified"]))
        for row in results.rows
        for curve in [numbers["curve"] for numbers in results.of(row)][:1]
    }
    return plot_certified(curves, SETTINGS[results.scale].radii)
