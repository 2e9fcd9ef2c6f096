"""Like with like: numbers share a row, a table or a plot only if they answer the same question."""

import shutil
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from atoll.attacks.curve import Curve
from atoll.attacks.measure import AttackResult
from atoll.curvature import Landscape
from atoll.curvature.measure import CurvatureResult
from atoll.measure import Result, Settings, load_result
from atoll.report import read_runs, render
from atoll.report.blocks import Collapsible, TableBlock, Title, plots
from atoll.report.compare import compare
from atoll.report.page import summarize
from atoll.report.sections import all_sections, attacks, curvature, other
from atoll.runs.run import open_run
from atoll.stats import Accuracy
from report_cases import Page, copy_result, page_of, result_file
from support import renew_digests

STEP = {"best": 4, "last": 12}


@pytest.fixture(autouse=True)
def _checkpoints(measured):
    """The run under test has a best checkpoint that is not its last."""
    index = open_run(measured / "robust").index
    assert (index["best"]["raw"], index["last"]) == (STEP["best"], STEP["last"])


def rows(*folders):
    """The rows of the tables at the top: what and which question, and the text of every run's cell."""
    return {(row[0].text, row[0].note): [cell.text for cell in row[1:]] for t in tables(*folders) for row in t.rows[1:]}


def tables(*folders):
    """The main table at the top, and the one below it with what only some of the runs have."""
    blocks = summarize(read_runs(folders))
    blocks += [inner for block in blocks if isinstance(block, Collapsible) for inner in block.blocks]
    main, *others = [block for block in blocks if isinstance(block, TableBlock)]
    return [main, *(TableBlock(t.columns, [["", ""], *t.rows]) for t in others)]  # the first row is about the training


def only(table, what):
    return {note: cells for (name, note), cells in table.items() if name == what}


def test_a_landscape_is_under_the_header_of_its_own_loss(robust):
    """The AT landscape was shown under the header of a later measurement with another loss."""
    path = result_file(robust, "curvature")
    copy_result(path, "other", {"loss": "Standard()"}, loss="Standard()", attacked=False)
    line = torch.linspace(-1, 1, 3, dtype=torch.float64)
    landscape = Landscape(line, line, torch.full((3, 3), 7.0), ("a", "b"))
    landscape.save(path.parent.with_name("other") / "landscape-weights.npz")
    renew_digests(path.parent.with_name("other") / "result.json")
    blocks = curvature.section(read_runs([robust])).blocks
    headers = {}
    for block in blocks:
        if isinstance(block, Title):
            title = block.note
        for plot in plots([block]):
            if plot.id.startswith("landscape"):
                headers[title.split(" at ")[0]] = plot.figure["data"][0]["z"]
    assert headers.keys() == {"AT", "Standard"}
    assert headers["Standard"] == [[7.0] * 3] * 3
    assert headers["AT"] == load_result(path.parent).landscape().loss.tolist()


def test_curves_of_several_runs_share_their_axes(measured, robust):
    """Runs without attacks at eps are compared whatever their eps; the picture shows the stored numbers."""
    standard, curves = robust.with_name("standard"), []
    shutil.copytree(measured / "standard", standard)
    for folder, scale in ((robust, 1.0), (standard, 0.1)):
        distance = scale * torch.linspace(0, 1, 40, dtype=torch.float64)
        curves.append(Curve.from_distances(distance, distance > 0, "linf"))
        settings = {"attacks": "none", "curve": True, "eps": str(0.1 * scale)}
        copy_result(result_file(folder, "attack"), "curve", settings, attacks=(), examples=(), curve=curves[-1])
    blocks = attacks.section(read_runs([robust, standard])).blocks
    (plot,) = [plot for plot in plots(blocks) if "curve" in plot.id]
    lines = [trace for trace in plot.figure["data"] if trace.get("showlegend", True)]
    for line, curve in zip(lines, curves, strict=True):
        assert line["x"] == list(curve.eps)
        assert line["y"] == [100 * each.value for each in curve.accuracy]
    assert plot.figure["layout"]["xaxis"]["title"]["text"] == "eps (linf)"


