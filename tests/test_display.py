"""What ``print`` and notebooks show of runs, results and tables."""

import math
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.attacks import PGD
from atoll.attacks.diagnostics import EvaluationWarning
from atoll.attacks.evaluate import AttackSummary, evaluate
from atoll.attacks.measure import AttackResult, AttackSettings
from atoll.certify.measure import CertifyResult, CertifySettings, EmpiricalAccuracy, Verified
from atoll.curvature.measure import CurvatureResult, CurvatureSettings
from atoll.data import MemorySplit
from atoll.display import TextTable
from atoll.explain.measure import ExplainResult, ExplainSettings, MethodResult
from atoll.export import Exported
from atoll.health import Finding, HealthResult, HealthSettings
from atoll.measure import MEASUREMENTS, Result
from atoll.models import MLP
from atoll.runs.run import Run, open_run
from atoll.stats import Accuracy, Estimate
from atoll.studies import Column, Table
from atoll.studies.cell import CellResult, CellSettings
from atoll.subject import Origin, SubjectRecord
from atoll.threat import ThreatModel

HOSTILE = '<img src=x onerror="alert(1)">&amp;'
COMMON = {
    "subject": SubjectRecord("", model="MLP", origin=Origin(run=HOSTILE, step=40, weights="swa")),
    "inputs": "",
    "points": 1200,
}
ATTACK = AttackSummary("PGD-20", Accuracy(40, 100), 98, 58, 2000, 1960, 1.25)

# One of each kind, with what its text has to contain.  A new kind of result joins by one entry.
RESULTS = {
    "attack": (
        AttackResult(
            **COMMON,
            settings=AttackSettings(norm="linf", eps="8/255"),
            clean=Accuracy(98, 100),
            robust=Accuracy(40, 100),
            attacks=(ATTACK,),
            warnings=(EvaluationWarning("gradients", HOSTILE),),
            adbd=Estimate(0.2, 0.01),
        ),
        ["1,200 test points, linf 8/255", "clean 98.00 93.0-99.4", "PGD-20 40.00 30.9-49.8 58 of 98 3,960 1.2",
         "worst case 40.00", "ADBD", "gradients: " + HOSTILE],
    ),
    "health": (
        HealthResult(
            **COMMON,
            settings=HealthSettings(),
            clean=Accuracy(98, 100),
            findings=(Finding("softmax", HOSTILE, "--outputs probabilities"),),
            compared={"test": 100, "training": 1000},
        ),
        ["clean accuracy, % 98.00", "findings 1", f"softmax: {HOSTILE}; use --outputs probabilities"],
    ),
    "certify": (
        CertifyResult(
            **COMMON,
            settings=CertifySettings(eps="0.25", precision="float64"),
            clean=Accuracy(98, 100),
            verified=(Verified(eps=0.25, accuracy=Accuracy(60, 100)),),
            empirical=(EmpiricalAccuracy(eps=0.25, attacks="APGD-CE", accuracy=Accuracy(70, 100)),),
            median_radius=0.31,
            curve={},
        ),
        ["l2, float64", "verified 0.25 60.00", "APGD-CE 0.25 70.00", "median certified radius 0.31"],
    ),
    "curvature": (
        CurvatureResult(
            **COMMON,
            settings=CurvatureSettings(norm="linf", eps="0.1"),
            loss="AT()",
            attacked=True,
            mean_loss=0.5,
            wci=Estimate(20.0, 1.0),
            trace=Estimate(300.0, 10.0),
            eigenvalues=(7.0, 5.0),
        ),
        ["AT(), linf 0.1", "WCI 20.0 ± 1.0", "largest eigenvalue 7", "mean loss 0.5", "norm of the weights -"],
    ),
    "explain": (
        ExplainResult(
            **COMMON,
            settings=ExplainSettings(),
            predictions=(),
            titles=(),
            distance=Estimate(1.5, 0.1),
            success=0.99,
            methods={
                "SM": MethodResult(undefined=0, infidelity=Estimate(2.0), scaled_infidelity=Estimate(1.0)),
                "maps.py:Mine": MethodResult(
                    undefined=0, infidelity=Estimate(3.0), scaled_infidelity=Estimate(math.nan), sanity_passed=True
                ),
            },
        ),
        ["attribution infidelity at best scale sanity check passed", "SM 2 1 -", "Mine 3 - yes",
         "99.0 % of the points"],
    ),
    "cell": (
        CellResult(
            **COMMON,
            settings=CellSettings(study="steps", scale="cpu", row="1 step", cell_seed=3),
            numbers={"robust": 41.5, "curve": [1, 2]},
        ),
        ["steps: 1 step, seed 3", "robust 41.5"],
    ),
}  # fmt: skip


