"""The doctor finds planted faults of accelerators and survives processors that crash."""

import copy
import json

import pytest
import torch

from atoll import doctor
from atoll.cli import main
from atoll.cli.answers import SCHEMA
from atoll.doctor import Agreement, Diagnosis, advise, compare, diagnose, measure_paces
from atoll.precision import PrecisionCheck
from pretend import DEVICE, accelerator

NAMES = ("verdicts", "gradients", "certificates")


def test_an_accelerator_that_computes_the_same_agrees():
    with accelerator():
        results = compare(DEVICE)
    assert [(result.what, result.status, result.difference) for result in results] == [
        (name, "agrees", 0.0) for name in NAMES
    ]


def test_the_attack_misleads_some_points_and_not_all():
    """Otherwise equal verdicts would mean nothing."""
    net, x = doctor._network(doctor.SMALL), doctor._images(100, doctor.SMALL)
    y = net(x).argmax(1)
    attack = doctor.PGD(doctor.ThreatModel("linf", 0.01, (0.0, 1.0)), steps=doctor.STEPS)
    assert 10 < int((net(attack(net, x, y)).argmax(1) == y).sum()) < 90


@pytest.mark.parametrize("scale", [0.02, 0.5])
def test_an_accelerator_that_computes_something_else_differs(scale, monkeypatch):
    def both(device):
        net, x = doctor._network(doctor.SMALL), doctor._images(100, doctor.SMALL)
        other = copy.deepcopy(net)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(scale * torch.randn_like(parameter) * parameter.abs().mean())
        return (net, x), (other, x)

    monkeypatch.setattr(doctor, "_both", both)
    results = {result.what: result.status for result in compare(DEVICE)}
    assert results["gradients"] == results["certificates"] == "differs"
    assert results["verdicts"] == "differs" or scale < 0.1


def test_a_device_without_double_precision_skips_certificates(monkeypatch):
    def fail(self):
        raise TypeError("Cannot convert a MPS Tensor to float64")

    monkeypatch.setattr(torch.nn.Module, "double", fail)
    with accelerator():
        verdicts, gradients, certificates = compare(DEVICE)
    assert verdicts.status == gradients.status == "agrees"
    assert (certificates.status, certificates.reason) == ("skipped", "skipped: Cannot convert a MPS Tensor to float64")


def test_without_an_accelerator_the_comparison_is_skipped():
    assert {result.reason for result in compare(torch.device("cpu"))} == {"skipped: PyTorch finds no accelerator"}


FACTS = {"load": 0.1, "cores": 4, "OMP_NUM_THREADS": "not set"}
GPU = {"cpu": "a", "cuda:0": "b"}


@pytest.mark.parametrize(
    ("facts", "devices", "precisions", "programs", "sentence"),
    [
        ({}, GPU, (), (), None),
        ({}, {"cpu": "a"}, (), ("nvidia-smi",), "install a build of PyTorch for CUDA"),
        ({}, {"cpu": "a"}, (), (), "PyTorch finds no accelerator"),
        ({"load": 3.5}, GPU, (), (), "load 3.5 on 4 cores"),
        ({"OMP_NUM_THREADS": "4"}, GPU, (), (), "unset OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "1"}, GPU, (), (), None),
        ({}, GPU, (PrecisionCheck("bf16", True, 1.8),), (), "train with trainer.precision=bf16"),
        ({}, GPU, (PrecisionCheck("bf16", True, 0.8), PrecisionCheck("fp16", False, reason="x")), (), None),
    ],
)
def test_advice(facts, devices, precisions, programs, sentence, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name if name in programs else None)
    advice = advise(FACTS | facts, devices, precisions, 2)
    assert len(advice) == (sentence is not None)
    assert sentence is None or sentence in advice[0]


@pytest.fixture
def quick(monkeypatch):
    """Nothing is timed for long."""
    monkeypatch.setattr(doctor, "SECONDS", 0.0)
    monkeypatch.setattr(doctor, "measure_threads", lambda run: 1)
    monkeypatch.setattr(doctor, "probe", lambda device, name: PrecisionCheck(name, True, 1.0))
    monkeypatch.setattr(doctor, "measure_paces", lambda device, rows: measure_paces(device, 4))


def test_no_advice_that_training_refuses(quick, monkeypatch):
    """Training on a CPU accepts bf16, but not fp16, however fast it is."""
    monkeypatch.setattr(doctor, "probe", lambda device, name: PrecisionCheck(name, True, 3.0))
    diagnosis = diagnose(torch.device("cpu"))
    assert [precision.speed for precision in diagnosis.precisions] == [3.0, 3.0]
    assert [sentence for sentence in diagnosis.advice if "precision" in sentence] == [
        "bf16 is 3.0 times as fast as float32 here: train with trainer.precision=bf16."
    ]


def test_the_diagnosis_of_an_accelerator(quick):
    steps = []
    with accelerator():
        diagnosis = diagnose(DEVICE, steps.append)
    assert diagnosis.is_sound
    assert (diagnosis.device, diagnosis.precisions) == ("privateuseone:0", ())
    assert len(steps) == 5
    assert all(pace.images_per_second > 0 and pace.ratio > 0 for pace in diagnosis.paces)


def test_the_command_prints_a_table_and_json(quick, capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert all(
        text in printed for text in ("torch", "skipped: PyTorch finds no accelerator", "bf16 on cpu", "images/s")
    )
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["command"], answer.keys()) == (
        SCHEMA, "doctor", {"schema", "command", "diagnosis"},
    )  # fmt: skip
    fields = set(Diagnosis.__dataclass_fields__)
    assert answer["diagnosis"].keys() == fields


def test_disagreement_is_the_exit_code(monkeypatch, capsys):
    wrong = Agreement("verdicts", "differs", 50.0, 3.0)
    diagnosis = Diagnosis({}, {}, {"cpu": "a"}, "cuda", 1, (), (wrong,), (), (), 1.0)
    monkeypatch.setattr(doctor, "diagnose", lambda on_step: diagnosis)
    assert main(["doctor"]) == 1
    assert "differs by 50 of 3" in capsys.readouterr().out
