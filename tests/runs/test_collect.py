"""Results of many runs as one table."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import atoll
from atoll.certify.measure import EmpiricalAccuracy, Verified
from atoll.cli import main
from atoll.errors import InputError
from atoll.files import json_digest
from atoll.runs.collect import find_runs, list_run, main_numbers, row
from atoll.runs.run import Run, open_run
from atoll.stats import Accuracy, Estimate, SampledAccuracy
from atoll.subject import Origin


@pytest.fixture(scope="module")
def runs(trained, tmp_path_factory):
    """Two runs, one of them in a folder of its own, beside a folder that is no run."""
    root = tmp_path_factory.mktemp("collected")
    shutil.copytree(trained, root / "one")
    shutil.copytree(trained, root / "more" / "two")
    (root / "empty").mkdir()
    (root / "broken").mkdir()
    (root / "broken" / "recipe.yaml").write_text("[1, 2")
    open_run(root / "more" / "two").attack("FGSM", points=20, power=4)
    return root


def test_runs_are_listed_wherever_they_are(runs):
    assert [run.folder.relative_to(runs).as_posix() for run in find_runs(runs)] == ["more/two", "one"]
    assert [run.folder for run in find_runs(runs / "one")] == [runs / "one"]
    with pytest.raises(InputError, match="no such folder"):
        list(find_runs(runs / "nothing"))


def test_a_data_frame_has_one_row_per_result(runs):
    frame = atoll.results(runs)
    stored = [result for run in find_runs(runs) for result in run.results()]
    assert len(frame) == len(stored)
    assert set(frame["run"]) == {"one", "more/two"}
    row = frame[frame["settings.attacks"] == "FGSM"].iloc[0]
    (result,) = [r for r in stored if r.kind == "attack" and r.settings.attacks == "FGSM"]
    assert row["robust"] == result.robust.value
    assert (row["robust.low"], row["robust.high"]) == result.robust.interval
    assert (row["power.low"], row["power.high"]) == result.power.share.interval
    assert row["attacks.FGSM"] == result.attacks[0].accuracy.value
    assert (row["points"], row["settings.eps"]) == (20, "0.15")
    assert row["checkpoint"].startswith("best")
    assert row["digest"] == result.subject.digest
    assert len(atoll.results(runs, "attack")) == sum(result.kind == "attack" for result in stored)


def test_main_numbers_are_those_of_the_best_checkpoint(runs, capsys):
    numbers = main_numbers(open_run(runs / "more" / "two"))
    assert numbers["robust"].endswith("(FGSM)")
    assert numbers["WCI"] == "-"
    assert main(["ls", "runs", str(runs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][str(runs / "more" / "two")] == numbers
    assert main(["ls", "runs", str(runs)]) == 0
    assert "finished" in capsys.readouterr().out


OLD = Path(__file__).parent / "version_0_1"


@pytest.fixture
def old(tmp_path):
    """A run of version 0.1, which has results of many kinds."""
    return open_run(shutil.copytree(OLD, tmp_path / "old"))


def current(run, kind, **changes):
    """A result as it would be if the best checkpoint had it."""
    result = next(result for result in run.results(kind))
    return replace(result, stale="", subject=replace(result.subject, origin=Origin(step=run.step())), **changes)


def test_a_row_has_the_scalars_of_a_result(old):
    root = old.folder.parent
    verified = (Verified(eps=0.25, accuracy=Accuracy(3, 4)), Verified(eps=0.5, accuracy=Accuracy(1, 4)))
    empirical = (EmpiricalAccuracy(eps=0.5, attacks="APGD-CE", accuracy=Accuracy(2, 4)),)
    proof = current(old, "certify", verified=verified, empirical=empirical, lipschitz=2.5)
    values = row(old, proof, root)
    assert (values["run"], values["kind"], values["checkpoint"]) == ("old", "certify", "best")
    assert (values["step"], values["weights"]) == (8, "raw")
    assert {values[name] for name in ("stale", "date", "folder")} == {""}
    assert (values["lipschitz"], values["settings.precision"]) == (2.5, proof.settings.precision)
    assert {name: values[name] for name in values if name.startswith(("verified", "empirical"))} == {
        "verified.0.25": 0.75,
        "verified.0.5": 0.25,
        "empirical.0.5": 0.5,
        **dict(zip(("verified.0.25.low", "verified.0.25.high"), Accuracy(3, 4).interval, strict=True)),
        **dict(zip(("verified.0.5.low", "verified.0.5.high"), Accuracy(1, 4).interval, strict=True)),
        **dict(zip(("empirical.0.5.low", "empirical.0.5.high"), Accuracy(2, 4).interval, strict=True)),
    }
    assert not [name for name in values if name.startswith(("layers", "curve", "subject", "environment"))]
    explanation = current(old, "explain", searches={"FAB": 8}, pairs={"SM-BSM": Estimate(0.5, 0.1)})
    values = row(old, explanation, old.folder)
    assert (values["run"], values["searches.FAB"], values["pairs.SM-BSM"]) == ("old", 8, 0.5)
    assert values["pairs.SM-BSM.low"] == pytest.approx(0.5 - 1.96 * 0.1, abs=1e-4)
    assert not [name for name in values if name.startswith("methods")]
    assert row(old, explanation, root.parent)["run"] == f"{root.name}/old"


def test_main_numbers_are_those_of_current_test_results(old, monkeypatch):
    attack, proof, curvature = (current(old, kind) for kind in ("attack", "certify", "curvature"))
    verified = tuple(Verified(eps=eps, accuracy=Accuracy(correct, 8)) for eps, correct in ((0.12345, 3), (0.5, 1)))
    attack = replace(attack, clean=Accuracy(7, 8), robust=Accuracy(5, 8))
    proof, curvature = replace(proof, verified=verified), replace(curvature, wci=Estimate(2.0, 0.5))
    expected = {
        "clean": "87.50",
        "robust": f"62.50 ({attack.settings.attacks})",
        "verified": "37.50 (l2 0.123)",
        "WCI": f"{curvature.wci} ({curvature.loss})",
    }
    others = [
        change
        for result in (attack, proof, curvature)
        for change in (
            replace(result, stale="measured with other weights"),
            replace(result, subject=replace(result.subject, origin=Origin(step=12))),
            *([] if result is curvature else [replace(result, settings=replace(result.settings, split="train"))]),
            *([] if result is curvature else [replace(result, settings=replace(result.settings, split="validation"))]),
        )
    ]
    others = [replace(other, **wrong(other)) for other in others]
    monkeypatch.setattr(Run, "results", lambda self, kind=None: [*others, attack, proof, curvature, *others])
    assert main_numbers(old) == expected
    monkeypatch.setattr(Run, "results", lambda self, kind=None: others)
    assert set(main_numbers(old).values()) == {"-"}
    sampled = replace(attack, estimate=SampledAccuracy(total=8, remaining=6, sampled=6, rejected=2))
    monkeypatch.setattr(Run, "results", lambda self, kind=None: [sampled])
    assert main_numbers(old)["robust"].startswith("50.00 (")


def wrong(result):
    """Other numbers, which must not be shown."""
    if result.kind == "curvature":
        return {"wci": Estimate(99.0)}
    none = Accuracy(0, 8)
    if result.kind == "certify":
        return {"verified": tuple(replace(row, accuracy=none) for row in result.verified)}
    return {"clean": none, "robust": none}


def test_the_overview_of_a_run_has_its_state_and_main_numbers(old, tmp_path):
    state, numbers = list_run(old.folder)
    assert state == "finished"
    assert numbers == main_numbers(old)
    (old.folder / "result.json").unlink()
    assert list_run(old.folder)[0] == "not finished"
    (old.folder / "index.json").write_text("{")
    assert list_run(old.folder) == ["damaged", {"clean": "-", "robust": "-", "verified": "-", "WCI": "-"}]
    assert list_run(tmp_path / "nothing") is None


def test_stale_results_are_told_apart(runs, tmp_path):
    folder = shutil.copytree(runs / "one", tmp_path / "run")
    run = open_run(folder)
    step = run.results()[0].subject.origin.step
    record = json.loads((folder / "checkpoints" / f"{step:08d}" / "checkpoint.json").read_text())
    del record["digest"]
    record["files"]["model"] = "0" * 64
    path = folder / "checkpoints" / f"{step:08d}" / "checkpoint.json"
    path.write_text(json.dumps({**record, "digest": json_digest(record)}))
    assert "other weights" in open_run(folder).results()[0].stale
    path.write_text(json.dumps(record))
    assert "checkpoint is damaged" in open_run(folder).results()[0].stale
    shutil.rmtree(folder / "checkpoints" / f"{step:08d}")
    assert "checkpoint was deleted" in open_run(folder).results()[0].stale


def test_a_damaged_run_does_not_hide_the_others(runs, tmp_path, capsys):
    shutil.copytree(runs, tmp_path / "runs")
    (tmp_path / "runs" / "one" / "index.json").write_text("{")
    assert main(["ls", "runs", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [word for word in ("damaged", "finished") if any(word in line for line in lines)] == ["damaged", "finished"]