class Texts(HTMLParser):
    """The tags and the text of HTML, as a browser reads them."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.open, self.texts = set(), [], []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.open.append(tag)
        assert all(name == "style" for name, _ in attributes)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def words(text):
    return " ".join(str(text).split())


def shown(thing):
    """What a notebook shows, as text."""
    html = Texts(thing._repr_html_())
    assert html.tags <= {"table", "thead", "tbody", "tr", "th", "td", "div", "b", "i"}
    return html


def test_every_kind_of_result_is_shown():
    assert RESULTS.keys() == MEASUREMENTS.members().keys()


@pytest.mark.parametrize("kind", RESULTS)
def test_results_print_as_short_tables(kind):
    result, expected = RESULTS[kind]
    text = str(result)
    assert len(text.splitlines()) <= 12
    for part in expected:
        assert part in words(text)
    html = shown(result)
    cells = words(" ".join(html.texts))
    for part in expected:
        assert words(part) in cells
    if kind != "cell":
        assert f"{HOSTILE}, step 40, swa: 1,200" in text
        assert f"{HOSTILE}, step 40, swa: 1,200" in " ".join(html.texts)


def test_results_of_other_packages_show_their_numbers():
    class Confidence(Result):
        kind = "confidence"

    result = Confidence(**COMMON, settings=AttackSettings())
    object.__setattr__(result, "confidence", Estimate(0.9, 0.01))
    object.__setattr__(result, "name", HOSTILE)
    object.__setattr__(result, "curve", [1, 2])
    assert "confidence 0.900 ± 0.010" in words(result)
    assert HOSTILE in shown(result).texts
    assert "curve" not in words(result)


def test_evaluations(capsys):
    split = MemorySplit(torch.rand(5, 3), torch.tensor([0, 1, 0, 1, 0]))
    evaluation = evaluate(MLP((3,), 2), split, {"PGD": PGD(ThreatModel("linf", 0.1))}, check=False)
    print(evaluation)  # noqa: T201
    assert "5 points attack accuracy % 95 %" in words(capsys.readouterr().out)
    assert "worst case" in shown(evaluation).texts


def test_runs(trained, tmp_path):
    run = open_run(trained)
    (row, *_) = run.tests()
    text = words(run)
    assert f"{trained.name}: SmallConvNet on Digits, trained with AT; test accuracy in %" in text
    assert f"best {row.epoch} {100 * row.clean.value:.2f} {100 * row.robust.value:.2f}" in text
    assert "last" in shown(run).texts
    assert repr(run).startswith("Run(folder=")
    (tmp_path / "recipe.yaml").write_text(
        "{model: 'evil.py:<b>Net</b>', data: other.py:Photos, loss: AT, threat: {norm: linf, eps: 0.1}}"
    )
    text = words(open_run(tmp_path))
    assert "<b>Net</b> on Photos" in text
    assert "training is not finished" in text
    assert "other.py" in text  # why it cannot be opened
    assert "<b>Net</b>" in " ".join(shown(Run(tmp_path)).texts)


def test_tables_of_studies():
    columns = [Column("robust, %", "high", 1), Column("seconds", digits=0)]
    rows = {"AT": [Estimate(41.0, 0.8), Estimate(9.0)], HOSTILE: [Estimate(42.1, 0.5), None]}
    table = Table(columns, rows)
    assert "AT 41.0 ± 0.8 9" in words(table)
    assert HOSTILE in shown(table).texts
    html = table._repr_html_()
    assert "<b>42.1 ± 0.5</b>" in html
    assert "<i>41.0 ± 0.8</i>" in html


def test_exported_files():
    exported = Exported("net.onnx", 1234, ("logits", "label"), 360, 2e-7)
    assert words(exported) == (
        "net.onnx value bytes 1,234 outputs logits, label compared on 360 points largest difference 2e-07"
    )
    assert "abstains on" in shown(Exported("net.onnx", 1, ("radius",), 9, 0.0, 0.5, 4)).texts


def test_estimates():
    assert Estimate(2.0, 0.1)._repr_html_() == "2.00 ± 0.10 (95 %: 1.804 to 2.196)"
    assert Estimate(2.0)._repr_html_() == "2"


@given(st.lists(st.lists(st.text(max_size=9), min_size=3, max_size=3), max_size=4), st.text(max_size=9))
def test_any_text_is_escaped(rows, title):
    table = TextTable(title, ["", "<b>", "&"], rows, [title])
    html = table._repr_html_()
    assert html.count("<tr>") == (len(rows) + 1 if rows else 0)
    inside = Texts(html)
    assert inside.tags <= {"table", "b", "thead", "tbody", "tr", "th", "td", "div"}
    assert len(str(table).split("\n")) >= len(rows)


def test_columns_of_numbers_are_aligned_right():
    table = TextTable("", ["name", "a", "b"], [["x", "1.5", "text"], ["long name", "-", "2"]])
    assert str(table).splitlines() == ["name         a  b", "x          1.5  text", "long name    -  2"]
    assert table._repr_html_().count("text-align: right") == 3


def test_nothing_to_show():
    assert str(TextTable("title", [], [])) == "title"
    assert TextTable("", [], [])._repr_html_() == "<table></table>"
