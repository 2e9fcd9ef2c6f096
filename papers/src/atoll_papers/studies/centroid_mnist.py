"""Certified accuracy of Centroid Nets and GloRo Nets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure

from atoll.plots import plot_certified
from atoll.runs.run import Run
from atoll.studies.base import Cell, Claim, Numbers, Scale, StudyResults
from atoll.studies.claims import claim_at_least, claim_increase
from atoll.studies.table import Table
from atoll_papers.studies.gloro_table import SHORT, TINY_GLORO
from atoll_papers.studies.measure import CERTIFIED, RecipeStudy, Setting, accuracy_table, certified, describe_points

THESIS = 62.8  # verified robust accuracy in % at 1.58 of a GloRo Net on MNIST (table 5.1)


@dataclass(frozen=True)
class CentroidSetting(Setting):
    """The radii for training and certification, the smaller one first."""

    radii: tuple[float, float]


# Not in the recipe, because its data arguments are lost when a user replaces the data set.
_TURNED = "data.augment=[{class_path: RandomAffine, init_args: {degrees: 5.0, scale: 0.05}}]"
# The recipe recommends these values for small radii.
_NARROW = ("threat.eps=0.3", "loss.target=2", "loss.tau=0.4", "model.per_class=500", "model.stretch=0")
_PART = ("data.limit=10000", "data.validation=0.02")
_FEW = "model.per_class=300"  # less than the number of training points per class
SETTINGS: Mapping[Scale, CentroidSetting] = {
    "smoke": CentroidSetting(
        {
            "GloRo, 0.5": ("digits-gloro", *TINY_GLORO),
            "Centroid, 0.5": ("digits-centroid", "data.limit=200", "model.per_class=5", "trainer.epochs=1"),
        },
        radii=(0.1, 0.5),
        **CERTIFIED["smoke"],
    ),
    "cpu": CentroidSetting(
        {
            "GloRo, 0.3": ("mnist-gloro", *SHORT, "threat.eps=0.3"),
            "GloRo, 1.58": ("mnist-gloro", *SHORT),
            "Centroid, 0.3": ("mnist-centroid", *_PART, _TURNED, *_NARROW, _FEW),
            "Centroid, 1.58": ("mnist-centroid", *_PART, _TURNED, _FEW),
        },
        radii=(0.3, 1.58),
        **CERTIFIED["cpu"],
    ),
    "paper": CentroidSetting(
        {
            "GloRo, 0.3": ("mnist-gloro", "threat.eps=0.3"),
            "GloRo, 1.58": ("mnist-gloro",),
            "Centroid, 0.3": ("mnist-centroid", _TURNED, *_NARROW),
            "Centroid, 1.58": ("mnist-centroid", _TURNED),
        },
        radii=(0.3, 1.58),
    ),
}


class CentroidMNIST(RecipeStudy[CentroidSetting]):
    """Clean, verified and empirical accuracy at two radii, and verified accuracy over all radii."""

    name = "centroid-mnist"
    title = "Centroid Nets and GloRo Nets on MNIST"
    reference = "Thesis, chapter 6, extended by training on the certified radius"
    settings = SETTINGS

    def measure_run(self, run: Run, cell: Cell, setting: CentroidSetting) -> Numbers:
        return certified(
            run, setting.radii, points=setting.points, attacks=setting.attacks, check=setting.check, which="last"
        )

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        radii = SETTINGS[results.scale].radii
        names = [f"{kind} {eps:.4g}" for eps in radii for kind in ("VRA", "ERA")]
        return {"Accuracy in %": accuracy_table(results, "clean", *names)}

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        radius = f"{SETTINGS[results.scale].radii[1]:.4g}"
        ours, theirs, vra = f"Centroid, {radius}", f"GloRo, {radius}", f"VRA {radius}"
        higher = f"Centroid Nets have a higher {vra} than GloRo Nets"
        claims = [claim_increase(higher, results, [(ours, theirs)], vra)]
        if results.scale != "smoke":
            published = f"A Centroid Net has a higher {vra} than the GloRo Net of the thesis ({THESIS} %)"
            claims.append(claim_at_least(published, results, {ours: THESIS}, vra))
        return claims

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        """Certified accuracy of the first seed of each row."""
        curves = {
            row: (torch.tensor(curve["radius"]), torch.tensor(curve["verified"]))
            for row in results.rows
            for curve in [numbers["curve"] for numbers in results.of(row)][:1]
        }
        return {"certified": plot_certified(curves, SETTINGS[results.scale].radii)}

    def notes(self, results: StudyResults) -> Sequence[str]:
        setting = SETTINGS[results.scale]
        return [
            "Each row is a network and the l2 radius that it is trained for. Accuracy in % of the last checkpoint on"
            f" {describe_points(setting.points)} test points. VRA: correct, and proven not to change within the radius."
            f" ERA: correct under attacks within the radius (`{setting.attacks}`)."
        ]
