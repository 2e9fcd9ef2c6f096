"""Augmentations against loops, against Pillow, and independent of the rest of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

from atoll.data import Augmentation, Brightness, Cutout, Elastic, HorizontalFlip, RandAugment, RandomAffine, RandomCrop
from atoll.data import randaugment as ops
from atoll.data.augment import affine
from atoll.errors import InputError
from atoll.rng import PointRNG

AUGMENTATIONS = [
    RandomCrop(padding=4),
    RandomCrop(padding=0),
    HorizontalFlip(),
    Brightness(strength=0.3),
    Cutout(size=5),
    RandomAffine(),
    RandomAffine(degrees=60, scale=0.5),
    Elastic(),
    Elastic(strength=3.0, nodes=2),
    RandAugment(),
    RandAugment(num_ops=3, magnitude=30),
]


def images(count: int, channels: int = 3, height: int = 16, width: int = 12, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, channels, height, width), generator=draw).float() / 255


def streams(count: int, *names: object) -> PointRNG:
    return PointRNG("test", *names, index=torch.arange(count))


@pytest.mark.parametrize("augmentation", AUGMENTATIONS, ids=repr)
class TestAll:
    @settings(max_examples=15, deadline=None)
    @given(rows=st.lists(st.integers(0, 23), min_size=1, max_size=8), channels=st.sampled_from([1, 3, 4]))
    def test_does_not_depend_on_the_rest_of_the_batch(
        self, augmentation: Augmentation, rows: list[int], channels: int
    ) -> None:
        x = images(24, channels)
        whole = augmentation(x, streams(24))
        index = torch.tensor(rows)
        part = augmentation(x[index], PointRNG("test", index=index))
        assert torch.equal(part, whole[index])

    def test_keeps_shape_range_type_and_its_input(self, augmentation: Augmentation) -> None:
        for dtype in (torch.float32, torch.float64):
            x = images(50).to(dtype)
            before = x.clone()
            result = augmentation(x, streams(50))
            assert result.shape == x.shape
            assert result.dtype == dtype
            assert result.min() >= 0
            assert result.max() <= 1
            assert torch.equal(x, before)

    def test_other_memory_layouts(self, augmentation: Augmentation) -> None:
        x = images(10)
        expected = augmentation(x, streams(10))
        assert torch.equal(augmentation(x.to(memory_format=torch.channels_last), streams(10)), expected)
        assert torch.equal(augmentation(x.repeat_interleave(2, 0)[::2], streams(10)), expected)

    def test_no_images(self, augmentation: Augmentation) -> None:
        assert augmentation(images(0), streams(0)).shape == (0, 3, 16, 12)

    def test_refuses_what_is_no_image(self, augmentation: Augmentation) -> None:
        with pytest.raises(InputError, match=r"expected float images \(batch, C, H, W\)"):
            augmentation(torch.zeros(4, 2), streams(4))
        with pytest.raises(InputError, match=r"got torch.uint8"):
            augmentation(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), streams(4))

    def test_repr_makes_it_again(self, augmentation: Augmentation) -> None:
        assert eval(repr(augmentation)) == augmentation


@pytest.mark.parametrize("padding", [1, 4, 20])
def test_crop_is_a_window_of_the_padded_image(padding: int) -> None:
    x = images(100)
    result = RandomCrop(padding=padding)(x, streams(100))
    place = streams(100).integers((2 * padding + 1) ** 2).tolist()
    for image, cropped, number in zip(x, result, place, strict=True):
        padded = np.pad(image.numpy(), [(0, 0), (padding, padding), (padding, padding)])
        top, left = divmod(number, 2 * padding + 1)
        assert np.array_equal(cropped.numpy(), padded[:, top : top + 16, left : left + 12])


def test_crop_reaches_every_place() -> None:
    x = torch.zeros(2000, 1, 5, 5)
    x[:, :, 2, 2] = 1
    at = RandomCrop(padding=1)(x, streams(2000)).flatten(1).argmax(1)
    counts = torch.bincount(at, minlength=25)
    expected = torch.zeros(5, 5, dtype=torch.bool)
    expected[1:4, 1:4] = True
    assert torch.equal(counts > 0, expected.flatten())
    assert counts[counts > 0].min() > 150  # 222 on average


def test_flip_is_all_or_nothing() -> None:
    x = images(1000)
    result = HorizontalFlip(p=0.25)(x, streams(1000))
    flipped = (result == x.flip(3)).flatten(1).all(1)
    assert torch.equal(result[~flipped], x[~flipped])
    assert 0.2 < flipped.float().mean() < 0.3


def test_brightness_adds_one_number() -> None:
    x = images(500) / 2 + 0.25
    shift = (Brightness(strength=0.25)(x, streams(500)) - x).flatten(1)
    assert (shift.amax(1) - shift.amin(1)).max() < 1e-6
    assert -0.25 <= shift.min() < -0.24
    assert 0.24 < shift.max() <= 0.25


@pytest.mark.parametrize("size", [1, 4, 5, 40])
def test_cutout_is_a_square(size: int) -> None:
    x = images(60)
    result = Cutout(size=size, fill=0.3)(x, streams(60))
    for image, cut, number in zip(x, result, streams(60).integers(16 * 12).tolist(), strict=True):
        row, column = divmod(number, 12)
        expected = image.clone()
        top, left = row - size // 2, column - size // 2
        expected[:, max(top, 0) : max(top + size, 0), max(left, 0) : max(left + size, 0)] = 0.3
        assert torch.equal(cut, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomCrop(padding=-1),
        lambda: HorizontalFlip(p=1.5),
        lambda: Brightness(strength=-1),
        lambda: Cutout(size=0),
        lambda: Cutout(size=1, fill=2),
        lambda: RandomAffine(degrees=-1),
        lambda: RandomAffine(scale=1),
        lambda: Elastic(strength=-1),
        lambda: Elastic(nodes=1),
        lambda: RandAugment(num_ops=-1),
        lambda: RandAugment(magnitude=31),
    ],
)
def test_bad_arguments(make: object) -> None:
    with pytest.raises(InputError, match="expected"):
        make()  # type: ignore[operator]


def to_pil(x: Tensor) -> Image.Image:
    levels = (x * 255).round().byte().numpy()
    return Image.fromarray(levels[0]) if len(levels) == 1 else Image.fromarray(levels.transpose(1, 2, 0))


def from_pil(image: Image.Image) -> Tensor:
    levels = np.array(image)
    return torch.from_numpy(levels[None] if levels.ndim == 2 else levels.transpose(2, 0, 1).copy()).float()


AGAINST_PILLOW = {
    "autocontrast": (ops.autocontrast, ImageOps.autocontrast),
    "equalize": (ops.equalize, ImageOps.equalize),
    **{
        f"solarize-{t}": (lambda x, t=t: ops.solarize(x, t / 255), lambda i, t=t: ImageOps.solarize(i, t))
        for t in (0, 1, 100, 178, 255)
    },
    **{
        f"posterize-{b}": (lambda x, b=b: ops.posterize(x, b), lambda i, b=b: ImageOps.posterize(i, b))
        for b in (1, 4, 7, 8)
    },
    **{
        f"{name}-{f}": (
            lambda x, f=f, ours=ours: ours(x, torch.full((len(x),), f)),
            lambda i, f=f, theirs=theirs: theirs(i).enhance(f),
        )
        for f in (0.1, 0.73, 1.0, 1.27, 1.9)
        for name, ours, theirs in (
            ("color", ops.color, ImageEnhance.Color),
            ("contrast", ops.contrast, ImageEnhance.Contrast),
            ("brightness", ops.brightness, ImageEnhance.Brightness),
            ("sharpness", ops.sharpness, ImageEnhance.Sharpness),
        )
    },
}
EXACT = ("equalize", "solarize", "posterize")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", AGAINST_PILLOW)
def test_like_pillow(name: str, channels: int) -> None:
    ours, theirs = AGAINST_PILLOW[name]
    smooth = torch.linspace(0.2, 0.8, 32 * 32).view(1, 1, 32, 32).expand(1, channels, 32, 32)
    x = torch.cat(
        [
            images(4, channels, 32, 32),
            images(2, channels, 32, 32) * 0.3 + 0.5,  # little contrast
            (images(2, channels, 32, 32) > 0.5).float(),  # two levels
            torch.full((1, channels, 32, 32), 0.4),  # one level
            smooth,
        ]
    )
    x = (x * 255).round() / 255
    result = ours(x) * 255
    for image, got in zip(x, result, strict=True):
        expected = from_pil(theirs(to_pil(image)))
        # Pillow cuts fractions off after each step where we keep them.
        tolerance = 1e-3 if name.startswith(EXACT) else 2.0 if name.startswith("sharpness") else 1.01
        assert (got - expected).abs().max() <= tolerance


def test_solarize_and_posterize_on_all_levels() -> None:
    ramp = (torch.arange(256.0) / 255).view(1, 1, 16, 16)
    for threshold in range(257):
        expected = from_pil(ImageOps.solarize(to_pil(ramp[0]), threshold))
        assert torch.equal((ops.solarize(ramp, threshold / 255)[0] * 255).round(), expected)


def test_sharpness_smooths_as_pillow_does() -> None:
    x = images(1, 1, 9, 7)
    smooth = from_pil(to_pil(x[0]).filter(ImageFilter.SMOOTH))
    assert (ops.sharpness(x, torch.zeros(1))[0] * 255 - smooth).abs().max() <= 0.51
    tiny = images(2, 1, 2, 2)
    assert torch.equal(ops.sharpness(tiny, torch.zeros(2)), tiny)


@pytest.mark.parametrize(
    "matrix",
    [
        [[math.cos(0.2), -math.sin(0.2), 0], [math.sin(0.2), math.cos(0.2), 0]],
        [[1, 0.3, 0], [0, 1, 0]],
        [[1, 0, 0], [-0.2, 1, 0]],
        [[1, 0, 3.5], [0, 1, -2]],
    ],
)
def test_affine_like_pillow(matrix: list[list[float]]) -> None:
    height, width = 20, 30
    x = images(1, 3, height, width)
    (a, b, c), (d, e, f) = matrix
    # Pillow counts from the corner of the first pixel, we from the center of the image.
    middle_x, middle_y = width / 2, height / 2
    coefficients = (
        a,
        b,
        c + middle_x - a * middle_x - b * middle_y,
        d,
        e,
        f + middle_y - d * middle_x - e * middle_y,
    )
    method = Image.Transform.AFFINE
    gray = (127, 127, 127)
    pillow = to_pil(x[0]).transform((width, height), method, coefficients, Image.Resampling.BILINEAR, fillcolor=gray)
    ours = affine(x, torch.tensor([matrix]), fill=127 / 255)[0] * 255
    # Within a pixel of the border the two blend with the outside differently.
    inside = affine(torch.ones_like(x), torch.tensor([matrix]), fill=0.0)[0] == 1
    assert inside.float().mean() > 0.5
    assert (ours - from_pil(pillow)).abs()[inside].max() <= 1.01


def test_random_affine_turns_and_scales_as_it_says() -> None:
    """Where a bright spot ends up: as far from the center, within the scale, and turned by no more than the angle."""
    x = torch.zeros(400, 1, 41, 41)
    x[:, :, 18:23, 32:37] = 1.0  # 14 pixels to the right of the center
    moved = RandomAffine(degrees=20, scale=0.1)(x, streams(400))
    place = torch.arange(41.0) - 20
    weight = moved.sum((1, 2, 3))
    right, down = (moved.sum((1, 2)) * place).sum(1) / weight, (moved.sum((1, 3)) * place).sum(1) / weight
    angle, distance = torch.rad2deg(torch.atan2(down, right)), torch.hypot(right, down)
    assert 19 < angle.max() < 20.5
    assert -20.5 < angle.min() < -19
    assert 14 / 1.1 - 0.3 < distance.min() < 14 / 1.1 + 0.2
    assert 14 / 0.9 - 0.2 < distance.max() < 14 / 0.9 + 0.3
    assert abs(angle.mean()) < 2


def test_elastic_moves_as_far_as_it_says() -> None:
    """Where a spot in the middle of a large image ends up; nodes are there, so displacements are theirs."""
    x = torch.zeros(2000, 1, 41, 41)
    x[:, :, 19:22, 19:22] = 1.0
    moved = Elastic(strength=0.5, nodes=5)(x, streams(2000))  # a node in the middle, ten pixels to the next
    place = torch.arange(41.0) - 20
    weight = moved.sum((1, 2, 3))
    right = (moved.sum((1, 2)) * place).sum(1) / weight
    assert 0.45 < right.std() < 0.53
    assert right.mean().abs() < 0.05
    assert torch.equal(Elastic(strength=0.0)(x[:2], streams(2)).round(decimals=4), x[:2])


def test_affine_identity_and_shift() -> None:
    x = images(2)
    eye = torch.tensor([[[1.0, 0, 0], [0, 1, 0]]] * 2)
    assert torch.allclose(affine(x, eye), x, atol=1e-5)
    eye[:, 0, 2] = 3
    moved = affine(x, eye, fill=0.25)
    assert torch.allclose(moved[..., :-3], x[..., 3:], atol=1e-5)
    assert torch.allclose(moved[..., -3:], torch.tensor(0.25), atol=1e-5)


def at_half_strength(name: str, x: Tensor, sign: int) -> Tensor:
    """Magnitude 15 of 30, written out, on one image of 24 x 24."""
    cos, sin, shift = math.cos(math.radians(15)), sign * math.sin(math.radians(15)), sign * 75 / 331 * 24
    matrices = {
        "rotate": [[cos, -sin, 0], [sin, cos, 0]],
        "shear_x": [[1, sign * 0.15, 0], [0, 1, 0]],
        "shear_y": [[1, 0, 0], [sign * 0.15, 1, 0]],
        "translate_x": [[1, 0, shift], [0, 1, 0]],
        "translate_y": [[1, 0, 0], [0, 1, shift]],
    }
    if name in matrices:
        return affine(x, torch.tensor([matrices[name]]))
    if name in ("autocontrast", "equalize"):
        return getattr(ops, name)(x)
    if name in ("color", "contrast", "brightness", "sharpness"):
        return getattr(ops, name)(x, torch.tensor([1 + sign * 0.45]))
    return {"identity": x, "solarize": ops.solarize(x, 0.5), "posterize": ops.posterize(x, 6)}[name]


class TestRandAugment:
    def test_every_operation_is_drawn(self) -> None:
        assert len(ops.OPERATIONS) == 14
        drawn = streams(2000).integers(28, 1).flatten()
        assert torch.bincount(drawn, minlength=28).min() > 30

    def test_each_image_gets_what_it_drew(self) -> None:
        x = images(300, 3, 24, 24)
        result = RandAugment(num_ops=1, magnitude=15)(x, streams(300))
        drawn = streams(300).integers(28, 1).flatten().tolist()
        for image, got, number in zip(x, result, drawn, strict=True):
            name, sign = ops.OPERATIONS[number // 2], number % 2 * 2 - 1
            assert torch.allclose(got, at_half_strength(name, image[None], sign)[0], atol=1e-5), name

    def test_no_strength_changes_little(self) -> None:
        x = images(200)
        result = RandAugment(num_ops=1, magnitude=0)(x, streams(200))
        drawn = streams(200).integers(28, 1).flatten() // 2
        changing = [ops.OPERATIONS.index(name) for name in ("autocontrast", "equalize", "solarize")]
        calm = ~torch.isin(drawn, torch.tensor(changing))
        assert torch.allclose(result[calm], x[calm], atol=1e-5)
        assert torch.equal(RandAugment(num_ops=0)(x, streams(200)), x)
