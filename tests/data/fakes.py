"""Small files in the formats of the real data sets, and the data sets that read them."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

from atoll.data import (
    CIFAR10,
    CIFAR100,
    KMNIST,
    MNIST,
    SVHN,
    ClutteredCanvas,
    Data,
    Digits,
    FashionMNIST,
    FashionMNISTSmall,
    FewerClasses,
    ImageCsv,
    ImageFolder,
    Npz,
    OxfordPets,
    TinyImageNet,
    TwoMoons,
)
from atoll.data.download import Remote


def random(*names: object) -> np.random.Generator:
    return np.random.default_rng(list(repr(names).encode()))


def labels(count: int, classes: int) -> np.ndarray:
    return (np.arange(count) % classes).astype(np.uint8)


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def known(remote: Remote, path: Path) -> Remote:
    """The registry entry of a fake file."""
    return replace(remote, md5=md5(path))


def png(size: tuple[int, int], seed: int = 0, kind: str = "png") -> bytes:
    pixels = random(seed, size).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def fake_mnist(kind: type[MNIST], folder: Path, *, packed: bool = True) -> type[MNIST]:
    place = folder / kind.__name__.lower()
    place.mkdir(parents=True)
    files = []
    for remote, count in zip(kind.files, (80, 80, 40, 40), strict=True):
        images = random(kind.__name__, remote.name).integers(0, 256, (count, 28, 28), np.uint8)
        content = idx(images if "images" in remote.name else labels(count, 10))
        path = place / (remote.name if packed else remote.name.removesuffix(".gz"))
        path.write_bytes(gzip.compress(content) if packed else content)
        files.append(known(remote, path))
    return type(kind.__name__, (kind,), {"files": tuple(files)})


def cifar_members(kind: type[CIFAR10], count: int) -> dict[str, bytes]:
    members = {}
    for name in [*kind.train_files, *kind.test_files]:
        pixels = random(kind.__name__, name).integers(0, 256, (count, 3072), np.uint8)
        label = labels(count, len(kind.classes))[:, None]
        coarse = [label // 5] if kind.label_bytes == 2 else []
        members[name] = np.concatenate([*coarse, label, pixels], axis=1).tobytes()
    return members


def fake_cifar(kind: type[CIFAR10], folder: Path, *, packed: bool = True) -> type[CIFAR10]:
    count = 40 if kind is CIFAR10 else 500
    members = cifar_members(kind, count)
    sizes = {
        "train_files": dict.fromkeys(kind.train_files, count),
        "test_files": dict.fromkeys(kind.test_files, count),
    }
    if not packed:
        (folder / kind.folder).mkdir(parents=True)
        for name, content in members.items():
            (folder / kind.folder / name).write_bytes(content)
        return type(kind.__name__, (kind,), sizes)
    (folder / kind.__name__.lower()).mkdir(parents=True)
    path = tar(
        folder / kind.__name__.lower() / kind.archive.name,
        {f"{kind.folder}/readme.html": b"", **{f"{kind.folder}/{name}": c for name, c in members.items()}},
    )
    return type(kind.__name__, (kind,), {**sizes, "archive": known(kind.archive, path)})


def fake_svhn(folder: Path) -> type[SVHN]:
    files = []
    for remote, count in zip(SVHN.files, (60, 30), strict=True):
        pixels = random(remote.name).integers(0, 256, (32, 32, 3, count), np.uint8)
        savemat(folder / remote.name, {"X": pixels, "y": labels(count, 10)[:, None] + np.uint8(1)})
        files.append(known(remote, folder / remote.name))
    return type("SVHN", (SVHN,), {"files": tuple(files)})


TINY_CLASSES = {"n02": "cat, feline", "n01": "goldfish", "n03": "dog"}


def tiny_files() -> dict[str, bytes]:
    files = {
        "wnids.txt": "\n".join(TINY_CLASSES).encode(),
        "words.txt": "\n".join(f"{k}\t{v}" for k, v in {**TINY_CLASSES, "n99": "unused"}.items()).encode(),
    }
    for number, name in enumerate(TINY_CLASSES):
        for i in range(10):
            files[f"train/{name}/images/{name}_{i}.JPEG"] = png((64, 64), 100 * number + i, "jpeg")
        files[f"train/{name}/{name}_boxes.txt"] = b""
    lines = []
    for i, name in enumerate([*TINY_CLASSES] * 2):
        files[f"val/images/val_{i}.JPEG"] = png((64, 64), 1000 + i, "jpeg")
        lines.append(f"val_{i}.JPEG\t{name}\t{i}\t{i + 1}\t{i + 20}\t63")
    files["val/val_annotations.txt"] = "\n".join(lines).encode()
    return files


def fake_tiny(folder: Path, *, packed: bool = True, files: dict[str, bytes] | None = None) -> type[TinyImageNet]:
    files = tiny_files() if files is None else files
    if not packed:
        for name, content in files.items():
            path = folder / "tiny-imagenet-200" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return TinyImageNet
    path = folder / TinyImageNet.archive.name
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"tiny-imagenet-200/{name}", content)
    return type("TinyImageNet", (TinyImageNet,), {"archive": known(TinyImageNet.archive, path)})


def fake_folder(folder: Path) -> Path:
    for part, count in (("train", 10), ("val", 3)):
        for number, name in enumerate(("ant", "bee")):
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                content = png((20 + i, 30 - i), count * 100 + number * 10 + i)
                (folder / part / name / f"{i}.PNG").write_bytes(content)
    return folder


def fake_csv(folder: Path) -> Path:
    """The images of a fake folder in a CSV file: paths, labels and splits."""
    files = sorted(fake_folder(folder).rglob("*.PNG"))
    rows = [f"{path.relative_to(folder)},{path.parts[-2]},{path.parts[-3]}" for path in files]
    (folder / "photos.csv").write_text("\n".join(["path,label,split", *rows, ""]))
    return folder / "photos.csv"


def voc(*objects: tuple[str, tuple[int, int, int, int]], size: tuple[int, int] | None = None) -> bytes:
    """A Pascal-VOC file."""
    tags = ("xmin", "ymin", "xmax", "ymax")
    lines = [f"<size><width>{size[0]}</width><height>{size[1]}</height><depth>3</depth></size>"] if size else []
    for name, box in objects:
        corners = "".join(f"<{tag}>{value}</{tag}>" for tag, value in zip(tags, box, strict=True))
        lines.append(f"<object><name>{name}</name><bndbox>{corners}</bndbox></object>")
    return f"<annotation>{''.join(lines)}</annotation>".encode()


PETS = ("Abyssinian", "american_bulldog", "Birman")


def pet_files() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """What is in the archives of images and annotations."""
    images, annotations = {"images/Abyssinian_100.mat": b""}, {}
    for part, count in (("trainval", 8), ("test", 3)):
        lines = []
        for label, breed in enumerate(PETS):
            for i in range(count):
                name = f"{breed}_{i if part == 'test' else 100 + i}"
                images[f"images/{name}.jpg"] = png((30, 24), label * 1000 + i + 100 * count, "jpeg")
                lines.append(f"{name} {label + 1} 1 1")
                if part == "trainval" and i:  # one has none, as in reality
                    annotations[f"annotations/xmls/{name}.xml"] = voc(("cat", (4, 4, 12, 15)), size=(30, 24))
        annotations[f"annotations/{part}.txt"] = "\n".join(lines).encode()
    return images, annotations


def fake_pets(folder: Path, *, packed: bool = True) -> type[OxfordPets]:
    parts = dict(zip(OxfordPets.archives, pet_files(), strict=True))
    if not packed:
        for name, content in (item for files in parts.values() for item in files.items()):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return OxfordPets
    archives = {
        name: known(remote, tar(folder / remote.name, parts[name])) for name, remote in OxfordPets.archives.items()
    }
    return type("OxfordPets", (OxfordPets,), {"archives": archives})


def fake_npz(path: Path, **changes: np.ndarray | None) -> Path:
    arrays: dict[str, np.ndarray | None] = {}
    for part, count in (("train", 60), ("test", 20)):
        arrays[f"x_{part}"] = random(part).integers(0, 256, (count, 12, 10, 3), np.uint8)
        arrays[f"y_{part}"] = labels(count, 4)
    arrays |= changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


@dataclass(frozen=True)
class Case:
    """One line of the table: how to make the data set (options pass through) and what it is."""

    make: Callable[..., Data]
    shape: tuple[int, ...]
    classes: int
    lengths: tuple[int, int]  # as published: train, test


def _on_disk(kind: Callable[[Path], Callable[..., Data]]) -> Callable[..., Data]:
    return lambda folder, **options: kind(folder)(root=folder, download=False, **options)


DATASETS = {
    "digits": Case(lambda _, **o: Digits(**o), (1, 8, 8), 10, (1437, 360)),
    "fashion-small": Case(lambda _, **o: FashionMNISTSmall(**o), (1, 28, 28), 10, (4000, 1000)),
    "canvas": Case(lambda _, **o: ClutteredCanvas(data=Digits(), size=14, **o), (1, 14, 14), 10, (1437, 360)),
    "fewer": Case(lambda _, **o: FewerClasses(data=Digits(), count=3, **o), (1, 8, 8), 3, (430, 107)),
    "moons": Case(lambda _, **o: TwoMoons(**o), (2,), 2, (500, 1000)),
    "mnist": Case(_on_disk(lambda f: fake_mnist(MNIST, f)), (1, 28, 28), 10, (80, 40)),
    "mnist-raw": Case(_on_disk(lambda f: fake_mnist(MNIST, f, packed=False)), (1, 28, 28), 10, (80, 40)),
    "fashion": Case(_on_disk(lambda f: fake_mnist(FashionMNIST, f)), (1, 28, 28), 10, (80, 40)),
    "kmnist": Case(_on_disk(lambda f: fake_mnist(KMNIST, f)), (1, 28, 28), 10, (80, 40)),
    "cifar10": Case(_on_disk(lambda f: fake_cifar(CIFAR10, f)), (3, 32, 32), 10, (200, 40)),
    "cifar10-bin": Case(_on_disk(lambda f: fake_cifar(CIFAR10, f, packed=False)), (3, 32, 32), 10, (200, 40)),
    "cifar100": Case(_on_disk(lambda f: fake_cifar(CIFAR100, f)), (3, 32, 32), 100, (500, 500)),
    "svhn": Case(_on_disk(fake_svhn), (3, 32, 32), 10, (60, 30)),
    "tiny": Case(_on_disk(fake_tiny), (3, 64, 64), 3, (30, 6)),
    "tiny-folder": Case(_on_disk(lambda f: fake_tiny(f, packed=False)), (3, 64, 64), 3, (30, 6)),
    "folder": Case(lambda f, **o: ImageFolder(root=fake_folder(f), resize=16, size=12, **o), (3, 12, 12), 2, (20, 6)),
    "csv": Case(lambda f, **o: ImageCsv(path=fake_csv(f), resize=16, size=12, **o), (3, 12, 12), 2, (20, 6)),
    "pets": Case(_on_disk(lambda f: partial(fake_pets(f), resize=16, size=12)), (3, 12, 12), 3, (24, 9)),
    "npz": Case(lambda f, **o: Npz(path=fake_npz(f / "x.npz"), **o), (3, 12, 10), 4, (60, 20)),
}
