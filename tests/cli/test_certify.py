"""``atoll certify`` as a user runs it."""

import json
from itertools import combinations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from atoll.certify import GloRo, NearestCentroid
from atoll.certify.gloro import PairwiseLipschitz
from atoll.certify.measure import CertifyResult
from atoll.cli import main
from atoll.models import ViT
from atoll.runs import run as run_module
from atoll.runs.run import open_run
from atoll.runs.train import train
from support import run_command


def certify(capsys, folder, *words):
    """The result that the command prints."""
    assert main(["certify", str(folder), *map(str, words), "--json"]) == 0
    return CertifyResult.from_json(json.loads(capsys.readouterr().out)["results"][str(folder)])


def refuse(capsys, folder, *words):
    """The error that the command prints."""
    assert main(["certify", str(folder), *map(str, words)]) == 1
    return " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def centroid_run(tmp_path_factory):
    words = ("data.limit=300", "model.per_class=8", "trainer.epochs=2", "trainer.test_steps=0")
    return train("digits-centroid", *words, out=tmp_path_factory.mktemp("runs") / "centroid")


def test_training_reports_the_estimate_and_proves_the_result(gloro_run):
    epochs = [record for record in gloro_run.metrics if record["kind"] == "epoch"]
    assert all("validation_vra_estimate" in record for record in epochs)
    largest = max(epochs, key=lambda record: record["validation_vra_estimate"])
    best, last = gloro_run.tests()
    assert (best.epoch, last.epoch) == (largest["epoch"], epochs[-1]["epoch"])
    assert all(row.robust is None and row.verified is not None for row in (best, last))


@pytest.mark.pictures
def test_table_json_certificates_and_picture(gloro_run, capsys):
    words = ["--points", "60", "--eps", "1/10,0.5", "--check", "10", "--attacks", "PGD-3"]
    assert main(["certify", str(gloro_run.folder), *words]) == 0
    table = capsys.readouterr().out
    for word in ("body.0", "exact", "verified", "PGD-3", "no prediction changed", "95 %", "certificates"):
        assert word in table
    result = certify(capsys, gloro_run.folder, *words)
    assert [row.eps for row in result.verified] == [0.1, 0.5]
    assert result.check.attacked == 10
    verified = result.verified[0].accuracy.correct
    assert verified <= result.empirical[0].accuracy.correct <= result.clean.correct
    (stored,) = (r for r in gloro_run.results("certify") if r.settings == result.settings)
    assert stored == result
    assert (stored.folder / "curve.png").read_bytes()[:4] == b"\x89PNG"
    tensors = load_file(stored.folder / "certificates.safetensors")
    assert tensors["radius"].dtype == torch.float64
    assert int(((tensors["prediction"] == tensors["label"]) & (tensors["radius"] >= 0.1)).sum()) == verified


def test_the_test_of_training_is_the_result_of_the_command(gloro_run, capsys):
    result = certify(capsys, gloro_run.folder, "--no-attack")
    assert result.check is None
    assert result == gloro_run.tests()[0].certified
    # Another radius is another question.
    certify(capsys, gloro_run.folder, "--no-attack", "--eps", "0.1")
    assert gloro_run.tests()[0].certified == result


def test_a_false_certificate_fails_the_command(gloro_run, capsys, monkeypatch):
    proven = GloRo.proven

    def wrong(*arguments, **options):
        certifier = proven(*arguments, **options)
        return GloRo(
            certifier.model, PairwiseLipschitz.estimated(0.1 * certifier.constants.lipschitz), certifier.layers
        )

    monkeypatch.setattr(GloRo, "proven", staticmethod(wrong))
    assert "a certificate is false" in refuse(capsys, gloro_run.folder, "--points", "39", "--check", "10")
    (path,) = gloro_run.folder.glob("results/certify/*/broken.safetensors")
    assert not (path.parent / "result.json").exists()
    path.unlink()


def test_smoothing_of_any_model_is_stored_and_is_no_proof(trained, capsys):
    words = ("--smooth", "0.25", "--samples", "50", "--alpha", "0.2", "--eps", "0.1", "--points", "12")
    result = certify(capsys, trained, *words)
    assert result.is_probabilistic
    assert (result.lipschitz, result.check, result.layers) == (None, None, ())
    (stored,) = (r for r in open_run(trained).results("certify") if r.settings == result.settings)
    (points,) = stored.folder.glob("points/points-0.jsonl")
    assert len(points.read_text().split("\n")) == 1 + 12
    tensors = load_file(stored.folder / "certificates.safetensors")
    holds = (tensors["prediction"] == tensors["label"]) & (tensors["radius"] >= 0.1)
    assert int(holds.sum()) == result.verified[0].accuracy.correct
    assert main(["certify", str(trained), *words]) == 0
    assert "each certificate holds with probability 0.8" in " ".join(capsys.readouterr().out.split())


def test_rejection_of_other_data(centroid_run, capsys):
    words = ("--no-attack", "--points", "30", "--eps", "0,0.3", "--reject", "noise")
    for eta in (0.0, 0.3):
        result = certify(capsys, centroid_run.folder, *words, "--reject", "{class_path: Digits}", "--eta", eta)
        shares = {(row.data, row.eps): row.share.correct for row in result.rejected}
        assert shares["test points", 0.3] == shares["{class_path: Digits}", 0.3] >= 30 - result.clean.correct
        assert shares["test points", 0.0] <= shares["test points", 0.3]
        assert (shares["noise", 0.0] == 30) == (eta > 0)  # noise is far from all centroids
    assert main(["certify", str(centroid_run.folder), *words, "--eta", "0.3"]) == 0
    assert "rejected %" in capsys.readouterr().out


