"""The evidence of a run: the numbers of its results, how to repeat them, and what was not measured."""

import json
import shlex

import pytest

from atoll.attacks.measure import AttackResult
from atoll.certify.measure import CertifyResult
from atoll.cli import parse
from atoll.curvature.measure import CurvatureResult
from atoll.explain.measure import ExplainResult
from atoll.files import finite
from atoll.report.evidence import SCHEMA, evidence_json, properties
from atoll.report.run_summary import read_runs
from report_cases import page_of, result_file

NAMES = [
    "Accuracy",
    "Robustness to evasion",
    "Stability under corruption",
    "Certified radius",
    "Sensitivity",
    "Relevance",
]


@pytest.fixture(scope="module")
def summary(measured):
    (run,) = read_runs([measured / "robust"])
    return run


def evidence(summary, name):
    (item,) = (item for item in properties(summary) if item.name == name)
    return {each.what: each for each in item.evidence}


def newest(summary, kind, where=lambda result: True):
    return [result for result in summary.current(kind) if where(result)][-1]


def test_numbers_are_those_of_the_results(summary):
    attack = newest(summary, AttackResult, lambda result: result.points == 40)
    assert evidence(summary, "Robustness to evasion")["accuracy under attack, linf 0.15"].number in [
        result.robust for result in summary.current(AttackResult)
    ]
    corrupted = evidence(summary, "Stability under corruption")["mean accuracy under corruptions"]
    assert corrupted.number == attack.corruptions.mean
    assert corrupted.cell.text == f"{100 * attack.corruptions.mean.value:.2f} %"
    certified = newest(summary, CertifyResult)
    proven = evidence(summary, "Certified radius")
    for row in certified.verified:
        assert proven[f"verified accuracy at l2 {row.eps:.4g}"].number == row.accuracy
    assert "smoothed" in proven["verified accuracy at l2 0.25"].uncertainty
    assert (
        evidence(summary, "Sensitivity")["Weight-Curvature Index (WCI)"].number == newest(summary, CurvatureResult).wci
    )
    explained = newest(summary, ExplainResult)
    assert evidence(summary, "Relevance")["infidelity at the best scale, SM"].number in [
        method.scaled_infidelity for method in explained.methods.values()
    ]


def test_a_certified_run_has_proofs(measured):
    (run,) = read_runs([measured / "certified"])
    proven = evidence(run, "Certified radius")["verified accuracy at l2 0.1"]
    assert "proof" in proven.how
    assert "were attacked at their radius" in proven.uncertainty
    assert "Lipschitz constant (l2)" in evidence(run, "Sensitivity")


def test_every_number_can_be_repeated_and_every_property_has_limits(measured):
    for name in ("robust", "standard", "certified"):
        (run,) = read_runs([measured / name])
        assert [item.name for item in properties(run)] == NAMES
        for item in properties(run):
            assert item.not_measured
            for each in item.evidence:
                assert each.subject
                assert each.inputs
                assert (run.folder / each.result / "result.json").is_file()
                parse(shlex.split(each.command)[1:])
            for missing in item.not_measured:
                if missing.command:
                    parse(shlex.split(missing.command)[1:])


def test_what_was_measured_is_not_listed_as_missing(measured):
    whats = {}
    for name in ("robust", "standard"):
        (run,) = read_runs([measured / name])
        whats[name] = {missing.what for item in properties(run) for missing in item.not_measured}
    assert "accuracy under common corruptions" in whats["standard"] - whats["robust"]
    assert "attributions and their faithfulness" in whats["standard"] - whats["robust"]
    assert "accuracy under AutoAttack" in whats["robust"]


def test_json_has_a_schema_and_no_nan(summary):
    tree = evidence_json(summary)
    assert tree["schema"] == SCHEMA == 1
    text = json.dumps(finite(tree), allow_nan=False)
    rows = [row for item in json.loads(text)["properties"] for row in item["evidence"]]
    assert {row["unit"] for row in rows} == {"share", ""}
    assert all(row["interval"] is None or row["interval"][0] <= row["value"] <= row["interval"][1] for row in rows)


def test_stale_results_are_no_evidence(robust):
    (before,) = read_runs([robust])
    assert evidence(before, "Relevance")
    path = result_file(robust, "explain")
    path.write_text(path.read_text().replace("a", "b", 1))  # its checksum no longer matches
    (after,) = read_runs([robust])
    assert not evidence(after, "Relevance")


def test_the_page_shows_it(measured):
    page = page_of(measured / "robust")
    for text in (
        "Evidence",
        "Robustness to evasion",
        "It is not a verdict",
        "not measured",
        "no command measures this",
    ):
        assert text in page.text
    both = page_of(measured / "robust", measured / "standard")
    assert both.text.count("How often is the model right on noisy, blurred or badly compressed images?") == 2
