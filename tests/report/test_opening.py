"""The sentence and the picture at the top of the page: from typed results, and only of what can be compared."""

import base64
import dataclasses
import io
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from atoll.attacks.diagnostics import EvaluationWarning
from atoll.attacks.examples import Example
from atoll.attacks.measure import AttackResult
from atoll.certify.measure import CertifyResult, CertifySettings, Verified
from atoll.files import sha256
from atoll.report import read_runs, render
from atoll.report.blocks import Gallery, Lead, TableBlock
from atoll.report.opening import opening
from atoll.report.sections.attacks import section
from atoll.report.text import SPACE
from atoll.stats import Accuracy, SampledAccuracy
from report_cases import page_of

NAMES = ("standard", "robust", "certified")
LABELS, IMAGES = ("coat", "bag"), torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 1, 3, 4).contiguous()


@pytest.fixture
def runs(measured, tmp_path):
    """Three runs without results; the results are what the tests give them."""
    for name in NAMES:
        shutil.copytree(measured / name, tmp_path / name, ignore=shutil.ignore_patterns("attack", "certify"))
    like = next(r for r in read_runs([measured / "robust"])[0].results if isinstance(r, AttackResult))
    summaries = read_runs([tmp_path / name for name in NAMES])
    for run in summaries:
        run.results.clear()
    return summaries, like


def give(run, like, correct, *, total=100, **changes):
    """A result of an attack on 100 points; every run has weights of its own."""
    settings = {"attacks": "fast", "norm": "l2", "eps": "1/2"} | changes.pop("settings", {})
    origin = dataclasses.replace(like.subject.origin, step=run.run.step("best"), epoch=1, file="", weights="raw")
    subject = dataclasses.replace(like.subject, digest=f"digest of {run.name}", origin=origin)
    fields = {"clean": Accuracy(90, total), "robust": Accuracy(correct, total), "warnings": (), "inputs": "same"}
    fields |= {
        "points": total,
        "settings": dataclasses.replace(like.settings, **settings),
        "subject": subject,
        "folder": None,
        "examples": (),
    }
    run.results.append(dataclasses.replace(like, **fields | changes))
    return run.results[-1]


def prove(run, attacked, correct, **changes):
    settings = CertifySettings(eps="0.25,0.5", precision="float64", **changes.pop("settings", {}))
    rows = tuple(
        Verified(eps=eps, accuracy=Accuracy(c, attacked.points)) for eps, c in ((0.25, correct + 5), (0.5, correct))
    )
    fields = {name: getattr(attacked, name) for name in ("subject", "inputs", "points", "clean")}
    fields |= {"settings": settings, "verified": rows, "median_radius": 0.5, "curve": {}}
    run.results.append(CertifyResult(**fields | changes))


def sentence(runs):
    (lead,) = [block for block in opening(runs, "best") if isinstance(block, Lead)]
    return lead.text.replace(SPACE, " ")


def picture(runs):
    galleries = [block for block in opening(runs, "best") if isinstance(block, Gallery)]
    return galleries[0] if galleries else None


def test_one_sentence_about_all_runs(runs):
    runs, like = runs
    for run, correct in zip(runs, (2, 71, 64), strict=True):
        attacked = give(run, like, correct)
    assert sentence(runs) == (
        "Under attack, the standard network is right on 2 % of 100 test images, the robust network on 71 % and the"
        " certified network on 64 %."
    )
    prove(runs[2], attacked, 57)
    assert sentence(runs).endswith("and the certified network on 64 % (57 % proven).")


@pytest.mark.parametrize(
    "changes",
    [
        {"inputs": "others"},
        {"points": 99},
        {"settings": {"smooth": 0.25}},
        {"settings": {"split": "train"}},
        {"verified": (Verified(eps=0.4, accuracy=Accuracy(57, 100)),)},
        {"subject": "another"},
    ],
)
def test_a_proof_of_something_else_is_not_in_the_sentence(runs, changes):
    (run, *_), like = runs
    attacked = give(run, like, 64)
    prove(run, attacked, 57)
    assert "(57 % proven)" in sentence([run])
    run.results.pop()
    if "subject" in changes:
        changes = {"subject": dataclasses.replace(attacked.subject, digest="another")}
    prove(run, attacked, 57, **changes)
    assert "proven" not in sentence([run])