@pytest.mark.pictures
def test_a_centroid_net_has_guarantees_for_all_inputs_and_prototypes(centroid_run, capsys):
    words = ("--no-attack", "--points", "40", "--eta", "0.2")
    assert main(["certify", str(centroid_run.folder), *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    result = certify(capsys, centroid_run.folder, *words)
    model = centroid_run.model().double()
    # d_min, the radii and the accepted points from their definitions; K is 1 without an encoder.
    centroids = model.head.centroids.detach().numpy()
    distances = [np.linalg.norm(one - two) for a, b in combinations(centroids, 2) for one in a for two in b]
    assert result.centroids.separation == pytest.approx(min(distances))
    assert result.centroids.global_radius == pytest.approx(0.2 * min(distances))
    assert result.centroids.local_radius == pytest.approx(0.1 * min(distances))
    x = centroid_run.data.tensors("test", 40)[0].flatten(1).double().numpy()
    nearest = np.linalg.norm(x[:, None, None] - centroids, axis=3).min(2)
    first, second = np.sort(nearest, axis=1)[:, :2].T
    accepted = int((second - first >= 0.2 * (first + second)).sum())
    assert 0 < accepted < 40
    assert (result.centroids.coverage.correct, result.centroids.coverage.total) == (accepted, 40)
    for number in (min(distances), 0.2 * min(distances), 0.1 * min(distances)):
        assert f"{number:.4g}" in text
    assert f"eta 0.2 accepts {100 * accepted / 40:.2f} %" in text
    # Without an encoder a prototype is the nearest centroid itself, as far as it is a valid input.
    (stored,) = (r for r in centroid_run.results("certify") if r.settings == result.settings)
    assert stored == result
    tensors = load_file(stored.folder / "prototypes.safetensors")
    every = centroids.reshape(-1, 64)
    rows = np.linalg.norm(x[:6, None] - every, axis=2).argmin(1)
    np.testing.assert_allclose(tensors["prototype"].flatten(1).numpy(), every[rows].clip(0, 1))
    moved = np.linalg.norm(every[rows].clip(0, 1) - every[rows], axis=1)
    np.testing.assert_allclose(result.centroids.prototypes, moved, atol=1e-12)
    assert (stored.folder / "prototypes.png").read_bytes()[:4] == b"\x89PNG"
    # Without an eta layer nothing is rejected, and no radius holds for all inputs.
    plain = certify(capsys, centroid_run.folder, "--no-attack", "--points", "40").centroids
    assert (plain.global_radius, plain.local_radius, plain.coverage.correct) == (0, 0, 40)


@pytest.mark.slow
def test_two_processes_share_the_points(gloro_run):
    folder = str(gloro_run.folder)
    words = ("certify", folder, "--points", "41", "--json", "--check", "5", "--attacks", "PGD-2", "--restart")
    one, two = (json.loads(run_command(*words, processes=p, check=True).stdout)["results"][folder] for p in (1, 2))
    assert one["clean"] == two["clean"]
    assert one["verified"] == two["verified"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--points", "0"], "points: expected at least 1"),
        (["--eps", "x"], "eps: expected a number or a fraction"),
        (["--attacks", "magic"], "attacks: expected an attack, got 'magic'"),
        (["--eta", "0.1"], "eta: expected a CentroidNet, got SmallConvNet"),
        (["--smooth", "0"], "smooth: expected a number > 0"),
        (["--reject", "noise", "--smooth", "0.1"], "smooth: cannot be combined with reject or eta"),
        (["--reject", "TwoMoons"], "reject: expected inputs of 1x8x8, got 2 from TwoMoons"),
        (["--reject", "Didgits"], "reject"),
        (["--checkpoint", "first"], "--checkpoint: expected best, last or a step"),
    ],
)
def test_wrong_arguments_are_refused(gloro_run, capsys, words, message):
    assert message in refuse(capsys, gloro_run.folder, "--check", "1", "--points", "4", *words)


def test_models_that_cannot_be_certified_are_refused(trained, capsys, monkeypatch):
    assert "was trained against linf; specify an l2 radius" in refuse(capsys, trained)
    # As if it had been trained, which takes longer.
    monkeypatch.setattr(
        run_module, "model_from", lambda *_, **__: ViT((1, 8, 8), 10, patch_size=4, width=8, depth=1, heads=2).eval()
    )
    error = refuse(capsys, trained, "--eps", "0.1")
    assert "native_layer_norm cannot be certified: it has no certification rule" in error


def test_a_centroid_net_is_certified_with_its_polyhedra_at_the_radii_of_the_settings(centroid_run, capsys):
    options = ["--points", "60", "--eps", "0.3,0.5", "--check", "8", "--attacks", "PGD-3"]
    result = certify(capsys, centroid_run.folder, *options)
    assert result.lipschitz == pytest.approx(1)
    assert result.check.attacked == 8
    assert result.empirical[0].attacks == "PGD-3, prototypes"
    x, y = centroid_run.data.tensors("test", 60)
    planes = NearestCentroid.proven(centroid_run.model().double())(x)
    for number, eps in enumerate((0.3, 0.5)):
        least = int(((planes.prediction == y) & (planes.radius >= eps)).sum())
        assert least <= result.verified[number].accuracy.correct <= result.empirical[number].accuracy.correct
