"""What exported files say about their classes, inputs and origin."""

import json
import re
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from torch import nn

from atoll.data import FewerClasses, ImageFolder, TwoMoons
from atoll.data.base import to_float
from atoll.data.decode import decode
from atoll.export import Metadata, export_model
from atoll.graph import capture
from atoll.subject import Origin, Subject
from atoll.threat import ThreatModel

GUIDE = Path(__file__).parents[2] / "docs/guides/certify.md"


def properties(shape, classes=3, **options):
    model = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes))
    return Metadata(**options).properties(capture(model, shape))


def test_files_carry_their_metadata(tmp_path):
    names = ['Ångström "A"', "<b>", "c,d"]
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 6, 3))
    origin = Origin(run="photos", step=40, epoch=2, weights="swa", file="abc")
    metadata = Metadata(classes=names, resize=8, origin=origin)
    export_model(net, torch.rand(2, 3, 6, 6), tmp_path / "net.onnx", metadata=metadata)
    file = onnx.load(tmp_path / "net.onnx")
    assert file.graph.input[0].type.denotation == "IMAGE"  # ONNX's own keys are about such inputs
    stored = {entry.key: entry.value for entry in file.metadata_props}
    assert (file.producer_name, file.producer_version) == ("atoll", version("atoll"))
    assert json.loads(stored["classes"]) == names
    assert json.loads(stored["input_range"]) == [0, 1]
    assert json.loads(stored["image_size"]) == [6, 6]
    expected = {
        "layout": "NCHW", "channels": "RGB", "resize": "8", "precision": "float32", "run": "photos",
        "checkpoint": "step 40", "epoch": "2", "weights": "swa", "Image.BitmapPixelFormat": "Rgb8",
        "Image.ColorSpaceGamma": "SRGB", "Image.NominalPixelRange": "Normalized_0_1",
        "function_digest": capture(net, (3, 6, 6)).digest,
    }  # fmt: skip
    assert {key: stored[key] for key in expected} == expected
    assert "shorter side to 8 pixels" in stored["preprocessing"]
    assert "middle 6 x 6 pixels, divide by 255" in stored["preprocessing"]


def test_inputs_that_are_no_images_have_no_preprocessing():
    for case in ({"shape": (2,), "bounds": None}, {"shape": (3, 6, 6), "bounds": (-1.0, 1.0)}, {"shape": (2, 6, 6)}):
        assert not properties(**case).keys() & {"channels", "image_size", "resize", "preprocessing"}
    plane = properties((2,), bounds=None)
    assert (plane["layout"], plane["input_range"], plane["classes"]) == ("NC", "null", '["0", "1", "2"]')
    assert "run" not in plane


def test_images_that_are_not_square_are_not_scaled():
    stored = properties((1, 6, 8))
    assert (stored["channels"], stored["image_size"]) == ("L", "[6, 8]")
    assert "resize" not in stored
    assert "gray (0.299 R + 0.587 G + 0.114 B), divide by 255" in stored["preprocessing"]


@pytest.fixture
def photos(tmp_path):
    """Photos that are not square, and smooth, so that interpolation hardly matters."""
    rows, columns = np.mgrid[0:60, 0:90] / 90
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(10):
            pixels = np.stack([rows + 0.1 * label, columns, 0.02 * number + 0 * rows], 2)
            image = Image.fromarray((255 * pixels.clip(0, 1)).astype(np.uint8))
            image.save(tmp_path / "photos" / name / f"{number}.png")
    return ImageFolder(root=tmp_path / "photos", resize=24, size=16)


def test_metadata_of_data(photos):
    threat = ThreatModel("linf", 0.1)
    for data in (photos, FewerClasses(data=photos, count=2)):
        metadata = Metadata.of(Subject(nn.Identity(), data, threat, origin=Origin(run="r", step=1)))
        assert metadata == Metadata(classes=("cat", "dog"), resize=24, origin=Origin(run="r", step=1))
    assert Metadata.of(Subject(nn.Identity(), TwoMoons(), threat)).bounds is None


@pytest.mark.parametrize("channels", [3, 1])
def test_the_example_of_the_guide_names_the_class_of_a_photo(photos, channels, tmp_path, monkeypatch, capsys):
    """With the pixels that the network was trained on."""
    monkeypatch.chdir(tmp_path)
    file = Path(photos.test.files[0])
    expected = to_float(decode(file, "photo", resize=24, size=16))
    if channels == 1:
        expected = (expected * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(0, keepdim=True)
    net = nn.Sequential(nn.Flatten(), nn.Linear(channels * 16 * 16, 2))
    metadata = Metadata(classes=("cat", "dog"), resize=24)
    export_model(net, expected[None], "net.onnx", metadata=metadata)
    Path("photo.png").write_bytes(file.read_bytes())
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S) if "ort json" in block)
    names = {}
    exec(compile(example, "certify.md", "exec"), names)
    pixels = torch.from_numpy(names["pixels"]).permute(2, 0, 1)
    assert pixels.shape == expected.shape
    assert (pixels - expected).abs().max() < 0.01
    assert capsys.readouterr().out.strip() == metadata.classes[net(expected[None]).argmax()]
