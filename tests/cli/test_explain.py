"""``atoll explain`` as a user runs it."""

import json
import shutil

import pytest
import torch
from PIL import Image

from atoll.cli import main
from atoll.explain import STANDARD, boundary_search
from atoll.runs.run import open_run
from subject_cases import stored_files

# A net that has learned something: the prediction of the smallest one is constant, and has no boundary.
LEARNS = [
    "digits-standard", "data.limit=400", "model.widths=[4,8]", "model.hidden=16", "trainer.epochs=8",
    "trainer.batch_size=32", "trainer.test_steps=0", "trainer.evaluate_every=8",
]  # fmt: skip
QUICK = ["--points", "3", "--pool", "20", "--budget", "40", "--checks", "0"]
MY_MAP = """
from atoll.explain.attributions import PointAttribution

class Twice(PointAttribution):
    def explain(self, x, start, target, batch_size):
        return 2 * x
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "small"
    assert main(["train", *LEARNS, "--out", str(folder), "--json"]) == 0
    return folder


def copy_of(trained, folder):
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("results"))
    return folder


def printed(capsys, *flags):
    capsys.readouterr()
    assert main(["explain", *map(str, flags), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["results"]


@pytest.mark.pictures
def test_table_json_attributions_and_picture(trained, capsys):
    flags = [trained, *QUICK, "--checks", "1"]
    assert main(["explain", *map(str, flags)]) == 0
    table = " ".join(capsys.readouterr().out.split())
    for part in ("decision boundary, 3 test points", "INFD", "completeness gap", "sanity check", "Lipschitz at least",
                 "SM-BSM", "model calls per point for the boundary", "attributions, results and figures"):  # fmt: skip
        assert part in table
    tree = printed(capsys, *flags)[str(trained)]
    result = next(r for r in open_run(trained).results("explain") if str(r.folder) == tree["folder"])
    assert tree == json.loads(json.dumps(result.to_json())) | {"folder": str(result.folder)}
    assert (result.folder / "attributions.png").read_bytes()[:4] == b"\x89PNG"
    assert tuple(result.methods) == STANDARD
    # The numbers are those of the stored tensors.
    tensors, model = result.tensors(), open_run(trained).model()
    assert torch.equal(model(tensors["x_outside"]).argmax(1) != tensors["prediction"], tensors["distance"].isfinite())
    change = model(tensors["x"]).gather(1, tensors["prediction"][:, None]).squeeze(1)
    change = change - model(0 * tensors["x"]).gather(1, tensors["prediction"][:, None]).squeeze(1)
    gap = (tensors["attributions/IG"].flatten(1).sum(1) - change).abs().mean()
    assert result.methods["IG"].completeness_gap.value == pytest.approx(float(gap.detach()), rel=1e-3)


def test_the_command_does_what_python_does(trained, capsys, tmp_path):
    run, other = (copy_of(trained, tmp_path / name / "small") for name in ("a", "b"))
    path = tmp_path / "my_map.py"
    path.write_text(MY_MAP)
    assert main(["explain", str(run), *QUICK, "--methods", f"SM,{path}:Twice"]) == 0
    assert "Twice" in capsys.readouterr().out
    methods = ("SM", f"{path}:Twice")
    result = open_run(other).explain(points=3, pool=20, budget=40, checks=0, methods=methods)
    files = stored_files(run / "results")
    assert files == stored_files(other / "results")
    names = {"result.json", "attributions.png", "attributions.safetensors"}
    assert {name.rpartition("/")[2] for name in files} == names
    tensors = result.tensors()
    torch.testing.assert_close(tensors[f"attributions/{path}:Twice"], 2 * tensors["x"])


@pytest.mark.pictures
def test_models_side_by_side(trained, capsys, tmp_path):
    other = copy_of(trained, tmp_path / "other")
    flags = [trained, other, *QUICK, "--points", "2", "--methods", "SM,BIG"]
    assert main(["explain", *map(str, flags)]) == 0
    table = " ".join(capsys.readouterr().out.split())
    for part in ("SM, small", "SM, other", "BIG, other", "side by side"):
        assert part in table
    both = printed(capsys, *flags)
    assert list(both) == [str(trained), str(other)]
    assert both[str(other)]["methods"]["SM"]["sanity_passed"] is None
    pictures = [result.folder / "side-by-side.png" for result in open_run(trained).results("explain")]
    assert [path.read_bytes()[:4] for path in pictures if path.is_file()] == [b"\x89PNG"]


def test_image_files(trained, capsys, tmp_path):
    exact, large = tmp_path / "exact.png", tmp_path / "large.png"
    x, _ = open_run(trained).data.tensors("test", 1)
    pixels = (x[0, 0] * 255).round().to(torch.uint8)
    Image.fromarray(pixels.numpy()).save(exact)
    Image.new("RGB", (40, 20), (255, 0, 0)).save(large)
    flags = (trained, exact, large, "--methods", "SM,BSM", "--checks", "0", "--budget", "40", "--pool", "20")
    assert main(["explain", *map(str, flags)]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "large.png: 40 x 20 pixels, resized and cropped to 8 x 8" in table
    assert "exact.png: 8 x 8" not in table
    tree = printed(capsys, *flags)[str(trained)]
    assert tree["titles"] == ["exact.png", "large.png"]
    assert tree["settings"]["images"] == [str(exact), str(large)]
    result = open_run(trained).explain(
        images=(str(exact), str(large)), methods=("SM", "BSM"), checks=0, budget=40, pool=20
    )
    assert str(result.folder) == tree["folder"]
    tensors = result.tensors()
    torch.testing.assert_close(tensors["x"][0, 0], pixels.float() / 255, atol=1e-5, rtol=0)
    torch.testing.assert_close(tensors["x"][1], torch.full((1, 8, 8), 76 / 255), atol=1e-6, rtol=0)  # luma of red


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--points", "0"], "points: expected at least 1, got 0"),
        (["--pool", "-1"], "pool: expected at least 0, got -1"),
        (["--methods", "SM,XX"], "expected an attribution, got 'XX'; expected one of BIG"),
        (["--budget", "3"], "budget: expected at least 17 calls"),
        (["--checkpoint", "worst"], "--checkpoint: expected best, last or a step"),
    ],
)
def test_nonsense_is_one_sentence(trained, capsys, flags, sentence):
    assert main(["explain", str(trained), "--points", "2", "--checks", "0", *flags]) == 1
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_paths_that_are_neither_runs_nor_images_are_one_sentence(trained, capsys, tmp_path):
    (tmp_path / "a.png").write_bytes(b"no image")
    assert main(["explain", str(trained), str(tmp_path / "a.png")]) == 1
    assert "not a valid image file" in " ".join(capsys.readouterr().err.split())
    assert main(["explain", str(trained), "nowhere"]) == 1
    assert "nowhere is not a run" in " ".join(capsys.readouterr().err.split())
    assert main(["explain", str(tmp_path / "a.png")]) == 1
    assert "expected the folder of a run, got only files" in " ".join(capsys.readouterr().err.split())


def test_a_run_is_explained_with_the_search_of_the_library(trained):
    result = open_run(trained).explain(points=3, pool=0, budget=40, checks=0, methods=("BSM",))
    tensors = result.tensors()
    again = boundary_search(open_run(trained).model(), tensors["x"], budget=40)
    torch.testing.assert_close(again.distance, tensors["distance"])
    assert {name: again.method.count(name) for name in again.method} == result.searches
