"""Blur against loops over pixels, SciPy and hand-computed kernels."""

import math

import numpy as np
import pytest
import torch
from scipy import ndimage

from atoll.corruptions import corrupt
from atoll.corruptions.blur import copy_sources, disk, motion_blur, zoom


def reflect(place, side):
    """An index mirrored at the centers of the border pixels."""
    period = 2 * side - 2
    place = abs(place) % period
    return min(place, period - place)


@pytest.mark.parametrize("radius", [0.3, 1.5, 3, 10])
def test_a_disk_is_round_and_has_sum_one(radius):
    kernel = disk(radius, 0.01)  # too narrow to smooth anything
    center = len(kernel) // 2
    inside = [
        (y, x)
        for y in range(len(kernel))
        for x in range(len(kernel))
        if (y - center) ** 2 + (x - center) ** 2 <= radius**2
    ]
    assert kernel.sum() == pytest.approx(1)
    assert all(kernel[place] == pytest.approx(1 / len(inside)) for place in inside)
    assert np.count_nonzero(kernel) == len(inside)
    smooth = disk(radius, 0.5)
    assert np.allclose(smooth, smooth.T)
    assert np.count_nonzero(smooth) > len(inside)


def test_defocus_blur_of_a_pixel_is_the_kernel():
    """At severity 3 of small images: a single pixel, smoothed by a Gaussian of 3 x 3 pixels."""
    x = torch.zeros(1, 1, 9, 9)
    x[..., 4, 4] = 1
    side = math.exp(-1 / (2 * 0.6**2))
    taps = np.array([side, 1, side]) / (1 + 2 * side)
    expected = np.floor(255 * np.outer(taps, taps))
    assert ((255 * corrupt(x, "defocus_blur", 3)[0, 0, 3:6, 3:6]).round().numpy() == expected).all()


def test_defocus_blur_mirrors_the_border():
    x = torch.randint(0, 256, (1, 1, 8, 8)) / 255
    kernel, half = disk(1.5, 0.1), 8
    result = (255 * corrupt(x, "defocus_blur", 5)).round()
    for row, column in ((0, 0), (3, 4), (7, 2)):
        total = sum(
            kernel[half + dy, half + dx] * 255 * x[0, 0, reflect(row + dy, 8), reflect(column + dx, 8)].item()
            for dy in range(-2, 3)
            for dx in range(-2, 3)
        )
        assert result[0, 0, row, column].item() == pytest.approx(math.floor(total + 1e-4), abs=1e-3)


@pytest.mark.parametrize(("reach", "height", "width"), [(1, 8, 8), (2, 9, 12), (4, 16, 11)])
def test_copies_in_turn(reach, height, width):
    """Against the loop that the benchmark describes: bottom right to top left, each pixel copies one nearby."""
    offsets = torch.randint(-reach, reach, (3, 2, height - 2 * reach, width - 2 * reach))
    sources = copy_sources(offsets, reach, height, width)
    for image in range(3):
        values = torch.arange(height * width).view(height, width).clone()
        for row in range(height - reach, reach, -1):
            for column in range(width - reach, reach, -1):
                down, right = offsets[image, :, row - reach - 1, column - reach - 1].tolist()
                values[row, column] = values[row + down, column + right].item()
        assert torch.equal(sources[image].view(height, width), values)


def test_glass_blur_moves_pixels_by_one_at_most_and_leaves_the_border():
    """At severity 1 of small images, the Gaussian is too narrow to change anything."""
    x = torch.randint(0, 256, (1, 1, 12, 12)) / 255
    result = corrupt(x, "glass_blur", 1)
    assert torch.equal(result[..., :2, :], x[..., :2, :])
    assert torch.equal(result[..., :2], x[..., :2])
    assert not torch.equal(result, x)
    assert set(result.unique().tolist()) <= set(x.unique().tolist())


@pytest.mark.parametrize(
    ("angle", "right", "down"),
    [
        (0.0, (0, 1, 2), (0, 0, 0)),
        (90.0, (0, 0, 0), (0, 1, 2)),
        (-45.0, (0, 1, 1), (0, -1, -1)),
        (30.0, (0, 1, 2), (0, 0, 1)),
    ],
)
def test_motion_blur_of_a_pixel(angle, right, down):
    """The light of a pixel goes to those that look in its direction: against the offsets, with half a Gaussian."""
    x = torch.zeros(1, 1, 9, 9, dtype=torch.float64)
    x[..., 4, 4] = 1
    weights = [math.exp(-(k**2) / 2) for k in range(3)]
    expected = torch.zeros(9, 9, dtype=torch.float64)
    for k in range(3):
        expected[4 - down[k], 4 - right[k]] += weights[k] / sum(weights)
    result = 255 * motion_blur(x, 1, 1.0, torch.tensor([angle]))[0, 0]
    assert torch.equal(result.round(), (255 * expected + 1 / 514).floor())


def test_motion_blur_repeats_the_border():
    x = torch.full((2, 3, 8, 8), 77 / 255, dtype=torch.float64)
    assert torch.equal(motion_blur(x, 6, 2.0, torch.tensor([10.0, -120.0])), x)


@pytest.mark.parametrize("factor", [1, 1.01, 1.24, 2.5, 4.5])
@pytest.mark.parametrize("side", [8, 31, 64])
def test_zoom_against_scipy(factor, side):
    x = torch.rand(2, 1, side, side, dtype=torch.float64)
    part = math.ceil(side / factor)
    top = (side - part) // 2
    for image, result in zip(x[:, 0].numpy(), zoom(x, factor)[:, 0].numpy(), strict=True):
        large = ndimage.zoom(image[top : top + part, top : top + part], factor, order=1)
        trim = (len(large) - side) // 2
        assert np.allclose(result, large[trim : trim + side, trim : trim + side])


def test_zoom_blur_averages_the_image_and_its_zooms():
    x = torch.rand(1, 3, 32, 32, dtype=torch.float64).mul(255).round() / 255
    zooms = [zoom(x, 1 + k / 100) for k in range(7)]  # 1 to 1.06
    expected = (255 * sum([x, *zooms]) / 8 + 1e-4).floor()
    assert torch.equal((255 * corrupt(x, "zoom_blur", 1)).round(), expected)
