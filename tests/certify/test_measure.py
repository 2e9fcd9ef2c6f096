"""Certification as a measurement: settings, stored results, resuming, and what a result is stored under."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.certify import GloRo, broken_certificates
from atoll.certify.evaluate import CertificateCheck
from atoll.certify.gloro import PairwiseLipschitz
from atoll.certify.measure import (
    CentroidGuarantees,
    CertifyResult,
    CertifySettings,
    EmpiricalAccuracy,
    MeasureCertify,
    Rejection,
    Verified,
)
from atoll.certify.propagation import LayerBound
from atoll.certify.smoothing import Smoothed
from atoll.cli import main
from atoll.config import from_plain
from atoll.errors import InputError, UnsoundError
from atoll.measure import Environment, load_result, measure, save_result
from atoll.models import MLP, SmallConvNet, ViT
from atoll.runs.run import open_run
from atoll.stats import Accuracy
from atoll.subject import Origin, Subject, SubjectRecord
from atoll.threat import ThreatModel
from support import TinyData, change, wait_for

SMOOTH = CertifySettings(smooth=0.25, samples=40, eps="0.1", points=6)


def subject(model=None, seed=0, **threat):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model() if model else SmallConvNet((1, 8, 8), 3, widths=(4,), hidden=8, activation="minmax")
    return Subject(model.eval(), TinyData(), ThreatModel(**{"norm": "l2", "eps": 0.1} | threat))


@pytest.fixture(scope="module")
def small():
    """A subject that several tests measure; capturing its graph takes a second."""
    return subject()


# --- settings and results as plain data -------------------------------------------------------------------------------

numbers = st.floats(0, 1e6)
names = st.text(max_size=8)
accuracies = st.integers(0, 100).flatmap(lambda total: st.builds(Accuracy, st.integers(0, total), st.just(total)))
proofs = st.builds(
    CertifySettings,
    split=st.sampled_from(["train", "validation", "test"]),
    points=st.none() | st.integers(1, 9999),
    seed=st.integers(0, 99),
    eps=st.none() | st.sampled_from(["0.5", "1/10,36/255"]),
    attacks=names,
    check=st.integers(1, 999),
    attack=st.booleans(),
    eta=st.floats(0, 1),
    reject=st.lists(names, max_size=3).map(tuple),
    precision=st.sampled_from([None, "float32", "float64"]),
    budget=numbers,
)
smoothings = st.builds(
    CertifySettings,
    smooth=st.floats(0.01, 10),
    samples=st.integers(1, 10**6),
    alpha=st.floats(1e-6, 0.5),
    eps=st.none() | st.text(min_size=1, max_size=8),
)
results = st.builds(
    CertifyResult,
    subject=st.builds(SubjectRecord, names, origin=st.builds(Origin, run=names, step=st.none() | st.integers(0, 99))),
    inputs=names,
    points=st.integers(1, 99),
    settings=proofs | smoothings,
    environment=st.none() | st.just(Environment.current()),
    seconds=numbers,
    clean=accuracies,
    verified=st.lists(st.builds(Verified, eps=numbers, accuracy=accuracies), max_size=3).map(tuple),
    median_radius=numbers,
    curve=st.fixed_dictionaries({name: st.lists(numbers, max_size=3).map(tuple) for name in ("radius", "verified")}),
    lipschitz=st.none() | numbers,
    layers=st.lists(st.builds(LayerBound, names, names, numbers, names, numbers), max_size=2).map(tuple),
    rejected=st.lists(st.builds(Rejection, data=names, eps=numbers, share=accuracies), max_size=2).map(tuple),
    relative_cost=st.none() | numbers,
    check=st.none() | st.builds(CertificateCheck, *[st.integers(0, 99)] * 3, numbers),
    empirical=st.lists(
        st.builds(EmpiricalAccuracy, eps=numbers, attacks=names, accuracy=accuracies), max_size=2
    ).map(tuple),
    centroids=st.none() | st.builds(
        CentroidGuarantees, separation=numbers, global_radius=numbers, local_radius=numbers, coverage=accuracies,
        prototypes=st.lists(numbers, max_size=2).map(tuple),
    ),
)  # fmt: skip


@settings(max_examples=40)
@given(given=proofs | smoothings)
def test_settings_come_back_from_json(given):
    assert from_plain(CertifySettings, json.loads(json.dumps(given.to_json()))) == given


@settings(max_examples=40)
@given(result=results)
def test_results_come_back_from_json(result):
    assert CertifyResult.from_json(json.loads(json.dumps(result.to_json()))) == result


@settings(max_examples=5)
@given(result=results)
def test_results_from_before_the_guarantees_of_centroid_nets_load(result):
    tree = json.loads(json.dumps(result.to_json()))
    del tree["centroids"]
    assert CertifyResult.from_json(tree) == dataclasses.replace(result, centroids=None)


@settings(max_examples=5)
@given(result=results)
def test_results_come_back_from_a_file(result, tmp_path_factory):
    folder = tmp_path_factory.mktemp("result")
    save_result(result, folder)
    assert load_result(folder) == result


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"points": 0}, "points: expected at least 1, got 0"),
        ({"check": 0}, "check: expected at least 1, got 0"),
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"samples": 0}, "samples: expected at least 1, got 0"),
        ({"alpha": 1.0}, r"alpha: expected a number in \(0, 1\), got 1"),
        ({"budget": -1.0}, "budget: expected at least 0, got -1"),
        ({"eta": -0.1}, r"eta: expected a number in \[0, 1\], got -0.1"),
        ({"smooth": 0.0}, "smooth: expected a number > 0, got 0"),
        ({"smooth": 0.1, "reject": ("noise",)}, "smooth: cannot be combined with reject or eta"),
        ({"smooth": 0.1, "eta": 0.1}, "smooth: cannot be combined with reject or eta"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        CertifySettings(**options)


def test_defaults():
    """Results are stored under all settings: another default would look for results that nobody has computed."""
    assert CertifySettings().to_json() == {
        "split": "test", "points": None, "seed": 0, "eps": None, "attacks": "APGD-CE", "check": 500, "attack": True,
        "eta": 0.0, "reject": [], "smooth": None, "samples": 100_000, "alpha": 0.001, "precision": None,
        "budget": 1.5e11,
    }  # fmt: skip


def test_resolved_settings_hold_what_the_subject_decides_and_no_more():
    """So that equal questions have equal settings."""
    here = subject(eps="36/255")
    proof = CertifySettings(samples=5, alpha=0.5).resolve(here)
    assert proof == CertifySettings(eps="36/255", precision="float64")
    assert CertifySettings(attack=False, attacks="FGSM", check=3).resolve(here) == dataclasses.replace(
        proof, attack=False
    )
    smoothed = CertifySettings(smooth=0.5, samples=5, budget=1.0, check=3).resolve(here)
    assert smoothed == CertifySettings(smooth=0.5, samples=5, eps="36/255", precision="float32", attack=False)
    with pytest.raises(InputError, match="eps: the model was trained against linf; specify an l2 radius"):
        CertifySettings().resolve(subject(norm="linf"))
    with pytest.raises(InputError, match="attack"):
        CertifySettings(attacks="magic").resolve(here)


# --- what a result is stored under ------------------------------------------------------------------------------------

PLAIN = CertifySettings(attack=False, points=4)


def npz(path, value):
    x, y = np.full((40, 8, 8), value, np.uint8), np.arange(40) % 2
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y, names=["a", "b"])
    return f"{{class_path: Npz, init_args: {{path: {path}}}}}"


@pytest.fixture
def folder_of(tmp_path, monkeypatch):
    """Where a result is stored, without the work."""
    fields = {"clean": Accuracy(0, 1), "verified": (), "median_radius": 0.0, "curve": {}}
    monkeypatch.setattr(MeasureCertify, "measure", lambda *_: fields)
    return lambda here, question, **change: measure(here, dataclasses.replace(question, **change), tmp_path).folder


def test_everything_that_changes_the_answer_changes_the_digest(tmp_path, folder_of, small):
    variants = [
        {}, {"eps": "0.2"}, {"eps": "0.1,0.2"}, {"precision": "float32"}, {"budget": 1.0}, {"points": 5}, {"seed": 1},
        {"split": "train"}, {"reject": ("noise",)}, {"eta": 0.1}, {"attack": True}, {"attack": True, "check": 1},
        {"attack": True, "attacks": "FGSM"},
    ]  # fmt: skip
    folders = [folder_of(small, PLAIN, **change) for change in variants]
    folders += [
        folder_of(small, SMOOTH, **change) for change in ({}, {"samples": 41}, {"alpha": 0.01}, {"smooth": 0.3})
    ]
    folders.append(folder_of(subject(seed=1), PLAIN))  # other weights
    for value in (0, 9):  # the same name of a file, other content
        folders.append(folder_of(small, PLAIN, reject=(npz(tmp_path / "other.npz", value),)))
    assert len(set(folders)) == len(folders) == len(list(tmp_path.glob("certify/*/result.json")))
    assert folder_of(small, PLAIN) == folders[0]


def test_an_attack_of_the_users_own_is_part_of_the_digest(tmp_path, folder_of, small):
    file, folders = tmp_path / "mine.py", []
    for comment in ("# one\n", "# two\n"):
        file.write_text(f"{comment}from atoll.attacks import FGSM\n\n\nclass Mine(FGSM):\n    pass\n")
        folders.append(folder_of(small, PLAIN, attack=True, attacks=f"{file}:Mine"))
    assert folders[0] != folders[1]


def test_the_batch_size_is_not_part_of_the_digest(tmp_path, small):
    one = measure(small, PLAIN, tmp_path)
    two = measure(small, dataclasses.replace(PLAIN, batch_size=3), tmp_path)
    assert one.folder == two.folder
    three = measure(small, dataclasses.replace(PLAIN, batch_size=3), tmp_path, restart=True)
    assert three.verified == one.verified
    assert three.median_radius == pytest.approx(one.median_radius, rel=1e-9)


def test_precision_is_that_of_the_certified_network():
    here, twice = subject(), subject()
    twice.model.double()
    options = {name: dataclasses.replace(PLAIN, precision=name, points=20) for name in ("float32", "float64")}
    single, double = (measure(here, option).median_radius for option in options.values())
    assert 0.9 * double < single < double
    # A model of the other precision is converted, whatever it was.
    assert [measure(twice, option).median_radius for option in options.values()] == pytest.approx([single, double])
    assert here.precision == torch.float32


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: ViT((1, 8, 8), 3, patch_size=4, width=8, depth=1, heads=2), "native_layer_norm cannot be certified"),
        (lambda: torch.nn.Sequential(MLP((1, 8, 8), 3), torch.nn.Softmax(1)), "_softmax cannot be certified"),
    ],
)
def test_models_that_cannot_be_certified_are_refused(model, message):
    with pytest.raises(InputError, match=message):
        measure(subject(model), PLAIN)


def test_results_of_two_checkpoints_are_distinguishable(gloro_run, tmp_path):
    run = copied(gloro_run, tmp_path)
    earlier = min(int(path.name) for path in (run.folder / "checkpoints").iterdir())
    change(run.folder / "index.json", best={"raw": earlier})
    attacked = run.attack("FGSM", points=4, checkpoint="last")
    certified = run.certify(points=4, attack=False)
    assert attacked.subject.origin.step == run.step("last") > earlier
    assert certified.subject.origin.step == run.step("best") == earlier
    assert attacked.subject.digest != certified.subject.digest


# --- resuming ---------------------------------------------------------------------------------------------------------


def content(result):
    """All of a result but times."""
    tree = result.to_json()
    for layer in tree["layers"]:
        del layer["seconds"]
    if tree["check"]:
        del tree["check"]["seconds"]
    del tree["environment"]["date"], tree["seconds"], tree["relative_cost"]
    return tree


@pytest.fixture
def smoothed_points(monkeypatch):
    """How many points were smoothed so far."""
    calls, call = [], Smoothed.__call__
    monkeypatch.setattr(Smoothed, "__call__", lambda self, x: (calls.extend(x), call(self, x))[1])
    return calls


def test_interrupted_smoothing_resumes_with_the_same_bits(tmp_path, smoothed_points, small):
    whole = measure(small, SMOOTH, tmp_path / "whole")
    assert len(smoothed_points) == 6

    def interrupt(what, done, total):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(small, SMOOTH, tmp_path / "parts", on_progress=interrupt)
    folder = tmp_path / "parts" / "certify" / whole.folder.name
    assert not (folder / "result.json").exists()
    (file,) = folder.glob("points/*")
    file.write_bytes(file.read_bytes()[:-5])  # a kill in the middle of a line
    resumed = measure(small, SMOOTH, tmp_path / "parts")
    assert len(smoothed_points) == 6 + 4 + 3
    assert content(resumed) == content(whole)
    for name in ("certificates.safetensors", "curve.png"):
        assert (resumed.folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_a_damaged_certificate_is_computed_again(tmp_path, smoothed_points, small):
    before = measure(small, SMOOTH, tmp_path)
    (before.folder / "result.json").unlink()
    (file,) = before.folder.glob("points/*")
    lines = file.read_text().split("\n")
    lines[2] = json.dumps({**json.loads(lines[2]), "radius": 9.0})  # well-formed, and wrong
    lines[4] = "[1, 2"
    file.write_text("\n".join(lines))
    after = measure(small, SMOOTH, tmp_path)
    assert len(smoothed_points) == 6 + 2
    assert content(after) == content(before)


@pytest.mark.slow
def test_killed_smoothing_resumes_with_the_same_bits(gloro_run, tmp_path):
    runs = [copied(gloro_run, tmp_path / name) for name in ("killed", "whole")]
    options = ("--smooth", "0.25", "--samples", "5000", "--points", "40", "--json")
    command = [sys.executable, "-m", "atoll", "certify", str(runs[0].folder), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: any(f.stat().st_size > 300 for f in runs[0].folder.glob("results/certify/*/points/*")))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    settings = CertifySettings(smooth=0.25, samples=5000, points=40)
    resumed, whole = (run.measure(settings) for run in runs)
    assert content(resumed) == content(whole)


# --- one path for commands and Python ---------------------------------------------------------------------------------


def copied(run, folder):
    shutil.copytree(run.folder, folder / "run", ignore=shutil.ignore_patterns("results", "tensorboard"))
    return open_run(folder / "run")


@pytest.mark.pictures
def test_command_and_python_store_the_same_files(gloro_run, tmp_path, capsys):
    one, two = (copied(gloro_run, tmp_path / name) for name in ("command", "python"))
    options = ["--points", "20", "--check", "4", "--attacks", "PGD-2", "--eps", "0.2,0.5", "--reject", "noise"]
    assert main(["certify", str(one.folder), *options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["results"][str(one.folder)]
    result = two.certify(points=20, check=4, attacks="PGD-2", eps="0.2,0.5", reject=("noise",))
    (stored,) = one.results("certify")
    assert content(stored) == content(result)
    assert content(CertifyResult.from_json(printed)) == content(result)
    for name in ("certificates.safetensors", "curve.png"):
        assert (stored.folder / name).read_bytes() == (result.folder / name).read_bytes()


# --- certificates that are false --------------------------------------------------------------------------------------


def test_a_false_certificate_leaves_the_point_and_no_result(gloro_run, tmp_path, monkeypatch):
    proven, here, question = GloRo.proven, gloro_run.subject(), CertifySettings(points=10, check=5, attacks="FGSM")

    def wrong(*arguments, **options):
        certifier = proven(*arguments, **options)
        return GloRo(
            certifier.model, PairwiseLipschitz.estimated(0.1 * certifier.constants.lipschitz), certifier.layers
        )

    with monkeypatch.context() as patch:
        patch.setattr(GloRo, "proven", staticmethod(wrong))
        with pytest.raises(UnsoundError, match="a certificate is false"):
            measure(here, question, tmp_path)
    assert not list(tmp_path.rglob("result.json"))
    ((path, message),) = broken_certificates(tmp_path).items()
    assert path.name == "broken.safetensors"
    assert message.startswith("a certificate is false: point ")
    result = measure(here, question, tmp_path)  # the bound is right again
    assert result.folder == path.parent
    assert not broken_certificates(tmp_path)
    path.write_bytes(b"")  # damaged, but there
    assert list(broken_certificates(tmp_path)) == [path]


def test_the_table_shows_the_range_between_verified_and_attacked(small):
    result = measure(small, CertifySettings(eps="0.01,0.02", points=20, check=2, attacks="APGD-CE"))
    rows = {(row[0], row[1]): row[2:] for row in result.table().rows}
    for verified, attacked in zip(result.verified, result.empirical, strict=True):
        ends, interval = rows["verified to attacked", f"{verified.eps:.4g}"]
        assert ends == f"{100 * verified.accuracy.value:.2f}-{100 * attacked.accuracy.value:.2f}"
        assert interval == f"{100 * verified.accuracy.interval[0]:.1f}-{100 * attacked.accuracy.interval[1]:.1f}"
    alone = dataclasses.replace(result, empirical=())
    assert not [row for row in alone.table().rows if "to attacked" in row[0]]
