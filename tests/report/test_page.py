"""The page says what the files of a run say, and what they lack; whatever they say stays text."""

import base64
import hashlib
import json
import os
import shlex
import shutil
from html.parser import HTMLParser

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cli import main
from atoll.curvature import Estimate
from atoll.errors import AtollError
from atoll.report import read_runs, render
from atoll.report.blocks import Code, plots
from atoll.report.read import Kept, Reading
from atoll.report.sections import SECTIONS
from atoll.stats import Accuracy
from report_cases import HOSTILE, poisoned

# What the template and its two scripts are made of.
TAGS = {
    "html", "head", "meta", "title", "style", "body", "header", "div", "p", "h1", "h2", "h3", "button", "main",
    "section", "nav", "a", "noscript", "figure", "figcaption", "small", "bdi", "i", "img", "table", "thead",
    "tbody", "tr", "th", "td", "details", "summary", "pre", "code", "strong", "label", "input", "footer", "script",
}  # fmt: skip


class Page(HTMLParser):
    """The page as a browser's parser sees it: tags, text, scripts."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.words, self.scripts, self.inside = [], [], [], {}, None
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.inside = (tag, dict(attrs)) if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside is None:
            self.words.append(data)
        elif self.inside[0] == "script":
            name = self.inside[1].get("id") or f"script {len(self.scripts)}"
            self.scripts[name] = self.scripts.get(name, "") + data


@pytest.fixture
def plotly():
    """For tests of the page as it is; plotly.js is most of it and takes most of the time."""


@pytest.fixture(autouse=True)
def _quick(request, monkeypatch):
    if "plotly" not in request.fixturenames:
        monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "0")


def page_of(*folders):
    return Page(render(read_runs(folders)))


def evaluation(folder):
    (path,) = (folder / "evaluations").glob("*/evaluation.json")
    return path


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_numbers_are_those_of_the_files(measured):
    robust, certified = measured / "robust", measured / "certified"
    text = page_of(robust, certified).text
    attacked = json.loads(evaluation(robust).read_text())
    for share in (attacked["robust"], attacked["clean"], *(attack["accuracy"] for attack in attacked["attacks"])):
        low, high = share["interval"]
        assert f"{100 * share['value']:.2f}" in text
        assert f"{100 * low:.1f}–{100 * high:.1f}" in text
    curvature = json.loads((robust / "curvature" / "curvature.json").read_text())
    for estimate in (curvature["wci"], *(layer["trace"] for layer in curvature["layers"])):
        assert str(Estimate(estimate["value"], estimate["standard_error"])) in text
    (proof,) = json.loads((certified / "certificates" / "certification.json").read_text())["verified"]
    assert f"Verified accuracy (VRA), l2 0.1 not measured {100 * proof['value']:.2f} %" in text
    probable = json.loads((robust / "smoothing" / "certification.json").read_text())["verified"][1]
    assert f"Probably verified accuracy, l2 0.25 {100 * probable['value']:.2f} %" in text
    assert "with probability 0.999, not surely" in text
    assert "5 of" in text
    assert "none fell" in text
    assert "NOT passed" in text
    recipe = yaml.safe_load((robust / "recipe.yaml").read_text())
    assert f"trainer.batch_size {recipe['trainer']['batch_size']} " in text


def test_a_robust_accuracy_stands_in_the_row_of_its_own_threat(measured):
    text = page_of(measured / "robust", measured / "certified").text
    own = json.loads((measured / "certified" / "result.json").read_text())["best"]["robust"]["value"]
    assert "Robust accuracy, linf 0.15" in text
    assert f"Robust accuracy, l2 0.5 not measured {100 * own:.2f} %" in text
    assert "a weak attack" in text
    proven = json.loads((measured / "certified" / "result.json").read_text())["best"]["vra"]["value"]
    assert f"Verified accuracy (VRA), l2 0.5 not measured {100 * proven:.2f} %" in text  # by the training's own test


def test_the_summary_prefers_the_best_weights_then_most_points_then_most_broken(robust):
    first = evaluation(robust)
    tree = json.loads(first.read_text())

    def another(name, correct, total, **more):
        counts = {"robust": {"correct": correct, "total": total}, "points": total}
        (first.parents[1] / name).mkdir()
        (first.parents[1] / name / "evaluation.json").write_text(json.dumps(tree | counts | more))

    def row():
        return page_of(robust).text.split("Robust accuracy, linf 0.15 ")[1].split(" ")[0]

    shutil.rmtree(first.parent)
    for place, (correct, total, more, shown) in enumerate([
        (30, 40, {}, "75.00"),
        (20, 40, {}, "50.00"),  # the same points, more broken
        (60, 80, {}, "75.00"),  # more points
        (40, 90, {"checkpoint": "00000001"}, "75.00"),  # of weights that were left behind
        (10, 99, {"split": "train"}, "75.00"),
        (10, 99, {"weights": "swa"}, "75.00"),
    ]):  # fmt: skip
        another(str(place), correct, total, **more)
        assert row() == shown
    text = page_of(robust).text
    assert "Robust accuracy, linf 0.15, train points 10.10" in text
    assert "Robust accuracy, linf 0.15, swa weights 10.10" in text


def test_the_commands_of_the_page_make_the_same_results(robust):
    """Typed again, the commands for attacks and certificates find what was kept; for training they are valid."""
    change(robust / "environment.json", command=["bin/atoll", "train", "digits-at", "loss=TRADES"])
    (code,) = (block for block in SECTIONS[-1](read_runs([robust])).blocks if isinstance(block, Code))
    assert code.lines[0] == "atoll train digits-at loss=TRADES"
    again = {words[1]: words[1:] for words in map(shlex.split, code.lines)}
    assert again.keys() == {"train", "attack", "certify", "curvature", "explain"}
    before = json.loads(evaluation(robust).read_text())
    shutil.rmtree(robust / "evaluations")
    assert main(again["attack"]) == 0
    after = json.loads(evaluation(robust).read_text())
    for name in ("robust", "threat", "points", "seed", "suite", "checkpoint"):
        assert after[name] == before[name]
    kept = robust / "smoothing" / "certification.json"
    before = json.loads(kept.read_text())
    kept.unlink()
    assert main(again["certify"]) == 0
    assert json.loads(kept.read_text())["verified"] == before["verified"]
    assert main([*again["train"], "--dry-run"]) == 0


def test_figures_are_what_plotly_takes_and_show_the_measured_curves(measured):
    runs = read_runs([measured / "robust", measured / "certified"])
    figures = {plot.id: plot.figure for section in SECTIONS for plot in plots(section(runs).blocks)}
    assert {
        "training-robust", "training-clean", "training-vra-estimate", "training-gap", "training-loss", "attacks-0",
        "certificates-curve", "curvature-layers", "curvature-time", "curvature-density", "landscape-weights-0",
        "contour-weights-0",
    } == figures.keys()  # fmt: skip
    for figure in figures.values():
        go.Figure(figure)  # refuses properties that plotly.js does not know
    epochs = [r for r in map(json.loads, (measured / "robust/metrics.jsonl").open()) if r["kind"] == "epoch"]
    curves = {trace["name"]: trace for trace in figures["training-robust"]["data"]}
    assert curves["robust, validation"]["y"] == [100 * epoch["validation_robust"] for epoch in epochs]
    gap = [100 * epoch["train_robust"] - 100 * epoch["validation_robust"] for epoch in epochs]
    assert figures["training-gap"]["data"][0]["y"] == gap
    stored = np.load(measured / "robust/curvature/landscape-weights.npz")
    surface = figures["landscape-weights-0"]["data"][0]
    assert np.array_equal(np.array(surface["z"]), stored["loss"])
    assert surface["x"] == stored["b"].tolist()  # columns of loss are along b
    assert figures["curvature-time"]["data"][0]["error_y"]["array"] == [e["wci_standard_error"] for e in epochs]
    certified = figures["certificates-curve"]["data"]
    assert [trace["line"]["dash"] for trace in certified] == ["dash", "solid"]
    assert len({trace["line"]["color"] for trace in certified}) == 2


def test_the_same_folders_give_the_same_bytes(plotly, measured, tmp_path, capsys):
    for name in ("one.html", "two.html"):
        words = ["report", str(measured / "robust"), str(measured / "certified"), "-o", str(tmp_path / name), "--json"]
        assert main(words) == 0
    found = json.loads(capsys.readouterr().out.split("}\n")[0] + "}")
    assert 4e6 < found["bytes"] == (tmp_path / "one.html").stat().st_size < 8e6
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_by_default_the_page_is_in_the_folder_of_the_run(robust, capsys):
    assert main(["report", str(robust), "--title", "My <run>"]) == 0
    assert "report.html" in "".join(capsys.readouterr().out.split())
    assert Page((robust / "report.html").read_text()).text.startswith("My <run>: Atoll report")


def test_the_policy_allows_our_two_scripts_and_no_connection(plotly, measured):
    page = page_of(measured / "robust")
    (policy,) = (value for name, value in page.attributes if name == "content" and "default-src" in value)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in rules["script-src"]
    scripts = [text for name, text in page.scripts.items() if name != "figures"]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    assert rules["script-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    json.loads(page.scripts["figures"], parse_constant=pytest.fail)
    links = [value for name, value in page.attributes if name in ("src", "href", "srcset", "action", "data")]
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert sum(link.startswith("data:") for link in links) == 2


def unfinished(folder):
    (folder / "result.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(lines[0] + lines[1][:30])


def just_begun(folder):
    for path in folder.iterdir():
        if path.name not in ("recipe.yaml", "environment.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


# What happened to a run, and what the page says about it.
INCOMPLETE = {
    "killed": (unfinished, ["not finished: 1 of 3 epochs", "atoll train --resume --out", "1 of the lines of metrics"]),
    "just begun": (just_begun, ["there is none yet", "No epoch is recorded yet", "atoll attack", "atoll curvature"]),
    "no attack": (lambda f: shutil.rmtree(f / "evaluations"), ["robust accuracy: there is no evaluation", "PGD-2"]),
    "attack under way": (lambda f: evaluation(f).unlink(), ["was begun and is not finished"]),
    "no smoothing": (lambda f: shutil.rmtree(f / "smoothing"), ["certificates: there are none", "--smooth 0.25"]),
    "no curvature": (lambda f: shutil.rmtree(f / "curvature"), ["curvature: it was not measured", "during training"]),
    "no landscape": (
        lambda f: (f / "curvature/landscape-weights.npz").unlink(),
        ["loss landscape: it was not measured", "--landscape weights"],
    ),
    "no explanation": (lambda f: shutil.rmtree(f / "explain"), ["explanations: there are none", "atoll explain"]),
    "half a file": (lambda f: (f / "curvature/curvature.json").write_text('{"wci": '), ["curvature.json cannot be"]),
    "no mapping": (lambda f: (f / "result.json").write_text("[1]"), ["result.json cannot be read: expected a mapping"]),
    "deep": (lambda f: (f / "result.json").write_text("[" * 10**5), ["result.json cannot be read"]),
    "no text": (lambda f: (f / "environment.json").write_bytes(b"\xff\xfe"), ["environment.json cannot be read"]),
    "no landscape file": (
        lambda f: (f / "curvature/landscape-weights.npz").write_bytes(b"PK"),
        ["landscape-weights.npz cannot be read"],
    ),
    "another landscape": (
        lambda f: np.savez(f / "curvature/landscape-weights.npz", a=np.zeros(2), b=np.zeros(3), loss=np.zeros(4)),
        ["landscape-weights.npz cannot be read", "expected a landscape"],
    ),
    "landscape of infinities": (
        lambda f: np.savez(
            f / "curvature/landscape-weights.npz",
            a=np.zeros(2),
            b=np.zeros(2),
            loss=np.full((2, 2), np.inf),
            axes=["a", "b"],
        ),
        ["landscape-weights.npz cannot be read: there are no finite numbers to draw"],
    ),
    "large landscape": (
        lambda f: np.savez(
            f / "curvature/landscape-weights.npz",
            a=np.zeros(300),
            b=np.zeros(300),
            loss=np.zeros((300, 300)),
            axes=["a", "b"],
        ),
        ["90,000 numbers are too many to draw"],
    ),
    "large density": (
        lambda f: np.savez(f / "curvature/density.npz", eigenvalues=np.zeros((1, 10**5)), weights=np.ones((1, 10**5))),
        ["100,000 numbers are too many to draw"],
    ),
    "pipe": (
        lambda f: ((f / "metrics.jsonl").unlink(), os.mkfifo(f / "metrics.jsonl")),
        ["No epoch is recorded yet"],
    ),
    "step without end": (lambda f: change(evaluation(f), checkpoint="9" * 5000), ["an unknown step"]),
    "pickled": (
        lambda f: np.savez(f / "curvature/density.npz", eigenvalues=np.array([print]), weights=np.zeros(1)),
        ["density.npz cannot be read"],
    ),
    "bomb": (
        lambda f: np.savez_compressed(f / "curvature/density.npz", eigenvalues=np.zeros(2**24)),
        ["density.npz cannot be read: larger than 64 MB"],
    ),
    "old": (lambda f: evaluation(f).write_text('{"clean": {"value": 0.5}}'), ["not measured"]),
    "findings": (
        lambda f: change(evaluation(f), findings=[{"kind": "gradient masking", "message": "they mislead"}]),
        ["gradient masking", "they mislead (linf 0.15)", "see the alarm"],
    ),
    "other weights": (lambda f: change(evaluation(f), checkpoint="00000001"), ["attacks of other weights"]),
    "broken certificate": (
        lambda f: (f / "smoothing/broken.safetensors").write_bytes(b""),
        ["a certificate was broken"],
    ),
    "chosen on test": (lambda f: change(f / "result.json", selected_on="test"), ["chosen on the test set"]),
}


def test_a_broken_picture_is_left_out(robust):
    (robust / "explain/attributions.png").write_bytes(b"no png")
    assert page_of(robust).tags.count("img") == 1  # that of the attack


@pytest.fixture(scope="module")
def complete(measured):
    return page_of(measured / "robust").text


@pytest.mark.parametrize("case", INCOMPLETE)
def test_what_is_missing_or_doubtful_is_said(robust, complete, case):
    happened, sentences = INCOMPLETE[case]
    happened(robust)
    text = page_of(robust).text.replace(" : ", ": ")
    for sentence in sentences:
        assert sentence in text
    assert sentences[0] not in complete


def test_an_incomplete_run_does_not_spoil_a_comparison(robust, measured):
    just_begun(robust)
    text = page_of(robust, measured / "certified").text
    assert "robust , checkpoints : there is none yet" in text
    assert "5 of" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{empty}"], "does not hold a run"),
        (["{empty}/none"], "there is no run at"),
        (["{robust}", "-o", "{empty}"], "expected a file, got the folder"),
        (["{robust}", "-o", "{robust}/recipe.yaml/report.html"], "cannot write"),
    ],
)
def test_nonsense_is_one_sentence(measured, tmp_path, capsys, words, sentence):
    places = {"empty": tmp_path, "robust": measured / "robust"}
    assert main(["report", *(word.format(**places) for word in words)]) == 1
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_recipe_that_is_too_deep_is_one_sentence(robust):
    (robust / "recipe.yaml").write_text("[" * 10**4)
    with pytest.raises(AtollError, match="does not hold a run"):
        read_runs([robust])


def test_anchors_cannot_make_a_short_recipe_long(robust):
    lines = [
        "a0: &a0 {x: 1, y: 2, z: 3}",
        *(f"a{i}: &a{i} [{', '.join(f'*a{i - 1}' for _ in range(9))}]" for i in range(1, 9)),
    ]
    (robust / "recipe.yaml").write_text("\n".join([*lines, "own: &own {self: *own}"]))
    page = page_of(robust)
    assert page.tags.count("tr") < 1000
    assert "more was left out" in page.text


def check_harmless(page):
    assert set(page.tags) <= TAGS
    assert page.tags.count("script") == 3
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not {chr(code) for code in (0x202E, 0x2066, 0x200F, 0)} & set(page.text)
    json.loads(page.scripts["figures"], parse_constant=pytest.fail)
    scripts = [text for name, text in page.scripts.items() if name != "figures"]
    assert not any(HOSTILE[:20] in text for text in scripts)


def test_a_hostile_run_is_text(robust, measured):
    page = page_of(poisoned(robust), measured / "certified")
    check_harmless(page)
    assert HOSTILE in page.text


TEXTS = st.sampled_from([HOSTILE, "raw", "", "\udc80", "\u2028", "-->", "]]>"]) | st.text(max_size=8)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
NAMES = st.sampled_from([
    "clean", "robust", "attacks", "findings", "kind", "message", "threat", "norm", "eps", "split", "points",
    "checkpoint", "weights", "suite", "name", "accuracy", "correct", "total", "value", "standard_error", "verified",
    "curve", "radius", "layers", "trace", "term", "share", "traces", "gap", "error", "methods", "sanity", "passed",
    "boundary", "words", "images", "distances", "best", "last", "epoch", "wci", "train_robust", "validation_robust",
    "smoothing", "alpha",
])  # fmt: skip
TREES = st.dictionaries(
    NAMES, st.recursive(LEAVES, lambda t: st.lists(t, max_size=3) | st.dictionaries(NAMES, t, max_size=5)), max_size=10
)


@settings(max_examples=60)
@given(st.lists(TREES, min_size=8, max_size=8))
def test_any_tree_can_be_shown(tmp_path_factory, trees):
    """Wherever a value has a type that nobody expected, there still is a page."""
    folder = tmp_path_factory.getbasetemp()
    recipe, environment, epoch, tests, attacked, certified, curved, explained = trees
    run = Reading(0, "any", folder, recipe, environment, [epoch | {"epoch": 1.0}], {}, tests)
    run.evaluations, run.certifications = [Kept(folder, attacked)], [Kept(folder, certified)]
    run.curvature, run.explanations = Kept(folder, curved), [Kept(folder, explained)]
    blocks = [block for section in SECTIONS for block in section([run]).blocks]
    for plot in plots(blocks):
        json.dumps(plot.figure, allow_nan=False)
    check_harmless(Page(render([run])))


def test_intervals_are_those_of_the_counts():
    """The page trusts counts, not the interval somebody wrote beside them."""
    from atoll.report.values import accuracy

    tree = {"correct": 9, "total": 10, "value": 1.0, "interval": [1.0, 1.0]}
    assert accuracy(tree).interval == Accuracy(9, 10).interval


def test_long_curves_are_thinned_out(robust):
    record = {"kind": "epoch", "validation_robust": 0.5}
    lines = [json.dumps(record | {"epoch": float(i)}) for i in range(5000)]
    (robust / "metrics.jsonl").write_text("\n".join(lines))
    runs = read_runs([robust])
    (figure,) = (plot.figure for plot in plots(SECTIONS[0](runs).blocks) if plot.id == "training-robust")
    x = figure["data"][0]["x"]
    assert (x[0], x[-1], len(x)) == (0.0, 4999.0, 400)


def test_landscape_and_density_come_back_as_they_were_kept(tmp_path):
    from atoll.curvature import Density, Landscape

    a, b = torch.linspace(-1, 1, 3, dtype=torch.float64), torch.linspace(0, 1, 5, dtype=torch.float64)
    Landscape(a, b, torch.outer(a, b), ("a", "b")).save(tmp_path / "landscape.npz")
    found = Landscape.load(tmp_path / "landscape.npz")
    assert torch.equal(found.loss, torch.outer(a, b))
    assert torch.equal(found.a, a)
    density = Density(np.array([[0.0, 1.0]]), np.array([[0.25, 0.75]]))
    density.save(tmp_path / "density.npz")
    assert Density.load(tmp_path / "density.npz").moment(1) == density.moment(1)
