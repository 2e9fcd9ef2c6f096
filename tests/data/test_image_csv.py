"""Images listed in a CSV file."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
import torch

from atoll.data import ImageCsv, ImageFolder
from atoll.data.base import in_memory
from atoll.errors import DataError, InputError
from atoll.runs.data_record import locate
from data.fakes import fake_csv, fake_folder, png


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def listed(path: Path, **options: object) -> ImageCsv:
    return ImageCsv(path=path, **{"resize": 16, "size": 12, **options})  # type: ignore[arg-type]


def photos(folder: Path, count: int = 10) -> list[str]:
    """Names of image files in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number}.png").write_bytes(png((20, 16), number))
    return [f"{number}.png" for number in range(count)]


def everything(data: ImageCsv | ImageFolder, split: str) -> torch.Tensor:
    points = data.split(split)
    return points.fetch(torch.arange(len(points)))


def test_the_same_images_as_in_the_folder(tmp_path: Path) -> None:
    data = listed(fake_csv(tmp_path), validation=0.2)
    folder = ImageFolder(root=tmp_path, resize=16, size=12, validation=0.2)
    assert data.classes == folder.classes
    assert data.notes == ()
    for name in ("train", "validation", "test"):
        assert torch.equal(everything(data, name), everything(folder, name))
        assert torch.equal(data.split(name).labels, folder.split(name).labels)


def test_drawn_split_is_that_of_the_folder(tmp_path: Path) -> None:
    root = fake_folder(tmp_path) / "train"
    rows = [f"{path.relative_to(root)},{path.parent.name}" for path in sorted(root.rglob("*.PNG"))]
    data = listed(write(root / "photos.csv", "path,label\n" + "\n".join(rows)), test_share=0.3)
    folder = ImageFolder(root=root, resize=16, size=12, test_share=0.3)
    for name in ("train", "test"):
        assert torch.equal(everything(data, name), everything(folder, name))
    (note,) = data.notes
    assert "photos.csv has no column split, so 6 of 20 images (30% of each class, chosen by file name)" in note


def test_columns_in_any_order_quotes_and_spaces(tmp_path: Path) -> None:
    for name in ("a, b.png", 'c "d".png', "é.png", "e.png"):
        (tmp_path / name).write_bytes(png((20, 16)))
    text = '\ufeffid, Label ,SPLIT,path\r\n1,cat,train,"a, b.png"\r\n2,"dog, big",Train,"c ""d"".png"\r\n\r\n'
    text += "3,cat, test , é.png\r\n4,dog,test,e.png\r\n"
    data = listed(write(tmp_path / "x.csv", text), validation=0)
    assert data.classes == ("cat", "dog", "dog, big")
    assert data.inspect().points == {"training": 2, "test": 2}
    assert [Path(file).name for file in data.load().train.files] == ["a, b.png", 'c "d".png']  # type: ignore[attr-defined]


def test_labels_that_are_numbers(tmp_path: Path) -> None:
    photos(tmp_path, 24)
    rows = "\n".join(f"{number}.png,{number % 12}" for number in range(24))
    data = listed(write(tmp_path / "x.csv", f"path,label\n{rows}"), validation=0)
    assert data.classes == tuple(map(str, range(12)))
    assert data.train.labels.tolist() == list(range(12))
    rows = rows.replace(",11", ",eleven")
    assert listed(write(tmp_path / "y.csv", f"path,label\n{rows}")).classes[:3] == ("0", "1", "10")


def test_val_is_the_test_set_unless_there_is_test(tmp_path: Path) -> None:
    names = photos(tmp_path)
    splits = ["train"] * 6 + ["val"] * 2 + ["test"] * 2

    def data(*splits: str) -> ImageCsv:
        rows = [f"{name},{number % 2},{split}" for number, (name, split) in enumerate(zip(names, splits, strict=False))]
        return listed(write(tmp_path / "x.csv", "path,label,split\n" + "\n".join(rows)), validation=0.34)

    two = data(*splits[:8])
    assert [len(two.split(name)) for name in ("train", "validation", "test")] == [3, 3, 2]
    three = data(*splits)
    assert [len(three.split(name)) for name in ("train", "validation", "test")] == [6, 2, 2]
    alone = ImageFolder(root=tmp_path, resize=16, size=12)
    assert torch.equal(everything(three, "validation")[1], alone.read_image(tmp_path / "7.png", (3, 12, 12)))
    for missing, expected in (("test", "train"), ("train", "val or test")):
        with pytest.raises(DataError, match=rf"x\.csv: expected images of split {expected}, got none"):
            _ = data(*[missing] * 10).train


def test_places(tmp_path: Path) -> None:
    """Relative paths start at the folder of the CSV file; absolute paths, links and .. are followed."""
    photos(tmp_path / "elsewhere")
    (tmp_path / "lists").mkdir()
    os.symlink(tmp_path / "elsewhere" / "2.png", tmp_path / "lists" / "link.png")
    paths = ["../elsewhere/0.png", str(tmp_path / "elsewhere" / "1.png"), "link.png", "../lists/../elsewhere/3.png"]
    rows = [f"{path},{number % 2},{'train' if number < 2 else 'test'}" for number, path in enumerate(paths)]
    data = listed(write(tmp_path / "lists" / "x.csv", "path,label,split\n" + "\n".join(rows)), validation=0)
    assert data.inspect().points == {"training": 2, "test": 2}
    expected = [data.read_image(tmp_path / "elsewhere" / f"{number}.png", (3, 12, 12)) for number in range(4)]
    assert torch.equal(torch.cat([everything(data, "train"), everything(data, "test")]), torch.stack(expected))
    assert in_memory(data.train)
    tree = {"class_path": "ImageCsv", "init_args": {"path": "lists/x.csv"}}
    assert locate(tree, tmp_path)["init_args"]["path"] == str(tmp_path / "lists" / "x.csv")


