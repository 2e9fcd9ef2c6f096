"""Cluttered canvases: where the object is, what lies around it, and what gives away the label."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.config import build_part
from atoll.data import (
    ClutteredCanvas,
    Data,
    Digits,
    HorizontalFlip,
    ImageFolder,
    MemorySplit,
    Splits,
    TwoMoons,
    boxes_of,
)
from atoll.data.base import in_memory
from atoll.data.boxes import mask
from atoll.data.canvas import _cut, _extent, _paste
from atoll.errors import AtollError, RecipeError
from atoll.runs.recipe import build_recipe
from data.fakes import fake_folder


@dataclass
class Plain(Data):
    """Whatever images a test needs, the same for training and testing."""

    images: Tensor
    boxes: Tensor | None = None
    number: int = 4

    def __post_init__(self) -> None:
        super().__init__(validation=0)

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.number)))

    def load(self) -> Splits:
        split = MemorySplit(self.images, torch.arange(len(self.images)) % self.number, self.boxes)
        return Splits(split, split)


def drawn(data: ClutteredCanvas, split: str = "test") -> Tensor:
    points = data.split(split)
    return points.fetch(torch.arange(len(points)))


@given(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2**20))
def test_cut_and_paste_are_slices(top: int, left: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    canvas = torch.randint(0, 9, (2, 3, 8, 7), generator=generator, dtype=torch.uint8)
    patches = torch.randint(0, 3, (2, 3, 5, 5), generator=generator, dtype=torch.uint8)
    at = (torch.tensor([top, 3 - top]), torch.tensor([left, 2 - left]))
    expected = canvas.clone()
    for number in range(2):
        for y in range(5):
            for x in range(5):
                if patches[number, :, y, x].any():
                    expected[number, :, at[0][number] + y, at[1][number] + x] = patches[number, :, y, x]
    _paste(canvas, patches, *at)
    assert torch.equal(canvas, expected)
    cut = _cut(canvas, *at, 5)
    assert torch.equal(cut[1], canvas[1, :, 3 - top : 8 - top, 2 - left : 7 - left])


@given(st.integers(0, 2**20))
def test_extent(seed: int) -> None:
    images = (torch.rand(1, 2, 6, 5, generator=torch.Generator().manual_seed(seed)) > 0.9).byte()
    (x1, y1, x2, y2), seen = _extent(images)[0].tolist(), images[0].any(0)
    if not seen.any():
        assert (x1, y1, x2, y2) == (0, 0, 4, 5)
        return
    assert seen[y1 : y2 + 1, x1 : x2 + 1].sum() == seen.sum()
    assert all(side.any() for side in (seen[y1], seen[y2], seen[:, x1], seen[:, x2]))


def test_the_box_is_around_the_object() -> None:
    bare = ClutteredCanvas(data=Digits(), size=20, clutter=0)
    canvases, boxes = drawn(bare), boxes_of(bare.test)
    assert boxes is not None
    assert torch.equal(boxes, _extent(canvases))
    # The object is the image, and places differ.
    assert torch.equal(canvases.flatten(1).sum(1), Digits().test.fetch(torch.arange(360)).flatten(1).sum(1))
    assert len({tuple(box) for box in (boxes[:, :2] // 4).tolist()}) > 4
    # Clutter changes nothing on the object itself.
    full = ClutteredCanvas(data=Digits(), size=20, clutter=20)
    assert torch.equal(boxes_of(full.test), boxes)  # type: ignore[arg-type]
    cluttered = drawn(full)
    assert torch.equal(cluttered[canvases > 0], canvases[canvases > 0])
    outside = ~mask(boxes, 20, 20)[:, None]
    assert (canvases[outside] == 0).all()
    assert (cluttered[outside] > 0).float().mean() > 0.05


def test_boxes_of_the_data_move_along() -> None:
    images = torch.full((40, 3, 6, 8), 200, dtype=torch.uint8)
    inner = torch.tensor([[1, 2, 4, 3], [-1, -1, -1, -1]] * 20)
    with_boxes, without = (ClutteredCanvas(data=Plain(images, boxes), size=12) for boxes in (inner, None))
    boxes, whole = boxes_of(with_boxes.test), boxes_of(without.test)
    assert boxes is not None
    assert whole is not None
    corner = torch.cat([whole[:, :2], whole[:, :2]], 1)
    assert torch.equal(whole - corner, torch.tensor([0, 0, 7, 5]).expand(40, 4))
    assert torch.equal(boxes[::2], inner[::2] + corner[::2])
    assert torch.equal(boxes[1::2], inner[1::2])


def test_fragments_are_of_other_images() -> None:
    """Every image is one color of its own, so each pixel of a canvas says where it is from."""
    colors = torch.arange(1, 31, dtype=torch.uint8)
    data = ClutteredCanvas(data=Plain(colors.view(-1, 1, 1, 1).expand(30, 1, 5, 4).contiguous()), size=16, fragment=3)
    canvases, boxes = drawn(data), boxes_of(data.test)
    assert boxes is not None
    inside = mask(boxes, 16, 16)[:, None]
    own = canvases == colors.view(-1, 1, 1, 1)
    assert torch.equal(own, inside)
    assert len(canvases[~inside].unique()) > 25  # and black


def test_splits_and_seeds_differ() -> None:
    data = ClutteredCanvas(data=Plain(torch.full((20, 1, 4, 4), 9, dtype=torch.uint8)), size=20, validation=0)
    other = ClutteredCanvas(data=data.data, size=20, validation=0, seed=1)
    for one, two in ((drawn(data, "train"), drawn(data, "test")), (drawn(data), drawn(other))):
        assert (one != two).flatten(1).any(1).float().mean() > 0.9
    assert torch.equal(drawn(data), drawn(ClutteredCanvas(data=data.data, size=20)))


def directions(canvases: Tensor, classes: int) -> Tensor:
    """The class whose waves are the strongest part of an image, by its Fourier transform."""
    size = canvases.shape[-1]
    place = torch.arange(size) * (2 * math.pi * 8 / size)
    angles = torch.arange(classes) * (math.pi / classes)
    waves = angles.cos()[:, None, None] * place + angles.sin()[:, None, None] * place[:, None]
    centered = canvases[:, 0].double() - canvases[:, 0].double().mean((1, 2), keepdim=True)
    power = torch.einsum("nyx,kyx->nk", centered.to(torch.complex128), torch.exp(1j * waves.double())).abs()
    return power.argmax(1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_textures_go_with_the_label_as_often_as_said(dtype: torch.dtype) -> None:
    empty = Plain(torch.zeros(2000, 1, 4, 4, dtype=dtype))  # black is transparent: only the texture is seen
    data = ClutteredCanvas(data=empty, size=24, spurious=0.6, spurious_test=0.0, validation=0)
    for split, own in (("train", 0.6), ("test", 0.0)):
        canvases = drawn(data, split)
        assert canvases.dtype == dtype
        assert canvases.double().max() <= (0.3 * 255 + 0.5 if dtype == torch.uint8 else 0.3 + 1e-6)
        share = (directions(canvases, 4) == data.split(split).labels).double().mean()
        expected = own + (1 - own) / 4
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / 2000)


def test_no_texture_unless_asked_for() -> None:
    empty = Plain(torch.zeros(10, 1, 4, 4, dtype=torch.uint8))
    assert not drawn(ClutteredCanvas(data=empty, size=8)).any()
    assert drawn(ClutteredCanvas(data=empty, size=8, spurious_test=1.0, validation=0), "train").any()


def test_streamed_images_stay_streamed(tmp_path: Path) -> None:
    data = ClutteredCanvas(data=ImageFolder(root=fake_folder(tmp_path), resize=8, size=8), size=16)
    assert data.shape == (3, 16, 16)
    assert not in_memory(data.test)
    assert in_memory(ClutteredCanvas(data=Digits(), size=16).train)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 7}, "size: expected at least 8 for 8x8 images, got 7"),
        ({"clutter": -1}, "clutter: expected at least 0, got -1"),
        ({"fragment": 0}, "fragment: expected at least 1, got 0"),
        ({"fragment": 9}, "fragment: expected at most 8, the image size, got 9"),
        ({"spurious": 1.5}, r"spurious: expected a number in \[0, 1\], got 1.5"),
        ({"spurious_test": -0.5}, r"spurious_test: expected a number in \[0, 1\], got -0.5"),
        ({"texture": 2.0}, r"texture: expected a number in \[0, 1\], got 2.0"),
        ({"data": Digits(limit=5)}, "data: limit, augment and extra are options of ClutteredCanvas"),
        ({"data": Digits(augment=[HorizontalFlip()])}, "data: limit, augment and extra"),
        ({"data": TwoMoons()}, r"data: expected images, got TwoMoons, whose inputs have shape \(2,\)"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(AtollError, match=message):
        _ = ClutteredCanvas(**({"data": Digits(), "size": 20} | options)).train


RECIPE = {
    "data": {"class_path": "ClutteredCanvas", "init_args": {"data": "Digits", "size": 20}},
    "model": "SmallConvNet",
}


class TestRecipe:
    def test_data_in_data(self) -> None:
        recipe = build_recipe(RECIPE, "data.limit=50", "data.clutter=3")
        assert repr(recipe.data) == "ClutteredCanvas(data=Digits(), size=20, clutter=3, limit=50)"
        # As a checkpoint has it: every default filled in, nothing of anybody else's imported.
        again = build_part(Data, recipe.tree["data"], "data", trust=False)
        assert repr(again) == repr(recipe.data)
        assert torch.equal(drawn(again), drawn(recipe.data))  # type: ignore[arg-type]

    def test_another_data_set_on_the_canvas(self, tmp_path: Path) -> None:
        changed = build_recipe(RECIPE, "data.data.class_path=Npz", f"data.data.path={tmp_path / 'x.npz'}")
        assert isinstance(changed.data, ClutteredCanvas)
        assert repr(changed.data.data) == f"Npz(path='{tmp_path / 'x.npz'}')"

    def test_faults_have_a_path(self) -> None:
        with pytest.raises(RecipeError, match=r"data.data.path: Npz needs this argument"):
            build_recipe(RECIPE, "data.data.class_path=Npz")
        with pytest.raises(RecipeError, match="data: limit, augment and extra are options of ClutteredCanvas"):
            build_recipe(RECIPE, "data.data.limit=5")
