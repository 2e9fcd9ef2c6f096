"""The page: numbers and curves are those of the results, it is one file, and nothing in it runs or leaves."""

import base64
import hashlib
import json
import math

import numpy as np
import plotly.graph_objects as go
import pytest
import yaml

from atoll.cli import main
from atoll.measure import load_result
from atoll.report import read_runs
from atoll.report.blocks import plots
from atoll.report.sections import all_sections
from report_cases import HOSTILE, Page, page_of, poison_texts, poisoned, result_file
from support import change

# What the template and its two scripts are made of.
TAGS = {
    "html", "head", "meta", "title", "style", "body", "header", "div", "p", "h1", "h2", "h3", "button", "main",
    "section", "nav", "a", "noscript", "figure", "figcaption", "small", "bdi", "i", "img", "table", "thead",
    "tbody", "tr", "th", "td", "details", "summary", "pre", "code", "strong", "label", "input", "footer", "script",
}  # fmt: skip


def figures_of(*folders):
    return {plot.id: plot.figure for section in all_sections(read_runs(folders)) for plot in plots(section.blocks)}


def test_numbers_are_those_of_the_results(measured):
    robust, certified = measured / "robust", measured / "certified"
    text = page_of(robust, certified).text
    index = load_result(result_file(robust, "curvature").parent)
    for estimate in (index.wci, *(layer.trace for layer in index.layers)):
        low, high = estimate.interval
        assert f"{estimate.value:.4g}" in text
        assert f"95 %: {low:.4g}–{high:.4g}" in text
    smoothed = load_result(result_file(robust, "certify").parent)
    title = "Randomized smoothing, sigma 0.25, 100 samples, 10 test points"
    share = smoothed.verified[1].accuracy.value
    assert f"Verified accuracy (VRA) at l2 0.25 {title} {100 * share:.2f} %" in text
    assert "each certificate is false with probability at most 0.001" in text
    proofs = [load_result(path.parent) for path in (certified / "results/certify").glob("*/result.json")]
    for proof in proofs:  # the test of the training, and the one with attacks
        value = f"{100 * proof.verified[0].accuracy.value:.2f} %"
        title = f"Proven in float64, {proof.points} test points"
        assert f"Verified accuracy (VRA) at l2 {proof.verified[0].eps:g} {title} not measured {value}" in text
    assert "no certificate was broken 5 of" in text or "no certificate was broken 0 of" in text
    explained = load_result(result_file(robust, "explain").parent)
    for method in explained.methods.values():
        assert f"{method.infidelity.value:.3g}" in text
    assert f"boundary found for {100 * explained.success:.1f} % of the points" in text
    recipe = yaml.safe_load((robust / "recipe.yaml").read_text())
    assert f"trainer.batch_size {recipe['trainer']['batch_size']} " in text


