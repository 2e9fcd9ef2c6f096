"""``atoll attack`` as a user runs it."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atoll.attacks.suites import minimal
from atoll.cli import main
from atoll.runs.run import open_run
from support import SMALL, run_command


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run whose model classifies most points correctly, not all of them robustly."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    words = [
        *SMALL,
        "loss=Standard",
        "model.widths=[16,16]",
        "trainer.epochs=15",
        "threat.eps=0.1",
        "trainer.test_steps=0",
    ]
    assert main(["train", *words, "--out", str(folder), "--json"]) == 0
    return folder


def attack(capsys, *words):
    """What the command prints of one run."""
    assert main(["attack", *map(str, words), "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"].values()
    return result


@pytest.mark.pictures
def test_prints_a_table_and_stores_result_inputs_and_picture(trained, capsys, short):
    assert main(["attack", str(trained), "--points", "40"]) == 0
    table = " ".join(capsys.readouterr().out.split())
    for word in ("APGD-CE", "FAB-T", "Square", "worst case", "95 %", "passes", "seconds", "40 test points, linf 0.1"):
        assert word in table
    result = attack(capsys, trained, "--points", 40)
    assert result["robust"]["correct"] < result["clean"]["correct"] > 20
    folder = Path(result.pop("folder"))
    stored = json.loads((folder / "result.json").read_text())
    assert stored.pop("question") == folder.name
    del stored["checksum"], stored["record"]
    assert stored == result
    assert (folder / "adversarial.png").read_bytes()[:4] == b"\x89PNG"
    tensors = load_file(folder / "adversarial.safetensors")
    assert tensors["adversarial"].shape == (40, 1, 8, 8)
    wrong = open_run(trained).model()(tensors["adversarial"]).argmax(1) != tensors["label"]
    assert int((~wrong).sum()) == result["robust"]["correct"]  # the stored inputs are the worst case
    assert result["robust"]["correct"] == result["attacks"][-1]["accuracy"]["correct"]


def test_named_attacks_run_on_all_points(trained, capsys):
    result = attack(capsys, trained, "--attacks", "FGSM,pgd-3,CW-3", "--points", 30, "--eps", "1/10")
    assert [entry["name"] for entry in result["attacks"]] == ["FGSM", "pgd-3", "CW-3"]
    assert len({entry["attacked"] for entry in result["attacks"]}) == 1
    assert result["settings"]["eps"] == "1/10"


def test_a_cascade_can_be_run_individually(trained, capsys, short):
    result = attack(capsys, trained, "--points", 30, "--individual")
    assert len({entry["attacked"] for entry in result["attacks"]}) == 1
    assert result["robust"]["correct"] <= min(entry["accuracy"]["correct"] for entry in result["attacks"])


def test_transfer_from_the_model_itself_is_the_attack_itself(trained, capsys):
    options = ("--attacks", "PGD-5", "--points", 60)
    own = attack(capsys, trained, *options, "--surrogate", trained)
    direct = attack(capsys, trained, *options)
    assert own["attacks"][0]["name"] == "PGD-5 (transfer)"
    assert own["surrogate"]["digest"] == own["subject"]["digest"]
    assert own["robust"]["correct"] == pytest.approx(direct["robust"]["correct"], abs=3)


def test_distance_to_the_boundary_from_labels_alone(trained, capsys):
    words = ["--attacks", "PGD-3", "--points", "4", "--adbd"]
    result = attack(capsys, trained, *words)
    assert 0 < result["adbd"]["value"] < 0.5
    assert main(["attack", str(trained), *words]) == 0
    assert "distance to the boundary (ADBD): 0." in capsys.readouterr().out


def test_corruptions_without_an_attack(trained, tmp_path, capsys):
    words = ["--attacks", "none", "--points", "6", "--corruptions"]
    result = attack(capsys, trained, *words)
    assert result["attacks"] == []
    assert len(result["corruptions"]["accuracies"]) == 15
    assert result["corruptions"]["accuracies"][0]["severities"][4]["total"] == 6
    shutil.copytree(trained, tmp_path / "other")
    assert main(["attack", str(trained), str(tmp_path / "other"), *words]) == 0
    printed = capsys.readouterr().out
    assert "frost (generated)" in printed
    assert "Mean under common corruptions" in printed


def test_curve_alone_and_beside_an_attack(trained, capsys, monkeypatch):
    def quick(threat):
        attacks = minimal(threat)
        for each in attacks.values():
            each.steps = 10
        return attacks

    monkeypatch.setattr("atoll.attacks.curve.minimal", quick)
    words = ["--attacks", "PGD-3", "--points", "4", "--curve"]
    result = attack(capsys, trained, *words)
    curve = result["curve"]
    at_eps = curve["accuracy"][curve["eps"].index(0.1)]
    assert at_eps["correct"] <= result["robust"]["correct"]
    assert main(["attack", str(trained), *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "accuracy is at most (FMN, FAB-T)" in printed
    assert "median distance of correctly classified points (linf): at most" in printed
    alone = attack(capsys, trained, "--norm", "l0", "--points", 2, "--curve")
    assert alone["attacks"] == []
    assert [entry["name"] for entry in alone["curve"]["attacks"]] == ["SigmaZero"]
    assert all(eps == int(eps) for eps in alone["curve"]["eps"])


def test_several_runs_are_compared(trained, tmp_path, capsys, short):
    shutil.copytree(trained, tmp_path / "other")
    assert main(["attack", str(trained), str(tmp_path / "other"), "--points", "10"]) == 0
    assert "Worst case" in capsys.readouterr().out


@pytest.mark.slow  # tests/attacks/test_evaluate.py shares points between two processes
def test_two_processes_share_the_work(trained, tmp_path):
    words = ("--attacks", "PGD-3,APGD-CE", "--points", "41", "--corruptions", "--json", "--batch-size", "16")
    results = []
    for processes in (1, 2):
        folder = tmp_path / str(processes) / "run"
        shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("results"))
        output = run_command("attack", str(folder), *words, processes=processes, check=True).stdout
        results.append(json.loads(output)["results"][str(folder)])
    one, two = results
    assert one["clean"] == two["clean"]
    assert [a["attacked"] for a in one["attacks"]] == [a["attacked"] for a in two["attacks"]]
    assert abs(one["robust"]["correct"] - two["robust"]["correct"]) <= 1  # float32: batches of other sizes round
    assert one["corruptions"]["mean"]["value"] == pytest.approx(two["corruptions"]["mean"]["value"], abs=2 / (75 * 41))


@pytest.mark.slow  # tests/attacks/test_measure.py interrupts the same measurement in one process
def test_a_killed_command_resumes_bit_identically(trained, tmp_path):
    """SIGKILL at random moments; the same command resumes."""
    words = ["--attacks", "APGD-CE,FAB-T", "--points", "30", "--corruptions", "--batch-size", "16", "--json"]

    def run(folder, timeout=None):
        command = [sys.executable, "-m", "atoll", "attack", str(folder), *words]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        try:
            return json.loads(process.communicate(timeout=timeout)[0])["results"][str(folder)]
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            return None

    for name in ("whole", "killed"):
        shutil.copytree(trained, tmp_path / name / "run", ignore=shutil.ignore_patterns("results"))
    began = time.monotonic()
    whole = run(tmp_path / "whole" / "run")
    seconds = time.monotonic() - began
    draw = random.Random(0)
    for _ in range(2):
        run(tmp_path / "killed" / "run", draw.uniform(0.4, 0.9) * seconds)
    again = run(tmp_path / "killed" / "run")
    before, after = (load_file(Path(result["folder"]) / "adversarial.safetensors") for result in (whole, again))
    assert all(torch.equal(before[name], after[name]) for name in before)
    for result in (whole, again):
        for name in ("folder", "seconds", "environment"):
            del result[name]
        for entry in result["attacks"]:
            del entry["seconds"]
    assert whole == again


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--attacks", "magic"], "attacks: expected an attack, got 'magic'; expected one of APGD"),
        (["--attacks", "PGD-0"], "attacks: expected an attack, got 'PGD-0'; did you mean"),
        (["--points", "0"], "points: expected at least 1"),
        (["--batch-size", "0"], "batch_size: expected at least 1"),
        (["--attacks", "plus", "--norm", "l1", "--eps", "5"], "expected linf or l2 for plus, got l1"),
        (["--surrogate", "nowhere"], "nowhere is not a run"),
        (["--attacks", "CarliniWagner"], "CarliniWagner: expected l2, got linf"),
        (["--attacks", "RayS", "--norm", "l2"], "RayS: expected linf, got l2"),
        (["--norm", "l0", "--eps", "3"], "norm: expected linf, l2 or l1 for standard, got l0; use SigmaZero"),
        (["--norm", "l0", "--attacks", "SigmaZero"], "eps: expected a whole number of components for l0, got 0.1"),
        (["--norm", "l0", "--eps", "3", "--attacks", "PGD-20"], "PGD: expected linf or l2 or l1, got l0"),
        (["--curve", "--surrogate", "nowhere"], "curve: expected no surrogate"),
        (["--eps", "much"], "eps: expected a number or a fraction like 8/255, got 'much'"),
        (["--checkpoint", "worst"], "--checkpoint: expected best, last or a step, got 'worst'"),
    ],
)
def test_wrong_arguments_are_one_sentence(trained, capsys, words, sentence):
    assert main(["attack", str(trained), *words]) == 1
    assert sentence in " ".join(capsys.readouterr().err.split())
