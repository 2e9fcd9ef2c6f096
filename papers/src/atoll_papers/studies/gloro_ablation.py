"""Verified robust accuracy of GloRo Nets by loss, block and depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from atoll.runs.run import Run
from atoll.stats import Estimate
from atoll.studies.base import Cell, Claim, Numbers, Scale, StudyResults
from atoll.studies.claims import claim_increase
from atoll.studies.table import Column, Table
from atoll_papers.studies.measure import CERTIFIED, Grid, RecipeStudy, Setting, accuracy_table, certified_as_trained

GRID = "mnist-ablation"
TINY = (
    *("data.class_path=Digits", "data.limit=100", "model.width=2", "model.features=4"),
    *("trainer.epochs=1", "trainer.batch_size=50", "trainer.power_iterations=1"),
)
_PART = ("data.limit=5000", "data.validation=0.02")  # as in the recipe, but it also applies to other data sets
GRIDS: Mapping[Scale, Setting] = {  # variants are named [DATA-]LOSS-BLOCK-lDEPTH
    "smoke": Setting(
        Grid(GRID, patterns=("emma-convnet-l2", "trades-liresnet-l2", "emma-liresnet-l2")),
        overrides=TINY,
        **CERTIFIED["smoke"],
    ),
    "cpu": Setting(
        Grid(GRID, patterns=("trades-liresnet-l4", "trades-convnet-l4", "emma-*")),
        points=500,
        attacks="APGD-CE",
        check=50,
        overrides=_PART,
    ),
    "paper": Setting(
        Grid(
            "gloro-ablation",
            patterns=(
                *("*-trades-liresnet-l12", "*-trades-convnet-l12", "tiny-emma-convnet-l12", "*-emma-liresnet-*"),
                *(f"cifar10*-emma-{block}-l{depth}" for block in ("convnet", "resnet") for depth in (6, 12, 18)),
            ),
        )
    ),
}


class GloRoAblation(RecipeStudy[Setting]):
    """Compares EMMA with TRADES, and ConvNets, conventional ResNets and LiResNets of several depths."""

    name = "gloro-ablation"
    title = "GloRo Nets: losses, blocks and depths"
    reference = "Thesis, tables 5.2 and C.1-C.3"
    settings = GRIDS

    def measure_run(self, run: Run, cell: Cell, setting: Setting) -> Numbers:
        return certified_as_trained(run, points=setting.points, attacks=setting.attacks, check=setting.check)

    def tables(self, results: StudyResults) -> Mapping[str, Table]:
        return {
            "(a) VRA in % by loss": across(results, "loss", ("trades", "emma")),
            "(b) VRA in % with EMMA by block": across(results, "block", ("convnet", "resnet", "liresnet")),
            "All networks": _full(results),
        }

    def claims(self, results: StudyResults) -> Sequence[Claim]:
        grid = list(GRIDS[results.scale].recipes)
        deeper = pairs(grid, "depth")
        ours = [pair for pair in deeper if part(pair[0], "block") == "liresnet"]
        others = [pair for pair in deeper if pair not in ours]
        return [
            claim_increase("EMMA certifies more than TRADES", results, pairs(grid, "loss"), "VRA"),
            claim_increase(
                "LiResNets certify more than ConvNets and conventional ResNets", results, pairs(grid, "block"), "VRA"
            ),
            claim_increase("Deeper LiResNets certify more", results, ours, "VRA"),
            claim_increase("Deeper ConvNets and conventional ResNets certify less", results, others, "VRA", sign=-1),
        ]

    def figures(self, results: StudyResults) -> Mapping[str, Figure]:
        return {"accuracy": _full(results).figure()}

    def notes(self, results: StudyResults) -> Sequence[str]:
        return [
            "Row names are [data,] loss, block and number of blocks. Accuracy in % of the best checkpoint. VRA:"
            " correct, and proven not to change within the radius. ERA: correct under attacks within the radius"
            f" (`{GRIDS[results.scale].attacks}`)."
        ]


def _full(results: StudyResults) -> Table:
    return accuracy_table(results, "clean", "ERA", "VRA")


PARTS = ("loss", "block", "depth")


def part(row: str, which: str) -> str:
    """One part of a row's name.

    >>> part("cifar10-emma-liresnet-l12", "block"), part("emma-convnet-l2", "depth")
    ('liresnet', 'l2')
    """
    return row.split("-")[PARTS.index(which) - len(PARTS)]


def replace_part(row: str, which: str, value: str) -> str:
    """The name of the row that differs in one part.

    >>> replace_part("cifar10-emma-liresnet-l12", "loss", "trades")
    'cifar10-trades-liresnet-l12'
    """
    parts = row.split("-")
    parts[PARTS.index(which) - len(PARTS)] = value
    return "-".join(parts)


def pairs(grid: Sequence[str], which: str) -> list[tuple[str, str]]:
    """Rows of a grid that differ in one part: EMMA and TRADES, LiResNet and another block, deepest and shallowest.

    >>> pairs(["emma-liresnet-l2", "emma-liresnet-l4", "emma-liresnet-l8", "trades-liresnet-l4"], "depth")
    [('emma-liresnet-l8', 'emma-liresnet-l2')]
    """
    if which == "loss":
        result = [(row, replace_part(row, which, "trades")) for row in grid if part(row, which) == "emma"]
    elif which == "block":
        ours = [row for row in grid if part(row, which) == "liresnet"]
        result = [(row, replace_part(row, which, block)) for row in ours for block in ("convnet", "resnet")]
    else:
        families: dict[str, list[str]] = {}
        for row in sorted(grid, key=lambda row: int(part(row, "depth")[1:])):
            families.setdefault(replace_part(row, "depth", ""), []).append(row)
        result = [(each[-1], each[0]) for each in families.values() if len(each) > 1]
    return [pair for pair in result if pair[1] in grid]


def across(results: StudyResults, which: str, values: Sequence[str]) -> Table:
    """VRA with one row per value of a part, for the networks that have several values."""
    columns: dict[str, list[Estimate | None]] = {}
    for row in results.rows:
        means = [results.mean(replace_part(row, which, value), "VRA") for value in values]
        if sum(mean is not None for mean in means) > 1 and (which == "loss" or part(row, "loss") == "emma"):
            columns[", ".join(filter(None, replace_part(row, which, "").split("-")))] = means
    rows = {value: [means[i] for means in columns.values()] for i, value in enumerate(values)}
    return Table([Column(name, "high") for name in columns], rows)