def test_a_column_is_about_one_checkpoint(robust):
    """After an attack on the last checkpoint and a certification of the best, one column mixed both."""
    path = result_file(robust, "attack")
    question = "FGSM,PGD-3 at linf 0.15, 40 test points"
    before = only(rows(robust), "Robust accuracy")[question]
    copy_result(path, "other", origin={"step": STEP["last"], "file": ""}, robust=Accuracy(1, 40))
    (column,) = tables(robust)[0].columns[1:]
    assert column.note == "best checkpoint (epoch 1)"
    assert only(rows(robust), "Robust accuracy")[question] == before != ["2.50 %"]
    # The other one is in its tab, and the text below the table says so.
    titles = {each.title: each.first.robust for each in attacks.comparisons(read_runs([robust]))}
    assert titles[f"{question}, last checkpoint"] == Accuracy(1, 40)
    text = Page(render(read_runs([robust]))).text
    assert "The table shows the best checkpoints. The tabs also show the others." in text


def test_the_table_is_about_the_checkpoints_that_were_measured_most(robust):
    for kind in ("attack", "certify", "curvature", "explain"):
        for path in robust.glob(f"results/{kind}/*/result.json"):
            copy_result(path, f"{path.parent.name}-last", origin={"step": STEP["last"], "epoch": 3, "file": ""})
            shutil.rmtree(path.parent)
    assert tables(robust)[0].columns[1].note == "last checkpoint (epoch 3)"
    assert "The table shows" not in Page(render(read_runs([robust]))).text


def test_the_index_of_two_losses_is_in_two_rows(measured, robust, tmp_path):
    """A standard and a robust net under their own losses do not compare; under one loss they do."""
    standard = tmp_path / "standard"
    shutil.copytree(measured / "standard", standard)
    shown = only(rows(standard, robust), "Weight-Curvature Index (WCI)")
    assert sorted([cell == "not measured" for cell in cells] for cells in shown.values()) == [
        [False, True],
        [True, False],
    ]
    assert {note.split(",")[0] for note in shown} == {"Standard at clean inputs", "AT at linf 0.15"}
    mine, theirs = result_file(robust, "curvature"), result_file(standard, "curvature")
    inputs = load_result(theirs.parent).inputs
    # The radius and the steps of an attack that the loss does not use make no difference.
    copy_result(mine, "other", {"loss": "Standard()", "eps": "0.3"}, loss="Standard()", attacked=False, inputs=inputs)
    shown = only(rows(standard, robust), "Weight-Curvature Index (WCI)")
    (cells,) = [cells for note, cells in shown.items() if note.startswith("Standard at clean inputs")]
    assert "not measured" not in cells


@pytest.mark.parametrize(
    ("settings", "changes", "title"),
    [
        ({"attacks": "FGSM"}, {}, "FGSM at linf 0.15, 40 test points"),
        ({"eps": "0.3"}, {}, "FGSM,PGD-3 at linf 0.3, 40 test points"),
        ({"split": "train"}, {}, "FGSM,PGD-3 at linf 0.15, 40 train points"),
        ({"seed": 1}, {}, "FGSM,PGD-3 at linf 0.15, seed 1, 40 test points"),
        ({"individual": True}, {}, "FGSM,PGD-3 at linf 0.15, individual, 40 test points"),
        ({"points": 20}, {"points": 20}, "FGSM,PGD-3 at linf 0.15, 20 test points"),
        ({}, {"inputs": "f" * 32}, "FGSM,PGD-3 at linf 0.15, 40 test points (digest ffffffff)"),
        (
            {},
            {"origin": {"weights": "swa", "file": ""}},
            "FGSM,PGD-3 at linf 0.15, 40 test points, swa weights",
        ),
        ({"points": None}, {}, None),  # if the split has 40 points
        ({"curve": True}, {}, None),
        ({"adbd": True}, {}, None),  # one more number about the same question
        ({"corruptions": True}, {}, None),
    ],
)
def test_what_differs_is_in_a_row_of_its_own_that_says_so(measured, robust, settings, changes, title):
    path = result_file(robust, "attack")
    before = only(rows(measured / "standard", robust), "Robust accuracy")
    shared = "FGSM,PGD-3 at linf 0.15, 40 test points"
    assert "not measured" not in before[shared]
    copy_result(path, "other", settings, **changes, robust=Accuracy(1, 40))
    shutil.rmtree(path.parent)
    after = only(rows(measured / "standard", robust), "Robust accuracy")
    if title is None:
        assert after[shared][1] == "2.50 %"
    else:
        assert after[title] == ["not measured", "2.50 %"]


def test_the_last_checkpoint_is_the_best_one_of_a_run_that_ended_at_its_best(measured):
    """It stands in both comparisons; one that only repeats another one is left out."""
    pairs = attacks.comparisons(read_runs([measured / "standard", measured / "robust"]))
    runs = {each.title: [run.name for run, _ in each.results] for each in pairs}
    for which in STEP:
        assert runs[f"PGD-2 at linf 0.15, 360 test points, {which} checkpoint"] == ["standard", "robust"]
    alone = [each.title for each in attacks.comparisons(read_runs([measured / "standard"]))]
    assert "PGD-2 at linf 0.15, 360 test points, best and last checkpoint" in alone