def test_one_run(runs):
    (run, *_), like = runs
    give(run, like, 71)
    text = "Under attack, the network is right on 71 % of 100 test images, down from 90 % without an attack."
    assert sentence([run]) == text


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": {"eps": "0.3"}},
        {"settings": {"norm": "linf"}},
        {"settings": {"attacks": "PGD-20"}},
        {"settings": {"split": "train"}},
        {"inputs": "others"},
        {"total": 90},
    ],
)
def test_what_cannot_be_compared_is_not(runs, changes):
    (first, second, third), like = runs
    give(first, like, 2)
    give(second, like, 71, **changes)
    assert sentence([first, second]) == (
        "The networks were not attacked in the same way on the same images, so no robust accuracies are compared."
    )
    assert picture([first, second]) is None
    give(third, like, 64)
    assert sentence([first, second, third]) == (
        "Under attack, the standard network is right on 2 % of 100 test images and the certified network on 64 %;"
        " the robust network was not attacked in the same way."
    )


def test_autoattack_of_the_weights_themselves_comes_first(runs):
    (run, *_), like = runs
    give(run, like, 40, settings={"attacks": "PGD-20"})
    give(run, like, 30)
    average = give(run, like, 20, settings={"attacks": "standard"})
    origin = dataclasses.replace(average.subject.origin, weights="swa")
    run.results[-1] = dataclasses.replace(average, subject=dataclasses.replace(average.subject, origin=origin))
    give(run, like, 10, settings={"attacks": "standard", "surrogate": "another run"})
    assert "right on 30 %" in sentence([run])
    give(run, like, 25, settings={"attacks": "standard"})
    assert "right on 25 %" in sentence([run])


def test_checkpoints_are_not_mixed(runs):
    (first, second, _), like = runs
    give(first, like, 2)
    answer = give(second, like, 71)
    origin = dataclasses.replace(answer.subject.origin, step=second.run.step("last"))
    assert second.run.step("last") != second.run.step("best")
    second.results[-1] = dataclasses.replace(answer, subject=dataclasses.replace(answer.subject, origin=origin))
    assert "the standard network is right on 2 %" not in sentence([first, second])


def test_without_attacks_it_says_less(runs):
    (first, second, _), like = runs
    assert sentence([first, second]) == "Nothing has been measured yet."
    for run in (first, second):
        give(run, like, 90, attacks=())
    assert sentence([first, second]) == (
        "Without an attack, the standard network is right on 90 % of 100 test images and the robust network on 90 %;"
        " robust accuracy has not been measured."
    )


def test_many_runs_are_a_range_and_a_warning_is_named(runs):
    (first, second, third), like = runs
    many = [dataclasses.replace(run, number=i, results=[]) for i, run in enumerate((first, second, third) * 2)]
    for run, correct in zip(many, (2, 71, 64, 30, 20, 10), strict=True):
        give(run, like, correct)
    assert sentence(many) == (
        "Under attack, the 6 networks are right on 2 % (standard) to 71 % (robust) of 100 test images."
    )
    give(first, like, 2, warnings=(EvaluationWarning("gradient masking", "gradients mislead"),))
    assert sentence([first]).endswith("; read the warnings about these numbers.")


def store(run, folder, x, x_adv, answers):
    folder = run.folder / folder
    folder.mkdir()
    path = folder / "examples.safetensors"
    save_file({"x": x, "x_adv": x_adv}, path)
    fields = zip(range(len(answers)), LABELS, *zip(*answers, strict=True), strict=False)
    return {"folder": folder, "files": {path.name: sha256(path)}, "examples": tuple(Example(*each) for each in fields)}


