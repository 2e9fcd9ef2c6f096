"""Pascal-VOC boxes: against pictures drawn and scaled by Pillow, and files that are wrong or made to do harm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from atoll.data import ImageFolder, boxes_of
from atoll.data.decode import decode, frame
from atoll.data.voc import Annotation, read_voc
from atoll.errors import DataError
from data.fakes import fake_folder, voc


def annotated(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "x.xml"
    path.write_bytes(content)
    return path


def white(width: int, height: int, columns: slice, path: Path, resize: int, size: int) -> list[int]:
    """The columns that are white in a scaled and cut image of a white band on black.

    A scaled edge has half its height where the edge is; a corner would have a quarter, so this looks at bands.
    """
    pixels = np.zeros((height, width), np.uint8)
    pixels[:, columns] = 255
    Image.fromarray(pixels).save(path)
    columns: list[int] = (decode(path, "x", resize=resize, size=size)[0, 0] >= 128).nonzero().flatten().tolist()
    return columns


@given(st.data())
def test_boxes_follow_the_pixels(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    width, height = (data.draw(st.integers(20, 60)) for _ in range(2))
    first = data.draw(st.integers(0, width - 12))
    last = data.draw(st.integers(first + 9, width - 1))
    resize = data.draw(st.integers(12, 80))
    size = data.draw(st.integers(resize // 2, resize))
    to = frame(width, height, resize, size)
    edges = np.array([first, last + 1]) * to.width / width
    assume((np.abs(edges % 1 - 0.5) > 0.02).all())  # exactly half is rounded either way
    path = tmp_path_factory.mktemp("drawn") / "x.png"
    expected = white(width, height, slice(first, last + 1), path, resize, size)
    across = Annotation("x", None, (("a", (first, 0, last, height - 1)),)).box(None, (width, height), to)
    down = Annotation("x", None, (("a", (0, first, height - 1, last)),)).box(
        None, (height, width), frame(height, width, resize, size)
    )
    if expected:
        assert across == (expected[0], 0, expected[-1], size - 1)
        assert down == (0, expected[0], size - 1, expected[-1])
    else:
        assert across == down == (-1, -1, -1, -1)


def test_a_smaller_version_of_the_annotated_image(tmp_path: Path) -> None:
    read = read_voc(annotated(tmp_path, voc(("a", (100, 40, 299, 119)), size=(400, 200))))
    assert read.box(None, (40, 20), frame(40, 20, None, None)) == (10, 4, 29, 11)


def test_a_box_that_is_cut_away(tmp_path: Path) -> None:
    read = read_voc(annotated(tmp_path, voc(("a", (0, 0, 9, 19)), size=(80, 20))))
    assert read.box(None, (80, 20), frame(80, 20, 20, 20)) == (-1, -1, -1, -1)
    # One column is left.
    read = read_voc(annotated(tmp_path, voc(("a", (0, 0, 30, 19)), size=(80, 20))))
    assert read.box(None, (80, 20), frame(80, 20, 20, 20)) == (0, 0, 0, 19)


def test_no_thinner_than_a_pixel(tmp_path: Path) -> None:
    read = read_voc(annotated(tmp_path, voc(("a", (10, 10, 11, 11)), size=(200, 200))))
    assert read.box(None, (200, 200), frame(200, 200, 10, 10)) == (0, 0, 0, 0)


def test_several_objects_have_the_box_around_them(tmp_path: Path) -> None:
    content = voc(("a", (1, 2, 3, 4)), ("b", (0, 0, 9, 9)), ("a", (5, 1, 6, 3)))
    read = read_voc(annotated(tmp_path, content))
    whole = frame(10, 10, None, None)
    assert read.box(("a",), (10, 10), whole) == (1, 1, 6, 4)
    assert read.box(None, (10, 10), whole) == (0, 0, 9, 9)
    with pytest.raises(DataError, match=r"x.xml: expected an object of the image's class, got a, b"):
        read.box(("c",), (10, 10), whole)


def test_the_first_pixel(tmp_path: Path) -> None:
    path = annotated(tmp_path, voc(("a", (1, 1, 10, 10)), size=(10, 10)))
    assert read_voc(path, origin=1).box(None, (10, 10), frame(10, 10, None, None)) == (0, 0, 9, 9)
    # ImageNet counts from 0, and a box may end one pixel too late.
    assert read_voc(path).box(None, (10, 10), frame(10, 10, None, None)) == (1, 1, 9, 9)


BOMB = b"""<!DOCTYPE a [<!ENTITY b "ha"><!ENTITY c "&b;&b;&b;&b;">]><annotation>&c;</annotation>"""
OUTSIDE = b"""<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><annotation>&b;</annotation>"""
BOX = voc(("a", (1, 2, 3, 4)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BOMB, "expected plain XML, got a DOCTYPE, which is not supported"),
        (OUTSIDE, "expected plain XML, got a DOCTYPE"),
        (b"<!DOCTYPE annotation>" + BOX, "expected plain XML, got a DOCTYPE"),
        (b"", "expected XML, got: no element found"),
        (BOX[:-10], "expected XML, got"),
        (b"\xff\xd8 a photograph", "expected XML, got"),
        (b'<?xml version="1.0" encoding="klingon"?>' + BOX, "expected XML, got"),
        (BOX.replace(b"<xmin>1</xmin>", b""), r"name and bndbox \(xmin, ymin, xmax, ymax\), got no xmin"),
        (BOX.replace(b"<name>a</name>", b"<name> </name>"), "got no name"),
        (BOX.replace(b"bndbox", b"box"), "got no bndbox"),
        (BOX.replace(b">1<", b">one<"), "could not convert string to float: 'one'"),
        (BOX.replace(b">1<", b">nan<"), "cannot convert float NaN"),
        (BOX.replace(b">1<", b">1e999<"), "got an infinite xmin"),
        (BOX.replace(b">1<", b">4<"), "got a box from 4, 2 to 3, 4"),
        (b" " * (1 << 20) + BOX, "expected at most 1048576 bytes, got more"),
    ],
)
def test_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_voc(annotated(tmp_path, content))


def test_missing_and_off_the_image(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.xml: cannot be read: No such file"):
        read_voc(tmp_path / "none.xml")
    read = read_voc(annotated(tmp_path, voc(("a", (50, 0, 60, 9)))))
    with pytest.raises(DataError, match=r"expected a box inside the image of 40x20 pixels, got \[50, 0, 60, 9\]"):
        read.box(None, (40, 20), frame(40, 20, None, None))


class TestImageFolder:
    """Sizes are those of ``fake_folder``: image i of each class has 20 + i times 30 - i pixels."""

    def folder(self, tmp_path: Path, files: dict[str, bytes]) -> ImageFolder:
        for name, content in files.items():
            path = tmp_path / "boxes" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return ImageFolder(
            root=fake_folder(tmp_path / "images"), boxes=tmp_path / "boxes", resize=20, size=20, validation=0.2
        )

    @pytest.mark.parametrize("place", ["val/bee/1.xml", "val/1.xml", "bee/1.xml", "1.xml"])
    def test_places(self, tmp_path: Path, place: str) -> None:
        data = self.folder(tmp_path, {place: voc(("bee", (3, 14, 7, 18)), ("ant", (3, 14, 7, 18)), size=(21, 29))})
        boxes = boxes_of(data.test)
        assert boxes is not None
        # 21 x 29 becomes 20 x 27, of which rows 4 to 23 stay.
        assert boxes[4].tolist() == [3, 9, 7, 13]
        shared = place in ("val/1.xml", "1.xml")
        assert (boxes >= 0).all(1).tolist() == [False, shared, False, False, True, False]

    def test_rows_keep_their_boxes(self, tmp_path: Path) -> None:
        files = {f"train/ant/{i}.xml": voc(("ant", (0, 0, i, 29 - i)), size=(20 + i, 30 - i)) for i in range(10)}
        data = self.folder(tmp_path, files)
        whole, validation = boxes_of(data._splits.train), boxes_of(data.validation)
        assert whole is not None
        assert validation is not None
        assert validation.tolist() == whole[data._rows[1]].tolist()
        assert len(set(map(tuple, validation.tolist()))) > 1

    def test_nothing_there(self, tmp_path: Path) -> None:
        data = self.folder(tmp_path, {"train/ant/1.xml": voc(("ant", (0, 0, 3, 3)))})
        with pytest.raises(DataError, match=r"boxes: expected annotations of .*val such as val/ant/0.xml, got none"):
            boxes_of(data.test)
        plain = ImageFolder(root=tmp_path / "images")
        assert boxes_of(plain.test) is None

    def test_another_class(self, tmp_path: Path) -> None:
        data = self.folder(tmp_path, {"val/ant/1.xml": voc(("wasp", (0, 0, 3, 3)))})
        with pytest.raises(DataError, match=r"val/ant/1.xml: expected an object of the image's class, got wasp"):
            boxes_of(data.test)