def test_all_unreadable_images_are_listed_with_their_lines(tmp_path: Path) -> None:
    photos(tmp_path, 12)
    (tmp_path / "3.png").write_bytes((tmp_path / "3.png").read_bytes()[:200])
    (tmp_path / "4.png").unlink()
    (tmp_path / "5.png").write_bytes(b"")
    (tmp_path / "6.png").unlink()
    os.mkfifo(tmp_path / "6.png")
    (tmp_path / "8.png").unlink()
    (tmp_path / "8.png").mkdir()
    rows = "\n".join(f"{number}.png,{'ab'[number % 2]},{'train' if number < 8 else 'test'}" for number in range(12))
    data = listed(write(tmp_path / "x.csv", f"path,label,split\n{rows}"))
    with pytest.raises(DataError) as caught:
        data.inspect()
    first, *faults = str(caught.value).split("\n  ")
    assert first == f"{tmp_path}/x.csv: 5 of 12 images cannot be read; repair or remove them and try again:"
    assert faults[0].startswith("line 5, 3.png: not a valid image file: ")
    assert faults[1:] == [
        "line 6, 4.png: no such file", "line 7, 5.png: empty file", "line 8, 6.png: not a file",
        "line 10, 8.png: not a file",
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"/4\.png: no such file$"):
        data._splits.train.fetch(torch.tensor([4]))


HEADER = "expected a header with the columns path and label, separated by commas, and optionally split; got"
FAULTS = {
    "empty": (b"", f"line 1: {HEADER} an empty line"),
    "no header": (b"0.png,cat\n1.png,dog\n", f"line 1: {HEADER} '0.png, cat'"),
    "semicolons": (b"path;label\n0.png;cat\n", f"line 1: {HEADER} 'path;label'"),
    "two labels": (b"path,label,Label\n0.png,cat,dog\n", f"line 1: {HEADER} 'path, label, Label'"),
    "no rows": (b"path,label\n", "expected images, got only a header"),
    "unknown split": (b"path,label,split\n0.png,cat,dev\n", "line 2: expected split train, val or test, got 'dev'"),
    "no split": (b"path,label,split\n0.png,cat,\n", "line 2: expected split train, val or test, got ''"),
    "not UTF-8": ("path,label\n0.png,cat\né.png,cat\n".encode("latin-1"), "line 3: expected UTF-8 text"),
    "UTF-16": ("path,label\n0.png,cat\n".encode("utf-16"), "line 1: expected UTF-8 text"),
    "NUL": (b"path,label\n\n0.png\0,cat\n", "line 3: expected text, got a NUL character"),
    "empty path": (b"path,label\n ,cat\n", "line 2: expected a path and a label, got an empty cell"),
    "empty label": (b'path,label\n0.png,""\n', "line 2: expected a path and a label, got an empty cell"),
    "comma": (b"path,label\n0, 1.png,cat\n", "line 2: expected 2 columns, got 3; put values that contain commas in"),
    "too few": (b'path,label,split\n"0\n.png",cat,test\n1.png,cat\n', "line 4: expected 3 columns, got 2"),
    "open quote": (b'path,label\n0.png,cat\n"1.png,dog\n2.png,cat\n', "line 4: not valid CSV: unexpected end of data"),
    "long cell": (b"path,label\n" + b"x" * 200_000 + b",cat\n", "line 2: not valid CSV: field larger than"),
    "long line": (b"path,label\n" + b"x" * 2_000_000, "line 2: expected at most 1,048,576 bytes, got more"),
    "one image": (b"path,label\n0.png,a\n1.png,a\n2.png,b\n", "line 4: expected at least 2 images of each class"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_one_sentence(tmp_path: Path, name: str) -> None:
    content, message = FAULTS[name]
    with pytest.raises(DataError) as caught:
        _ = listed(write(tmp_path / "x.csv", content)).train
    assert str(caught.value).startswith(f"{tmp_path}/x.csv")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv: no such file; set the path with --data\.path FILE"):
        _ = listed(tmp_path / "none.csv").train
    with pytest.raises(InputError, match="path: expected a file, got an empty string"):
        ImageCsv(path="")
    with pytest.raises(InputError, match="size: expected 1 to 16 pixels"):
        ImageCsv(path="x.csv", resize=16, size=17)


@pytest.mark.slow
def test_a_million_rows(tmp_path: Path) -> None:
    with (tmp_path / "x.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label"])
        writer.writerows([f"images/{number}.jpg", f"class {number % 1000:03}"] for number in range(1_000_000))
    data = ImageCsv(path=tmp_path / "x.csv")
    assert (len(data.classes), len(data._splits.train), len(data.test)) == (1000, 800_000, 200_000)
    assert data.test.labels.bincount().tolist() == [200] * 1000
