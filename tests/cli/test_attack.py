"""``atoll attack`` as a user runs it."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.attacks import APGD, FAB, Square, suites
from atoll.cli import main
from atoll.runs.run import open_run
from support import SMALL, run_command


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run whose model has something to lose."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    words = [*SMALL, "loss=Standard", "model.widths=[16,16]", "trainer.epochs=15", "threat.eps=0.1"]
    assert main(["train", *words, "--out", str(folder), "--json"]) == 0
    return folder


@pytest.fixture
def short(monkeypatch):
    """``standard`` with a few iterations."""
    plan = {
        "APGD-CE": lambda threat: APGD(threat, steps=3),
        "FAB-T": lambda threat: FAB(threat, steps=3, targets=9),
        "Square": lambda threat: Square(threat, queries=20),
    }
    versions = {"standard": lambda threat: {name: build(threat) for name, build in plan.items()}}
    monkeypatch.setitem(suites.SUITES, "standard", versions["standard"])


def result(capsys, *words):
    assert main(["attack", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_prints_a_table_and_keeps_result_inputs_and_picture(trained, capsys, short):
    assert main(["attack", str(trained), "--points", "40"]) == 0
    table = capsys.readouterr().out
    for word in ("APGD-CE", "FAB-T", "Square", "worst case", "±", "95 %", "passes", "seconds"):
        assert word in table
    found = result(capsys, trained, "--points", 40)[str(trained)]
    assert found["robust"]["correct"] < found["clean"]["correct"] > 20
    folder = Path(found["folder"])
    assert json.loads((folder / "evaluation.json").read_text()) == found
    assert (folder / "adversarial.png").read_bytes()[:4] == b"\x89PNG"
    stored = load_file(folder / "adversarial.safetensors")
    assert stored["adversarial"].shape == (40, 1, 8, 8)
    run = open_run(trained)
    wrong = run.model()(stored["adversarial"]).argmax(1) != stored["label"]
    assert int((~wrong).sum()) == found["robust"]["correct"]  # what is stored is the worst case, also for other tools
    assert found["robust"]["correct"] == found["attacks"][-1]["accuracy"]["correct"]


def test_named_attacks_run_on_all_points(trained, capsys):
    found = result(capsys, trained, "--attacks", "FGSM,pgd-3,CW-3", "--points", 30, "--eps", "1/10")[str(trained)]
    assert [attack["name"] for attack in found["attacks"]] == ["FGSM", "pgd-3", "CW-3"]
    assert len({attack["attacked"] for attack in found["attacks"]}) == 1
    assert found["threat"]["eps"] == "1/10"


def test_transfer_from_a_surrogate_is_weaker_than_the_attack_itself(trained, capsys):
    options = ("--attacks", "PGD-5", "--points", 60)
    own = result(capsys, trained, *options, "--surrogate", trained)[str(trained)]
    direct = result(capsys, trained, *options)[str(trained)]
    assert own["attacks"][0]["name"] == "PGD-5 (transfer)"
    assert own["robust"]["correct"] == pytest.approx(direct["robust"]["correct"], abs=3)


def test_distance_to_the_boundary_from_labels_alone(trained, capsys):
    found = result(capsys, trained, "--attacks", "PGD-3", "--points", 8, "--adbd")[str(trained)]
    assert 0 < found["adbd"]["mean"] < 0.5
    assert main(["attack", str(trained), "--attacks", "PGD-3", "--points", "8", "--adbd"]) == 0
    assert "distance to the boundary (ADBD): 0." in capsys.readouterr().out


def test_several_runs_are_compared(trained, tmp_path, capsys, short):
    shutil.copytree(trained, tmp_path / "other")
    assert main(["attack", str(trained), str(tmp_path / "other"), "--points", "10"]) == 0
    assert "Worst case" in capsys.readouterr().out


def test_two_processes_share_the_work(trained, tmp_path):
    words = ("attack", str(trained), "--attacks", "PGD-3,APGD-CE", "--points", "41", "--json", "--batch-size", "16")
    one, two = (json.loads(run_command(*words, processes=p, check=True).stdout)[str(trained)] for p in (1, 2))
    assert one["clean"] == two["clean"]
    assert [a["attacked"] for a in one["attacks"]] == [a["attacked"] for a in two["attacks"]]
    assert abs(one["robust"]["correct"] - two["robust"]["correct"]) <= 1  # float32: batches of other sizes round


def test_killed_and_started_again_ends_with_the_same_bits(trained, tmp_path):
    """SIGKILL at random moments; the same command goes on."""
    words = ["attack", str(trained), "--attacks", "APGD-T,FAB-T", "--points", "50", "--batch-size", "16", "--json"]

    def run(seed, timeout=None):
        command = [sys.executable, "-m", "atoll", *words, "--seed", str(seed)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        try:
            return json.loads(process.communicate(timeout=timeout)[0])[str(trained)]
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            return None

    whole = run(0)
    before = load_file(Path(whole["folder"]) / "adversarial.safetensors")
    for file in Path(whole["folder"]).iterdir():
        file.unlink()
    draw = random.Random(0)
    for _ in range(3):
        run(0, draw.uniform(2.0, 6.0))
    again = run(0)
    after = load_file(Path(again["folder"]) / "adversarial.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)
    for record in (whole, again):
        for attack in record["attacks"]:
            attack.pop("seconds")
    assert whole == again


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--attacks", "magic"], "attack: expected one of FGSM"),
        (["--attacks", "PGD-0"], "attack: expected one of FGSM"),
        (["--points", "0"], "--points: expected at least 1"),
        (["--batch-size", "0"], "batch_size: expected at least 1"),
        (["--attacks", "plus", "--norm", "l1", "--eps", "5"], "plus is for linf and l2"),
        (["--surrogate", "nowhere"], "there is no run at nowhere"),
    ],
)
def test_nonsense_is_one_sentence(trained, capsys, words, sentence):
    assert main(["attack", str(trained), *words]) == 1
    assert sentence in " ".join(capsys.readouterr().err.split())
