"""``atoll explain`` as a user runs it."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from atoll.cli import main
from atoll.explain import STANDARD, boundary_search
from atoll.runs.run import open_run
from support import SMALL

# A net that has learned something: one that always says the same has no boundary.
LEARNS = [
    "digits-standard", "data.limit=400", "model.widths=[4,8]", "model.hidden=16", "trainer.epochs=8",
    "trainer.batch_size=32", "trainer.test_steps=0", "trainer.evaluate_every=8",
]  # fmt: skip
QUICK = ["--points", "3", "--pool", "20", "--budget", "40", "--checks", "2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "small"
    assert main(["train", *LEARNS, "--out", str(folder), "--json"]) == 0
    return folder


def result(capsys, *words):
    assert main(["explain", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_table_json_attributions_and_picture(trained, capsys):
    assert main(["explain", str(trained), *QUICK]) == 0
    table = " ".join(capsys.readouterr().out.split())
    for word in ("decision boundary, 3 test points", "INFD", "completeness gap", "sanity check", "Lipschitz at least",
                 "SM-BSM", "model calls per point for the boundary", "attributions, numbers and pictures"):  # fmt: skip
        assert word in table
    folder = trained / "explain"
    before = json.loads((folder / "explain.json").read_text())
    found = result(capsys, trained, *QUICK)[str(trained)]
    assert json.loads((folder / "explain.json").read_text()) == found == before  # the same seed, the same numbers
    assert (folder / "attributions.png").read_bytes()[:4] == b"\x89PNG"
    assert list(found["methods"]) == list(STANDARD)
    stored = load_file(folder / "attributions.safetensors")
    assert {f"attributions/{name}" for name in STANDARD} < stored.keys()
    # The numbers are those of the tensors that were kept.
    model = open_run(trained).model()
    assert torch.equal(model(stored["across"]).argmax(1) != stored["prediction"], stored["distance"].isfinite())
    assert found["boundary"]["mean_distance"] == pytest.approx(float(stored["distance"].mean()))
    apart = (stored["attributions/SM"] - stored["attributions/BSM"]).flatten(1).norm(dim=1).mean()
    assert found["distances"]["SM-BSM"]["value"] == pytest.approx(float(apart), rel=1e-5)
    change = model(stored["x"]).gather(1, stored["prediction"][:, None]).squeeze(1)
    change = change - model(0 * stored["x"]).gather(1, stored["prediction"][:, None]).squeeze(1)
    gap = (stored["attributions/IG"].flatten(1).sum(1) - change).abs().mean()
    assert found["methods"]["IG"]["completeness_gap"]["value"] == pytest.approx(float(gap.detach()), rel=1e-3)


def test_models_side_by_side(trained, capsys, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    words = [str(trained), str(other), *QUICK, "--points", "2", "--methods", "SM,BIG", "--checks", "0"]
    assert main(["explain", *words]) == 0
    table = " ".join(capsys.readouterr().out.split())
    for word in ("SM, small", "SM, other", "BIG, other", "side by side"):
        assert word in table
    assert (trained / "explain" / "side-by-side.png").read_bytes()[:4] == b"\x89PNG"
    both = result(capsys, *words)
    assert list(both) == [str(trained), str(other)]
    assert "sanity" not in both[str(other)]["methods"]["SM"]


def test_image_files(trained, capsys, tmp_path):
    exact, large = tmp_path / "exact.png", tmp_path / "large.png"
    x, _ = open_run(trained).data.tensors("test", 1)
    pixels = (x[0, 0] * 255).round().to(torch.uint8)
    Image.fromarray(pixels.numpy()).save(exact)
    Image.new("RGB", (40, 20), (255, 0, 0)).save(large)
    words = (trained, exact, large, "--methods", "SM,BSM", "--checks", "0", "--budget", "40")
    assert main(["explain", *map(str, words)]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "large.png: 40 x 20 pixels, resized and cut to 8 x 8" in table
    assert "exact.png: 8 x 8" not in table
    found = result(capsys, *words)[str(trained)]
    assert found["images"] == ["exact.png", "large.png"]
    assert found["folder"].endswith("explain/images")
    stored = load_file(trained / "explain" / "images" / "attributions.safetensors")
    torch.testing.assert_close(stored["x"][0, 0], pixels.float() / 255, atol=1e-5, rtol=0)
    torch.testing.assert_close(stored["x"][1], torch.full((1, 8, 8), 0.299), atol=1e-5, rtol=0)
    single = result(capsys, trained, exact, "--methods", "SM", "--checks", "0")[str(trained)]
    assert single["methods"]["SM"]["infidelity"]["value"]["standard_error"] is None  # one point has no spread
    assert single["predictions"] == [found["predictions"][0]]


def test_data_with_boxes_get_their_locality(tmp_path, capsys):
    path = tmp_path / "boxed.npz"
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (60, 8, 8), generator=draw, dtype=torch.uint8).numpy()
    labels = (torch.arange(60) % 3).numpy()
    boxes = torch.tensor([[1, 1, 5, 5]]).expand(20, 4).numpy()
    np.savez(path, x_train=images[:40], y_train=labels[:40], x_test=images[40:], y_test=labels[40:], box_test=boxes)
    run = tmp_path / "run"
    words = [word for word in SMALL if not word.startswith("data.")]
    words += ["data.class_path=Npz", f"data.path={path}", "trainer.epochs=1"]
    assert main(["train", *words, "--out", str(run), "--json"]) == 0
    capsys.readouterr()
    found = result(capsys, run, *QUICK, "--methods", "SM,IG", "--checks", "0")[str(run)]
    assert 0 < found["methods"]["SM"]["locality"]["f1"]["value"] < 1
    assert found["methods"]["SM"]["locality"]["f1"]["points"] == 3
    assert main(["explain", str(run), *QUICK, "--methods", "SM", "--checks", "0"]) == 0
    assert "precision" in capsys.readouterr().out


def test_a_constant_model_is_explained_as_far_as_it_goes(trained, capsys, monkeypatch):
    from atoll.runs.run import Run

    right = Run.model

    def constant(self, *words):
        model = right(self, *words)
        model.head.weight.data.zero_()
        return model

    monkeypatch.setattr(Run, "model", constant)
    few = ["--methods", "SM,BSM,BIG", "--budget", "30"]
    assert main(["explain", str(trained), *QUICK, "--checks", "2", *few]) == 0
    assert "no other prediction was found for 3 of 3 inputs" in " ".join(capsys.readouterr().out.split())
    found = result(capsys, trained, *QUICK, "--checks", "0", *few)[str(trained)]
    assert found["boundary"]["success"] == 0
    assert found["methods"]["BIG"]["undefined"] == 3
    assert found["methods"]["SM"]["undefined"] == 0
    assert found["distances"]["SM-BSM"]["value"] is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--points", "0"], "--points: expected at least 1, got 0"),
        (["--pool", "-1"], "--pool: expected at least 0, got -1"),
        (["--methods", "SM,XX"], "--methods: expected some of SM, IxG, IG, SG, BSM, BIG, got XX"),
        (["--budget", "3"], "budget: expected at least 17 calls"),
        (["--checkpoint", "worst"], "--checkpoint: expected best, last or a step"),
    ],
)
def test_nonsense_is_one_sentence(trained, capsys, words, sentence):
    assert main(["explain", str(trained), "--points", "2", "--checks", "0", *words]) == 1
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_paths_that_are_neither_runs_nor_images_are_one_sentence(trained, capsys, tmp_path):
    (tmp_path / "a.png").write_bytes(b"no image")
    assert main(["explain", str(trained), str(tmp_path / "a.png")]) == 1
    assert "not an image" in " ".join(capsys.readouterr().err.split())
    assert main(["explain", str(trained), "nowhere"]) == 1
    assert "there is no run at nowhere" in " ".join(capsys.readouterr().err.split())
    assert main(["explain", str(tmp_path / "a.png")]) == 1
    assert "expected the folder of a run, got only files" in " ".join(capsys.readouterr().err.split())


def test_a_run_is_explained_with_the_search_of_the_library(trained, capsys):
    found = result(capsys, trained, *QUICK, "--methods", "BSM", "--checks", "0", "--pool", "0")[str(trained)]
    stored = load_file(trained / "explain" / "attributions.safetensors")
    again = boundary_search(open_run(trained).model(), stored["x"], budget=40)
    torch.testing.assert_close(again.distance, stored["distance"])
    assert list(again.method) == found["boundary"]["method"]
