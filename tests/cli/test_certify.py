"""``atoll certify`` as a user runs it."""

import json

import pytest
import torch
from safetensors.torch import load_file

from atoll.certify import GloRo, NearestCentroid
from atoll.certify.gloro import PairwiseLipschitz
from atoll.cli import main
from atoll.runs.run import open_run
from support import SMALL, run_command

GLORO = [
    "digits-gloro", "data.limit=256", "model.widths=[4,8]", "model.hidden=16", "trainer.epochs=4",
    "trainer.test_steps=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "gloro"
    assert main(["train", *GLORO, "--out", str(folder), "--json"]) == 0
    return folder


def result(capsys, *words):
    assert main(["certify", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_training_reports_the_estimate_and_proves_the_result(trained):
    run = open_run(trained)
    epochs = [record for record in run.metrics if record["kind"] == "epoch"]
    assert all("validation_vra_estimate" in record for record in epochs)
    best = max(epochs, key=lambda record: record["validation_vra_estimate"])
    assert run.result["best"]["epoch"] == best["epoch"]
    assert set(run.result["last"]) == {"epoch", "clean", "vra"}


def test_table_json_certificates_and_picture(trained, capsys):
    words = [str(trained), "--points", "60", "--eps", "1/10,0.5", "--check", "10", "--attacks", "PGD-3"]
    assert main(["certify", *words]) == 0
    table = capsys.readouterr().out
    for word in ("body.0", "exact", "verified", "PGD-3", "none fell", "95 %", "certificates"):
        assert word in table
    found = result(capsys, *words)[str(trained)]
    assert [v["eps"] for v in found["verified"]] == [0.1, 0.5]
    assert found["check"]["attacked"] == 10
    assert found["verified"][0]["correct"] <= found["empirical"][0]["correct"] <= found["clean"]["correct"]
    folder = trained / "certificates"
    assert json.loads((folder / "certification.json").read_text()) == found
    assert (folder / "curve.png").read_bytes()[:4] == b"\x89PNG"
    stored = load_file(folder / "certificates.safetensors")
    assert stored["radius"].dtype == torch.float64
    assert (
        int(((stored["prediction"] == stored["label"]) & (stored["radius"] >= 0.1)).sum())
        == found["verified"][0]["correct"]
    )


def test_the_result_of_training_is_that_of_the_command(trained, capsys):
    found = result(capsys, trained, "--no-attack")[str(trained)]
    assert "check" not in found
    assert found["verified"][0]["correct"] == open_run(trained).result["best"]["vra"]["correct"]


def test_float32_certifies_a_little_less(trained, capsys, tmp_path):
    words = (trained, "--no-attack", "--eps", "0.3", "--out", tmp_path)
    single, double = (result(capsys, *words, "--precision", p)[str(trained)] for p in ("float32", "float64"))
    assert 0.9 * double["median_radius"] < single["median_radius"] < double["median_radius"]


def test_a_false_certificate_fails_the_command(trained, capsys, monkeypatch):
    right = GloRo.proven

    def wrong(model, **options):
        found = right(model, **options)
        return GloRo(model, PairwiseLipschitz.estimated(0.1 * found.constants.lipschitz), found.layers)

    monkeypatch.setattr(GloRo, "proven", staticmethod(wrong))
    assert main(["certify", str(trained), "--points", "40"]) == 1
    assert "a certificate is false" in capsys.readouterr().err
    assert (trained / "certificates" / "broken.safetensors").exists()


def test_smoothing_of_any_model_is_resumed_and_says_that_it_is_no_proof(tmp_path, capsys):
    words = ["digits-smoothing", "data.limit=128", "model.widths=[4,4]", "trainer.epochs=2", "trainer.test_steps=0"]
    assert main(["train", *words, "--out", str(tmp_path / "run"), "--json"]) == 0
    capsys.readouterr()
    words = (tmp_path / "run", "--smooth", "0.25", "--samples", "50", "--alpha", "0.2", "--eps", "0.1")
    few = result(capsys, *words, "--points", "3")[str(tmp_path / "run")]
    assert few["smoothing"] == {"sigma": 0.25, "n0": 100, "n": 50, "alpha": 0.2}
    (kept,) = (tmp_path / "run" / "smoothing").glob("points-*/points-0.jsonl")
    assert len(kept.read_text().split()) == 3 * 3
    more = result(capsys, *words, "--points", "12")[str(tmp_path / "run")]
    assert len(kept.read_text().split()) == 3 * 12  # three numbers a point; the first points were known
    stored = load_file(tmp_path / "run" / "smoothing" / "certificates.safetensors")
    assert (
        int(((stored["prediction"] == stored["label"]) & (stored["radius"] >= 0.1)).sum())
        == (more["verified"][0]["correct"])
    )
    assert main(["certify", *map(str, words), "--points", "12"]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "holds with probability 0.8 for each point, not surely" in table
    assert main(["certify", *map(str, words), "--smooth", "0"]) == 1
    assert "sigma: expected a number > 0" in capsys.readouterr().err


def test_rejection_of_other_data(tmp_path, capsys):
    words = ["digits-centroid", "data.limit=256", "model.per_class=5", "trainer.epochs=1", "trainer.test_steps=0"]
    assert main(["train", *words, "--out", str(tmp_path / "run"), "--json"]) == 0
    capsys.readouterr()
    words = (tmp_path / "run", "--no-attack", "--points", "30", "--eps", "0,0.3", "--reject", "noise")
    for eta in (0.0, 0.3):
        found = result(capsys, *words, "--reject", "{class_path: Digits}", "--eta", eta)[str(tmp_path / "run")]
        shares = {(r["data"], r["eps"]): r["correct"] for r in found["rejected"]}
        assert shares["test points", 0.3] == shares["{class_path: Digits}", 0.3] >= 30 - found["clean"]["correct"]
        assert shares["test points", 0.0] <= shares["test points", 0.3]
        assert (shares["noise", 0.0] == 30) == (eta > 0)  # noise is far from all centroids
    assert main(["certify", *map(str, words), "--eta", "0.3"]) == 0
    assert "rejected %" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_share_the_points(trained):
    words = ("certify", str(trained), "--points", "41", "--json", "--check", "5", "--attacks", "PGD-2")
    one, two = (json.loads(run_command(*words, processes=p, check=True).stdout)[str(trained)] for p in (1, 2))
    assert one["clean"] == two["clean"]
    assert one["verified"] == two["verified"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--points", "0"], "--points: expected at least 1"),
        (["--eps", "x"], "eps: expected a number or a fraction"),
        (["--attacks", "magic"], "attack: expected one of FGSM"),
        (["--eta", "0.1"], "eta: expected a CentroidNet, got SmallConvNet"),
        (["--reject", "noise", "--smooth", "0.1"], "--smooth: goes with neither --reject nor --eta"),
        (["--reject", "TwoMoons"], "--reject: expected inputs of 1x8x8, got 2 from TwoMoons"),
        (["--reject", "Didgits"], "--reject"),
        (["--checkpoint", "first"], "--checkpoint: expected best, last or a step"),
    ],
)
def test_nonsense_is_one_sentence(trained, capsys, words, sentence):
    assert main(["certify", str(trained), "--check", "1", "--points", "4", *words]) == 1
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_models_that_cannot_be_certified_say_why(tmp_path, capsys):
    words = [*SMALL, "model={class_path: PreActResNet, init_args: {width: 2}}", "trainer.epochs=1", "attack.steps=1"]
    assert main(["train", *words, "--out", str(tmp_path / "run"), "--json"]) == 0
    assert main(["certify", str(tmp_path / "run"), "--eps", "0.1"]) == 1
    assert "body.1 (PreActBlock) cannot be certified: no Lipschitz" in " ".join(capsys.readouterr().err.split())
    assert main(["certify", str(tmp_path / "run")]) == 1
    assert "was trained against linf; say which l2 radii" in " ".join(capsys.readouterr().err.split())


def test_a_centroid_net_is_certified_with_its_polyhedra_at_the_asked_radii(tmp_path, capsys):
    words = ["digits-centroid", "data.limit=300", "model.per_class=8", "trainer.epochs=2", "trainer.test_steps=0"]
    assert main(["train", *words, "--out", str(tmp_path / "run"), "--json"]) == 0
    capsys.readouterr()
    options = ["--points", "60", "--eps", "0.3,0.5", "--check", "8", "--attacks", "PGD-3"]
    found = result(capsys, tmp_path / "run", *options)[str(tmp_path / "run")]
    assert found["lipschitz"] == pytest.approx(1)
    assert found["check"]["attacked"] == 8
    run = open_run(tmp_path / "run")
    x, y = run.data.tensors("test", 60)
    for number, eps in enumerate((0.3, 0.5)):
        planes = NearestCentroid.proven(run.model().double())(x)
        least = int(((planes.prediction == y) & (planes.radius >= eps)).sum())
        assert least <= found["verified"][number]["correct"] <= found["empirical"][number]["correct"]