def test_figures_are_what_plotly_takes_and_show_the_measured_curves(measured):
    figures = figures_of(measured / "robust", measured / "certified")
    assert {
        "training-robust-validation", "training-robust-train", "training-clean-validation", "training-clean-train",
        "training-vra-estimate-validation", "training-gap", "training-loss", "training-loss-1",
        "attacks-0", "attacks-1", "attacks-2", "attacks-3", "attacks-4", "attacks-5",
        "certificates-0", "certificates-1", "certificates-2", "curvature-layers-0", "curvature-time",
        "curvature-density-0", "landscape-0-0", "contour-0-0",
        "corruptions-0-mean", "corruptions-0-noise", "corruptions-0-blur", "corruptions-0-weather",
        "corruptions-0-digital",
    } == figures.keys()  # fmt: skip
    for figure in figures.values():
        go.Figure(figure)  # refuses properties that plotly.js does not know
    epochs = [r for r in map(json.loads, (measured / "robust/metrics.jsonl").open()) if r["kind"] == "epoch"]
    curves = {trace["name"]: trace for trace in figures["training-robust-validation"]["data"]}
    assert curves["robust, validation"]["y"] == [100 * epoch["validation_robust"] for epoch in epochs]
    gap = [100 * epoch["train_robust"] - 100 * epoch["validation_robust"] for epoch in epochs]
    assert figures["training-gap"]["data"][0]["y"] == gap
    stored = np.load(result_file(measured / "robust", "curvature").with_name("landscape-weights.npz"))
    surface = figures["landscape-0-0"]["data"][0]
    assert np.array_equal(np.array(surface["z"]), stored["loss"])
    assert surface["x"] == stored["b"].tolist()  # columns of loss are along b
    attacked = load_result(result_file(measured / "robust", "attack").parent)
    fog = next(each for each in attacked.corruptions.accuracies if each.name == "fog")
    curves = {trace["name"]: trace for trace in figures["corruptions-0-weather"]["data"]}
    assert curves["fog, robust"]["y"] == [100 * each.value for each in (attacked.clean, *fog.severities)]
    assert curves["fog, robust"]["x"] == [0, 1, 2, 3, 4, 5]
    means = [100 * each.value for each in (attacked.clean, *attacked.corruptions.severities)]
    assert figures["corruptions-0-mean"]["data"][0]["y"] == means
    ranges = [figures[f"corruptions-0-{name}"]["layout"] for name in ("mean", "noise", "blur", "weather", "digital")]
    assert all(layout["xaxis"]["range"] == [-0.2, 5.2] for layout in ranges)
    assert all(layout["yaxis"]["range"] == [-2, 102] for layout in ranges)
    assert figures["curvature-time"]["data"][0]["error_y"]["array"] == [e["wci_standard_error"] for e in epochs]


def test_long_curves_are_thinned_out(robust):
    record = {"kind": "epoch", "step": 1, "validation_robust": 0.5}
    lines = [json.dumps(record | {"epoch": float(i)}) for i in range(5000)]
    (robust / "metrics.jsonl").write_text("\n".join(lines))
    x = figures_of(robust)["training-robust"]["data"][0]["x"]
    assert (x[0], x[-1], len(x)) == (0.0, 4999.0, 400)


def test_the_same_folders_give_the_same_bytes(plotly, measured, tmp_path, capsys):
    for name in ("one.html", "two.html"):
        arguments = ["report", str(measured / "robust"), str(measured / "certified"), "-o", str(tmp_path / name)]
        assert main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.split("}\n")[0] + "}")
    assert 4e6 < answer["bytes"] == (tmp_path / "one.html").stat().st_size < 8e6
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
    links = [value for name, value in page.attributes if name in ("src", "href", "srcset", "action", "data")]
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert sum(link.startswith("data:") for link in links) > 20


def test_hostile_corruptions_are_text(robust):
    """Names from anybody, and numbers that are missing or not a number."""
    path = result_file(robust, "attack")
    tree = poison_texts(json.loads(path.read_text())["corruptions"])
    tree["accuracies"][0]["severities"] = []
    tree["accuracies"][1]["severities"][0] |= {"correct": 0, "total": 0}
    tree["mean"] |= {"value": math.nan}
    tree["severities"] = tree["severities"][:2]
    change(path, corruptions=tree)
    page = page_of(robust)
    assert set(page.tags) <= TAGS
    assert page.tags.count("script") == 3
    assert "One image at severity 3" in page.text
    assert page.text.count(HOSTILE) > 20
    json.loads(page.scripts["figures"], parse_constant=pytest.fail)
    (path.parent / "corrupted.safetensors").write_bytes(b"no images")
    assert "One image at severity 3" not in page_of(robust).text


def test_a_hostile_run_is_text(robust, measured):
    page = page_of(poisoned(robust), measured / "certified")
    assert set(page.tags) <= TAGS
    assert page.tags.count("script") == 3
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not {chr(code) for code in (0x202E, 0x2066, 0x200F, 0)} & set(page.text)
    json.loads(page.scripts["figures"], parse_constant=pytest.fail)
    scripts = [text for name, text in page.scripts.items() if name != "figures"]
    assert not any(HOSTILE[:20] in text for text in scripts)
    assert page.text.count(HOSTILE) > 20