def pixels(tile):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(tile.source.partition(",")[2]))))


def test_the_picture_shows_the_same_images_before_and_after_with_the_answers(runs):
    (first, second, third), like = runs
    give(first, like, 2, **store(first, "a", IMAGES, 1 - IMAGES, [("coat", "shirt"), ("boot", "boot")]))
    give(second, like, 71, **store(second, "a", IMAGES, IMAGES / 2, [("coat", "coat"), ("bag", "bag")]))
    # Other images do not belong into the picture, whatever the result says about its points.
    give(third, like, 64, **store(third, "a", 1 - IMAGES, IMAGES, [("coat", "coat"), ("bag", "bag")]))
    gallery = picture([first, second, third])
    assert list(gallery.columns) == ["original", "standard", "robust"]
    assert [[(tile.text.replace(SPACE, " "), tile.mark) for tile in row] for row in gallery.rows] == [
        [("coat", ""), ("coat → shirt ✗", "wrong"), ("coat ✓", "right")],
        [("bag", ""), ("boot ✗", "wrong"), ("bag ✓", "right")],
    ]
    assert gallery.rows[0][1].shows.replace(SPACE, " ") == "coat, attacked, standard: coat → shirt ✗"
    shown = [[pixels(tile) for tile in row] for row in gallery.rows]
    assert all(image.shape == (3, 4) for row in shown for image in row)
    assert [[int(image[0, 0]) for image in row] for row in shown] == [[0, 255, 0], [255, 0, 128]]
    assert gallery.note.startswith("Fast attack suite at l2 1/2, 100 test points.")


def test_a_page_opens_with_it(measured):
    runs = [measured / "standard", measured / "robust"]
    page = page_of(*runs)
    text = page.text.partition("Training")[0]
    summaries = read_runs(runs)
    shares = [
        next(r for r in run.current(AttackResult) if r.points == 360 and "best" in run.checkpoints(r)).robust.value
        for run in summaries
    ]
    first, second = (f"{round(100 * share)} %" for share in shares)
    assert f"standard network is right on {first} of 360 test images and the robust network on {second}." in text
    assert "Before and after the attack" in text
    alt = [value for name, value in page.attributes if name == "alt"]
    assert sum(", attacked, " in text for text in alt) == 2 * 8
    assert render(summaries) == render(read_runs(runs))


def test_runs_are_named_by_all_that_they_are(runs):
    (run, *_), _ = runs
    recipe = run.run.recipe

    def named(loss, *methods):
        recipe.update(loss=loss, methods=list(methods))
        return run.method

    trades, trh = {"class_path": "atoll.losses.TRADES"}, {"class_path": "atoll.training.methods.TrH"}
    assert named(trades, trh) == "TRADES + TrH"
    assert named(trades) == "TRADES"
    measure = {"class_path": "atoll.training.methods.MeasureWCI", "init_args": {"points": 16}}
    assert named(trades, measure, trh, "my_method.py:Mine") == "TRADES + TrH + Mine"
    assert named(None, 3, {"class_path": None}) == ""


# --- verified and attacked --------------------------------------------------------------------------------------------


def bracket(run):
    """The cell that says between which numbers the accuracy is, in the tab of attacks."""
    tables = [block for block in section([run]).blocks if isinstance(block, TableBlock)]
    cells = [row[1] for table in tables for row in table.rows if row[0] == "range of robust accuracy"]
    return cells[0] if cells else None


def test_the_bracket_of_verified_and_attacked(runs):
    (run, *_), like = runs
    attacked = give(run, like, 64)
    assert bracket(run) is None
    prove(run, attacked, 57)
    assert bracket(run).text == "between 57.00 % (verified) and 64.00 % (attacked)"
    assert bracket(run).note == ""
    run.results[0] = dataclasses.replace(attacked, estimate=SampledAccuracy(100, 64, 32, 1))
    assert bracket(run).note == "estimate: 62.00 %"
    run.results[0] = dataclasses.replace(attacked, inputs="others")
    assert bracket(run) is None