def test_landscapes_of_one_question_share_axes_and_colors(robust, tmp_path):
    second = tmp_path / "second"
    shutil.copytree(robust, second)
    line = torch.linspace(-2, 2, 3, dtype=torch.float64)
    path = result_file(second, "curvature")
    Landscape(line, line, torch.full((3, 3), 9.0), ("a", "b")).save(path.with_name("landscape-weights.npz"))
    renew_digests(path)
    figures = {plot.id: plot.figure for plot in plots(curvature.section(read_runs([robust, second])).blocks)}
    first, other = figures["landscape-0-0"], figures["landscape-0-1"]
    for axis in ("xaxis", "yaxis", "zaxis"):
        assert first["layout"]["scene"][axis]["range"] == other["layout"]["scene"][axis]["range"]
    assert first["layout"]["scene"]["xaxis"]["range"] == [-2.0, 2.0]
    assert (first["data"][0]["cmin"], first["data"][0]["cmax"]) == (other["data"][0]["cmin"], 9.0)
    contours = [figures[f"contour-0-{run}"] for run in (0, 1)]
    assert contours[0]["data"][0]["zmax"] == contours[1]["data"][0]["zmax"] == 9.0
    assert contours[0]["layout"]["xaxis"]["range"] == contours[1]["layout"]["xaxis"]["range"]


def test_landscapes_far_apart_share_a_logarithmic_scale(robust, tmp_path):
    """On a linear scale the flat one of two landscapes would be a plane."""
    second = tmp_path / "second"
    shutil.copytree(robust, second)
    line = torch.linspace(-1, 1, 3, dtype=torch.float64)
    for folder, loss in ((robust, torch.tensor([1.0, 2.0, 4.0])), (second, torch.tensor([1.0, 10.0, 100.0]))):
        path = result_file(folder, "curvature")
        Landscape(line, line, loss.double().expand(3, 3), ("a", "b")).save(path.with_name("landscape-weights.npz"))
        renew_digests(path)
    figures = {plot.id: plot.figure for plot in plots(curvature.section(read_runs([robust, second])).blocks)}
    for run in (0, 1):
        surface, contour = figures[f"landscape-0-{run}"], figures[f"contour-0-{run}"]["data"][0]
        axis = surface["layout"]["scene"]["zaxis"]
        assert (axis["type"], axis["range"], axis["tickvals"]) == ("log", [0.0, 2.0], [1.0, 5.0, 10.0, 50.0, 100.0])
        assert (surface["data"][0]["cmin"], surface["data"][0]["cmax"]) == (contour["zmin"], contour["zmax"]) == (0, 2)
        assert contour["colorbar"]["ticktext"] == ["1", "5", "10", "50", "100"]
    assert figures["landscape-0-1"]["data"][0]["z"][0] == [1.0, 10.0, 100.0]  # the losses themselves
    assert figures["contour-0-1"]["data"][0]["z"][0] == [0.0, 1.0, 2.0]
    assert figures["contour-0-1"]["data"][0]["text"][0] == ["1", "10", "100"]


def test_a_stale_result_is_apart_with_its_reason(robust):
    path = result_file(robust, "attack")
    stale = [
        ({"step": 7}, "measured at step 7, whose checkpoint was deleted"),
        ({"file": "0" * 64}, f"measured with other weights than those now saved at step {STEP['best']}"),
    ]
    for place, (origin, _) in enumerate(stale):
        copy_result(path, f"stale-{place}", origin=origin, robust=Accuracy(place + 1, 40))
    runs = read_runs([robust])
    sections = {section.id: section for section in all_sections(runs)}
    text = Page(render(runs)).text
    for _, reason in stale:
        assert reason in text
    assert "2.50 %" not in [cell for cells in only(rows(robust), "Robust accuracy").values() for cell in cells]
    shown = [row for block in sections["stale"].blocks if isinstance(block, TableBlock) for row in block.rows]
    assert {"2.50 %", "5.00 %"} == {row[1].text for row in shown if row[0] == "robust"}


