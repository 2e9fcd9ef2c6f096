"""What GloRo Nets certify: losses, blocks and depths apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.runs.run import Run
from atoll.stats import Estimate
from atoll.studies.base import Cell, Found, Numbers, Scale, Study, StudyReport
from atoll.studies.claims import claim_increase
from atoll.studies.table import Column, Table
from atoll_papers.studies.accuracy_tables import Grid
from atoll_papers.studies.measure import certified_as_trained

BOOK = "mnist-ablation"
TINY = (
    *("data.class_path=Digits", "data.limit=200", "model.width=4", "model.features=8"),
    *("trainer.epochs=1", "trainer.batch_size=40", "trainer.power_iterations=1"),
)
_PART = ("data.limit=5000", "data.validation=0.02")  # as in the recipe, for other data, too
# Certified points that are attacked at their radius.
CHECKED: Mapping[Scale, int] = {
    "smoke": 0,
    "cpu": 50,
    "paper": 500,
}
GRIDS: Mapping[Scale, Grid] = {  # rows of the books are named [DATA-]LOSS-BLOCK-lDEPTH
    "smoke": Grid(
        (BOOK,),
        ("emma-convnet-l2", "trades-liresnet-l2", "emma-liresnet-l[24]"),
        1,
        5,
        "PGD-20",
        TINY,
    ),
    "cpu": Grid((BOOK,), ("trades-liresnet-l4", "trades-convnet-l4", "emma-*"), 3, 500, "APGD-CE", _PART),
    "paper": Grid(
        ("gloro-ablation",),
        (
            *("*-trades-liresnet-l12", "*-trades-convnet-l12", "tiny-emma-convnet-l12", "*-emma-liresnet-*"),
            *(f"cifar10*-emma-{block}-l{depth}" for block in ("convnet", "resnet") for depth in (6, 12, 18)),
        ),
        3,
        None,
        "standard",
    ),
}


class GloRoAblation(Study):
    """EMMA against TRADES; ConvNets, conventional ResNets and LiResNets of several depths."""

    name = "gloro-ablation"
    title = "GloRo Nets: losses, blocks and depths"
    shows = "Thesis, tables 5.2 and C.1-C.3"

    def cells(self, scale: Scale) -> list[Cell]:
        return GRIDS[scale].cells()

    def measure(self, cell: Cell, run: Run | None, scale: Scale, needed: Mapping[str, Run]) -> Numbers:
        assert run is not None
        grid = GRIDS[scale]
        return certified_as_trained(run, points=grid.points, attacks=grid.autoattack, check=CHECKED[scale])

    def conclude(self, found: Found) -> StudyReport:
        names = ("clean", "ERA", "VRA")
        columns = [Column(name, "high") for name in names]
        full = Table(columns, {row: [found.mean(row, name) for name in names] for row in found.rows})
        grid = list(GRIDS[found.scale].recipes())
        deeper = pairs(grid, "depth")
        others = [pair for pair in deeper if part(pair[0], "block") != "liresnet"]
        verdicts = [
            claim_increase("EMMA certifies more than TRADES", found, pairs(grid, "loss"), "VRA"),
            claim_increase(
                "LiResNets certify more than ConvNets and conventional ResNets", found, pairs(grid, "block"), "VRA"
            ),
            claim_increase("LiResNets certify more when they are deeper", found, _without(deeper, others), "VRA"),
            claim_increase(
                "ConvNets and conventional ResNets certify less when they are deeper", found, others, "VRA", sign=-1
            ),
        ]
        words = (
            "Rows are [data,] loss, block and number of blocks. Accuracy in % of the best weights; VRA: correct and"
            " proven not to change within the radius; ERA: correct after attacks in it"
            f" (`{GRIDS[found.scale].autoattack}`)."
        )
        tables = {
            "(a) VRA in % by loss": across(found, "loss", ("trades", "emma")),
            "(b) VRA in % with EMMA by block": across(found, "block", ("convnet", "resnet", "liresnet")),
            "All of them": full,
        }
        return StudyReport(tables, verdicts, {"accuracy": full.figure()}, [words])


PARTS = ("loss", "block", "depth")


def part(row: str, which: str) -> str:
    """Of a row's name.

    >>> part("cifar10-emma-liresnet-l12", "block"), part("emma-convnet-l2", "depth")
    ('liresnet', 'l2')
    """
    return row.split("-")[PARTS.index(which) - len(PARTS)]


def put(row: str, which: str, value: str) -> str:
    """The row that differs in one part.

    >>> put("cifar10-emma-liresnet-l12", "loss", "trades")
    'cifar10-trades-liresnet-l12'
    """
    words = row.split("-")
    words[PARTS.index(which) - len(PARTS)] = value
    return "-".join(words)


def pairs(grid: Sequence[str], which: str) -> list[tuple[str, str]]:
    """Rows of a grid that differ in one part only: EMMA and TRADES, LiResNet and another block, deepest and least deep.

    >>> pairs(["emma-liresnet-l2", "emma-liresnet-l4", "emma-liresnet-l8", "trades-liresnet-l4"], "depth")
    [('emma-liresnet-l8', 'emma-liresnet-l2')]
    """
    if which == "loss":
        found = [(row, put(row, which, "trades")) for row in grid if part(row, which) == "emma"]
    elif which == "block":
        ours = [row for row in grid if part(row, which) == "liresnet"]
        found = [(row, put(row, which, block)) for row in ours for block in ("convnet", "resnet")]
    else:
        families: dict[str, list[str]] = {}
        for row in sorted(grid, key=lambda row: int(part(row, "depth")[1:])):
            families.setdefault(put(row, "depth", ""), []).append(row)
        found = [(each[-1], each[0]) for each in families.values() if len(each) > 1]
    return [pair for pair in found if pair[1] in grid]


def across(found: Found, which: str, values: Sequence[str]) -> Table:
    """VRA with one part of the name as rows; (b) is about EMMA, (a) about nets that have both losses."""
    columns: dict[str, list[Estimate | None]] = {}
    for row in found.rows:
        known = [found.mean(put(row, which, value), "VRA") for value in values]
        if sum(value is not None for value in known) > 1 and (which == "loss" or part(row, "loss") == "emma"):
            columns[", ".join(word for word in put(row, which, "").split("-") if word)] = known
    rows = {value: [known[i] for known in columns.values()] for i, value in enumerate(values)}
    return Table([Column(name, "high") for name in columns], rows)


def _without(pairs: Sequence[tuple[str, str]], others: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [pair for pair in pairs if pair not in others]
