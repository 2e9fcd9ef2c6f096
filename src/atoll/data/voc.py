"""Bounding boxes in Pascal VOC XML files, the format of ImageNet and Oxford-IIIT Pet."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import torch
from torch import Tensor

from atoll.data.boxes import UNKNOWN
from atoll.data.decode import Frame, frame, image_size
from atoll.errors import DataError

Box = tuple[int, int, int, int]

_LARGEST = 1 << 20  # bytes; real files have a few thousand bytes


@dataclass(frozen=True)
class Annotation:
    """The content of an annotation file: names and boxes of objects, and the size of the annotated image.

    Several objects of one class get one box, the smallest that contains all of them, because a model may look at any
    of them.
    """

    source: str
    size: tuple[int, int] | None  # width and height; None if the file does not contain them
    objects: tuple[tuple[str, Box], ...]

    def box(self, names: Container[str] | None, size: tuple[int, int], frame: Frame) -> Box:
        """Return the box around the objects with one of the names (or all) on an image of ``size`` after ``frame``.

        The image may be a smaller version of the annotated one, as in Imagenette.  A pixel is inside if its center is.
        A box that is completely cropped away is -1, -1, -1, -1.
        """
        boxes = [box for name, box in self.objects if names is None or name in names]
        if not boxes:
            present = ", ".join(sorted({name for name, _ in self.objects})) or "none"
            raise DataError(f"{self.source}: expected an object of the image's class, got {present}")
        hull = [pick(corners) for pick, corners in zip((min, min, max, max), zip(*boxes, strict=True), strict=True)]
        width, height = self.size or size
        if hull[2] < 0 or hull[3] < 0 or hull[0] >= width or hull[1] >= height:
            raise DataError(f"{self.source}: expected a box inside the image of {width}x{height} pixels, got {hull}")
        x1, x2 = _interval(hull[0], hull[2], frame.width / width, frame.left, frame.size[0])
        y1, y2 = _interval(hull[1], hull[3], frame.height / height, frame.top, frame.size[1])
        return (x1, y1, x2, y2) if x1 <= x2 and y1 <= y2 else UNKNOWN


def _interval(first: int, last: int, scale: float, offset: int, length: int) -> tuple[int, int]:
    """Return pixels ``first`` to ``last`` after scaling and cropping ``offset`` pixels at the start; may be empty."""
    start, end = round(first * scale), round((last + 1) * scale) - 1
    return max(start - offset, 0), min(max(start, end) - offset, length - 1)  # at least one pixel before cropping


@dataclass(frozen=True)
class VocFolder:
    """A folder of ``.xml`` files for the images below another folder."""

    path: Path
    images: Path
    names: tuple[str, ...] | None = None  # object name for each label; None to use all objects
    origin: int = 0  # coordinate of the first pixel

    def boxes(self, files: Sequence[str], labels: Tensor, resize: int, size: int) -> Tensor:
        """Return the boxes of images that ``decode`` resizes and crops; -1s for images without an annotation."""
        annotations = [self.find(Path(file)) for file in files]
        if not any(annotations):
            example = self._places(Path(files[0]))[0]
            raise DataError(f"{self.path}: expected annotations of {self.images} such as {example}, got none")
        boxes = [UNKNOWN] * len(files)
        for row, (file, path, label) in enumerate(zip(files, annotations, labels.tolist(), strict=True)):
            if path is not None:
                shape = image_size(Path(file))
                names = None if self.names is None else (self.names[label],)
                boxes[row] = read_voc(path, origin=self.origin).box(names, shape, frame(*shape, resize, size))
        return torch.tensor(boxes)

    def find(self, file: Path) -> Path | None:
        """Return the annotation file of an image, or None if there is none."""
        return next((self.path / place for place in self._places(file) if (self.path / place).is_file()), None)

    def _places(self, file: Path) -> tuple[Path, ...]:
        inside = file.relative_to(self.images).with_suffix(".xml")
        part = Path(self.images.name)
        return part / inside, part / inside.name, inside, Path(inside.name)


def read_voc(path: Path, *, origin: int = 0) -> Annotation:
    """Read an annotation; ``origin`` is the coordinate of the first pixel, 1 in Pascal VOC and 0 in ImageNet.

    >>> import tempfile
    >>> text = "<annotation><object><name>cat</name><bndbox><xmin>1</xmin><ymin>2</ymin><xmax>5</xmax><ymax>4</ymax>"
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "cat.xml")
    ...     _ = path.write_text(text + "</bndbox></object></annotation>")
    ...     read_voc(path).objects
    (('cat', (1, 2, 5, 4)),)
    """
    root = _parse(path)
    try:
        size = root.find("size")
        width, height = (0, 0) if size is None else (_number(size, "width"), _number(size, "height"))
        objects = tuple((_text(entry, "name"), _box(entry, origin)) for entry in root.iter("object"))
    except ValueError as error:
        raise DataError(
            f"{path}: expected objects with name and bndbox (xmin, ymin, xmax, ymax), got {error}"
        ) from None
    return Annotation(str(path), (width, height) if width > 0 and height > 0 else None, objects)


def _parse(path: Path) -> Element:
    """Parse an XML file; rejects a DOCTYPE, which could define exponentially expanding entities."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > _LARGEST:
        raise DataError(f"{path}: expected at most {_LARGEST} bytes, got more")

    def refuse(*_: object) -> None:
        raise DataError(f"{path}: expected plain XML, got a DOCTYPE, which is not supported")

    builder, parser = TreeBuilder(), expat.ParserCreate()
    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, ValueError, LookupError) as error:  # the latter two for unknown encodings
        raise DataError(f"{path}: expected XML, got: {error}") from None
    return builder.close()


def _text(element: Element, name: str) -> str:
    text = (element.findtext(name) or "").strip()
    if not text:
        raise ValueError(f"no {name}")
    return text


def _number(element: Element, name: str) -> int:
    try:
        return round(float(_text(element, name)))  # some tools write fractions
    except OverflowError:
        raise ValueError(f"an infinite {name}") from None


def _box(entry: Element, origin: int) -> Box:
    box = entry.find("bndbox")
    if box is None:
        raise ValueError("no bndbox")
    x1, y1, x2, y2 = (_number(box, name) - origin for name in ("xmin", "ymin", "xmax", "ymax"))
    if x1 > x2 or y1 > y2:
        raise ValueError(f"a box from {x1}, {y1} to {x2}, {y2}")
    return x1, y1, x2, y2
