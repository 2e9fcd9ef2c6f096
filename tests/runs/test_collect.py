"""Results of many runs as one table."""

import json
import shutil

import pytest

import atoll
from atoll.cli import main
from atoll.errors import InputError
from atoll.files import json_digest
from atoll.runs.collect import find_runs, main_numbers
from atoll.runs.run import open_run


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
