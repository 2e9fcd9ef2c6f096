"""Defects of data are reported under their kinds, with the right numbers; unusual data are not defects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from atoll.data import FashionMNISTSmall, ImageCsv, ImageFolder, Npz, TwoMoons
from atoll.health import Finding, check_data, scan_data
from atoll.health import data as health_data
from health.health_cases import Stored, changed, color, few_of_most, part


def findings(data: Stored) -> list[Finding]:
    return check_data(scan_data(data), data.classes)


def fashion(count: int = 500) -> Stored:
    """Real images: 1,000 for training and at most 1,000 for testing."""
    data = FashionMNISTSmall(validation=0)
    parts = ((data.train, 1000), (data.test, count))
    return Stored(*((s.fetch(torch.arange(n)).clone(), s.labels[:n].clone()) for s, n in parts))


def with_copies(data: Stored) -> Stored:
    data.parts[1][0][40:45] = data.parts[1][0][0]
    return data


def with_leaks(data: Stored) -> Stored:
    data.parts[1][0][:50] = data.parts[0][0][200:250]
    return data


def with_blanks(data: Stored) -> Stored:
    levels = torch.arange(7, dtype=torch.uint8)
    data.parts[1][0][:7] = levels[:, None, None, None]
    return data


def levels_of(bits: int) -> Callable[[Stored], Stored]:
    return lambda data: changed(data, lambda x: x >> (8 - bits) << (8 - bits))


def twice(data: Stored) -> Stored:
    """Divided by 255 twice."""
    return changed(data, lambda x: x.float() / 255 / 255)


# Defect: kind and message; the image itself is not counted as its copy.
DEFECTS: dict[str, tuple[Callable[[Stored], Stored], str, str]] = {
    "missing class": (
        lambda data: part(data, lambda y: (y != 3) | (len(y) == 1000)), "missing class",
        "class c3 has no test images",
    ),
    "two missing classes": (
        lambda data: part(data, lambda y: (y > 1) | (len(y) == 1000)), "missing class",
        "2 of 10 classes have no test images: c0, c1",
    ),
    "no training images": (
        lambda data: part(data, lambda y: (y != 3) | (len(y) < 1000)), "missing class",
        "class c3 has no training images",
    ),
    "class without images": (
        lambda data: Stored(*data.parts, classes=11), "missing class", "class c10 has no test images",
    ),
    "duplicates": (
        with_copies, "duplicates",
        "test images that are exact copies of other test images: 5 of 500, some with another label",
    ),
    "overlap": (
        with_leaks, "overlap",
        "test images that are also training images: 50 of 500; a model that was trained on them is less accurate than"
        " it seems",
    ),
    "blank": (with_blanks, "blank", "test images with the same color everywhere: 7 of 500"),
    "binary": (levels_of(1), "gray levels", "the images have only 2 gray levels, at least 0.5 apart"),
    "3 bits": (levels_of(3), "gray levels", "the images have only 8 gray levels, at least 0.13 apart"),
    "4 bits": (levels_of(4), "gray levels", "the images have only 16 gray levels, at least 0.063 apart"),
    "divided by 255 twice": (twice, "dark", "all pixels are in [0, 0.0039], a small part of [0, 1]"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_defects(name: str) -> None:
    plant, kind, message = DEFECTS[name]
    assert findings(fashion()) == []
    (finding,) = findings(plant(fashion()))
    assert finding.kind == kind
    assert finding.message.startswith(message)


def points(count: int, classes: int, draw: torch.Generator, low: int = 0, high: int = 256) -> tuple[Tensor, Tensor]:
    """Random images of random classes; with many images, every class has some."""
    labels = torch.randint(classes, (count,), generator=draw)
    if count > classes:
        labels[:classes] = torch.arange(classes)
    return torch.randint(low, high, (count, 3, 6, 6), generator=draw, dtype=torch.uint8), labels


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("train", "test", "classes"), [(50, 10, 10), (3000, 500, 500), (20, 4, 2), (40, 1, 10)])
def test_classes_that_are_missing_by_chance(seed: int, train: int, test: int, classes: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    assert findings(Stored(points(train, classes, draw), points(test, classes, draw), classes)) == []


def test_unusual_images_are_not_defects() -> None:
    draw = torch.Generator().manual_seed(0)
    close = fashion()
    close.parts[1][0][1:] = close.parts[1][0][0]  # 499 almost equal images: each differs in one pixel by one level
    for row in range(1, 500):
        close.parts[1][0][row].view(-1)[row] ^= 1
    cases = {
        "dark": changed(fashion(), lambda x: (x.float() * 5 / 255).round().byte()),
        "dark floats": changed(fashion(), lambda x: x.float() / 255 * 0.02),
        "floats": changed(fashion(), lambda x: x.float() / 255),
        "bright": changed(fashion(), lambda x: 250 + x % 6),
        "almost equal": close,
        "one blank image of 1,000": fashion(1000),
        "a third of the classes": part(fashion(), few_of_most),
        "small": Stored(points(9, 2, draw), points(3, 2, draw), 2),
    }
    cases["one blank image of 1,000"].parts[1][0][3] = 0
    for name, data in cases.items():
        assert findings(data) == [], name
    moons = TwoMoons()
    assert check_data(scan_data(moons), moons.classes) == []


def test_validation_images_are_training_images() -> None:
    data = with_leaks(fashion())
    data.validation_share = 0.3
    (finding,) = findings(data)
    assert finding.message.startswith("test images that are also training images: 50 of 500;")


def test_large_data_are_compared_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers refer to the images that were compared, and the message and the scan give them."""
    data = with_leaks(fashion())
    data.parts[1][0][:] = data.parts[0][0][:500]
    monkeypatch.setattr(health_data, "LIMIT", 28 * 28 * 200)
    monkeypatch.setattr(health_data, "BATCH_BYTES", 28 * 28 * 30)
    scan, read = scan_data(data), []
    assert scan.compared == {"test": 200, "training": 200}
    (finding,) = check_data(scan, data.classes)
    known = {image.numpy().tobytes() for image in data.train.fetch(health_data._rows(data.train))}
    count = sum(image.numpy().tobytes() in known for image in data.test.fetch(health_data._rows(data.test)))
    assert 10 < count < 80
    assert f": {count} of 200, compared with 200 of 1,000 training images;" in finding.message
    scan_data(data, lambda done, total: read.append((done, total)))
    assert read[0] == (30, 400)
    assert read[-1] == (400, 400)