@dataclass(frozen=True, kw_only=True)
class CellSettings(Settings):
    kind: ClassVar[str] = "cell"
    study: str = "trh-table"
    scale: str = "smoke"
    row: str = "AT"
    cell_seed: int = 0
    definition: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CellResult(Result):
    kind: ClassVar[str] = "cell"
    settings: CellSettings
    numbers: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ForeignResult(Result):
    kind: ClassVar[str] = "foreign"
    settings: Settings
    share: Accuracy
    curve: tuple[float, ...] = (1.5, 2.5)


def of_run(run, cls, settings, **fields):
    like = next(result for result in run.current(AttackResult) if result.settings.points == 40)  # best, not averaged
    return cls(subject=like.subject, inputs="", points=360, settings=settings, **fields)


def test_the_numbers_of_a_study_are_shown_and_compared_across_its_cells(measured):
    runs = read_runs([measured / "standard", measured / "robust"])
    for run, row in zip(runs, ("AT", "TRADES"), strict=True):
        numbers = {"robust": 0.125, "by_layer": {"first": 1.5}}
        run.results.append(of_run(run, CellResult, CellSettings(row=row), numbers=numbers))
    section = other.section(runs)
    assert section.title == "Study"
    assert "Study trh-table, smoke" in section.blocks[0].text
    table = next(block for block in section.blocks if isinstance(block, TableBlock))
    shown = {row[0]: list(row[1:]) for row in table.rows}
    assert shown == {
        "row": ["AT", "TRADES"], "cell seed": ["0", "0"], "robust": ["0.125"] * 2, "by_layer.first": ["1.5"] * 2,
    }  # fmt: skip


def test_a_result_of_an_unknown_kind_is_listed(measured):
    runs = read_runs([measured / "robust"])
    runs[0].results.append(of_run(runs[0], ForeignResult, Settings(seed=3), share=Accuracy(1, 2)))
    text = Page(render(runs)).text
    assert "Other results foreign, seed 3, 360 test points" in text
    assert "share 50.00 %" in text
    assert "curve 1.5, 2.5" in text


def test_every_number_of_a_run_is_on_its_page(measured):
    """Clean and robust accuracies, index, radii, distances: whatever was stored."""
    text = page_of(measured / "robust").text
    for result in read_runs([measured / "robust"])[0].results:
        values = [value for value in vars(result).values() if isinstance(value, Accuracy)]
        if isinstance(result, AttackResult):
            values += [attack.accuracy for attack in result.attacks]
        for value in values:
            low, high = value.interval
            assert f"{100 * value.value:.2f} % 95 %: {100 * low:.1f}–{100 * high:.1f}" in text


def test_no_standard_error_beside_an_accuracy(measured):
    text = page_of(measured / "standard", measured / "robust", measured / "certified").text
    assert "%" in text
    assert "±" not in text


def test_results_of_an_older_version_have_no_digests(robust):
    """They compare with each other if the data are the same, and say that their points are not known."""
    path = result_file(robust, "attack")
    copy_result(path, "older", inputs="", environment=None, origin={"file": ""}, robust=Accuracy(1, 40))
    question = "FGSM,PGD-3 at linf 0.15, 40 test points (digest not recorded)"
    assert only(rows(robust), "Robust accuracy")[question] == ["2.50 %"]
    copy_result(path, "oldest", inputs="", origin={"step": None, "epoch": None, "file": ""}, robust=Accuracy(2, 40))
    shown = {each.title: each.first.robust for each in attacks.comparisons(read_runs([robust]))}
    assert shown[f"{question}, unknown checkpoint"] == Accuracy(2, 40)


def test_training_curves_are_apart_if_the_recipes_differ_in_what_they_depend_on(measured):
    runs = read_runs([measured / "standard", measured / "robust", measured / "certified"])
    (training,) = [section for section in all_sections(runs) if section.id == "training"]
    figures = {plot.id: plot for plot in plots(training.blocks)}
    robust = figures["training-robust-validation"].figure["data"]
    assert [trace["name"] for trace in robust] == [
        "standard, validation", "robust, validation", "robust, validation (swa)"
    ]  # fmt: skip
    losses = [plot for name, plot in figures.items() if name.startswith("training-loss")]
    assert [plot.title for plot in losses] == [f"Training loss: {run.name}" for run in runs]
    assert all("Shown apart because the recipes differ in loss" in plot.note for plot in losses)


def test_the_settings_that_are_named_are_not_repeated(measured):
    (run,) = read_runs([measured / "robust"])
    (comparison,) = compare([run], CurvatureResult, lambda result: "start", named=("loss", "norm", "eps"))
    assert comparison.title.startswith(
        "start, steps 2, relative error 0.5, top 1, density, gap, landscape weights, 16 train"
    )