def test_the_digest_of_the_data() -> None:
    digest = scan_data(fashion()).digest
    assert scan_data(fashion()).digest == digest
    for place in (0, 1):
        data = fashion()
        data.parts[place][0][7, 0, 0, 0] ^= 1
        assert scan_data(data).digest != digest
        data = fashion()
        data.parts[place][1][7] = (data.parts[place][1][7] + 1) % 10
        assert scan_data(data).digest != digest


@pytest.mark.parametrize("kind", ["folder", "csv", "npz"])
def test_files(tmp_path: Path, kind: str) -> None:
    """The same copies are reported, wherever the images come from."""
    images, labels = color().parts[0][0][:60].permute(0, 2, 3, 1).numpy().copy(), np.arange(60) % 3
    images[50] = images[10]  # in the test set and in the training set
    images[48] = images[46]  # both in the test set, with different labels
    for number, image in enumerate(images):
        folder = tmp_path / ("val" if number > 44 else "train") / "abc"[labels[number]]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    data: ImageFolder | ImageCsv | Npz = ImageFolder(root=tmp_path, resize=16, size=16, validation=0)
    if kind == "csv":
        files = sorted(tmp_path.rglob("*.png"))
        rows = [f"{f.relative_to(tmp_path)},{f.parts[-2]},{f.parts[-3]}" for f in files]
        (tmp_path / "x.csv").write_text("\n".join(["path,label,split", *rows]))
        data = ImageCsv(path=tmp_path / "x.csv", resize=16, size=16, validation=0)
    if kind == "npz":
        arrays = {"x_train": images[:45], "y_train": labels[:45], "x_test": images[45:], "y_test": labels[45:]}
        np.savez(tmp_path / "x.npz", **arrays)
        data = Npz(path=tmp_path / "x.npz", validation=0)
    copies, leaks = check_data(scan_data(data), data.classes)
    assert str(copies) == (
        "duplicates: test images that are exact copies of other test images: 1 of 15, some with another label"
    )
    assert str(leaks).startswith("overlap: test images that are also training images: 1 of 15;")
