"""Weather against closed forms, symmetries and loops."""

import colorsys

import pytest
import torch

from atoll.corruptions import corrupt
from atoll.corruptions.weather import fractal, ice
from atoll.rng import PointRNG


def streams(count=1):
    return PointRNG("weather", index=torch.arange(count))


@pytest.mark.parametrize("severity", [1, 5])
def test_brightness_is_that_of_hsv(severity):
    x = torch.randint(0, 256, (1, 3, 8, 8)) / 255
    x[..., 0, 0] = 0  # black has no hue
    result = (255 * corrupt(x, "brightness", severity)).round()
    for row in range(8):
        for column in range(8):
            hue, saturation, value = colorsys.rgb_to_hsv(*x[0, :, row, column].double().tolist())
            value = min(1, value + (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1])
            expected = [int(255 * part + 1e-4) for part in colorsys.hsv_to_rgb(hue, saturation, value)]
            assert result[0, :, row, column].tolist() == pytest.approx(expected, abs=1)


def test_gray_images_are_bright_as_gray_colors():
    x = torch.randint(0, 256, (1, 1, 8, 8)) / 255
    for name in ("brightness", "contrast", "fog", "snow"):
        gray, colored = corrupt(x, name, 3), corrupt(x.expand(1, 3, 8, 8), name, 3)
        assert (colored - gray).abs().max() < 1.01 / 255  # the luma weights of red, green and blue are rounded


def test_a_fractal_against_a_loop():
    """Diamond-square on a periodic grid, point by point, with the same random numbers."""
    side, decay = 8, 1.7
    result = fractal(torch.zeros(1, 1, side, side, dtype=torch.float64), decay, streams())
    draw, heights = streams(), torch.zeros(side, side, dtype=torch.float64)
    step, size = side, 1.0
    while step > 1:
        half, cells = step // 2, range(0, side, step)
        starts = [[(y + half, x + half) for y in cells for x in cells]]  # squares, then diamonds
        starts += [[(y, x + half) for y in cells for x in cells], [(y + half, x) for y in cells for x in cells]]
        diagonal, straight = [(-half, -half), (-half, half), (half, -half), (half, half)], [(-half, 0), (half, 0)]
        straight += [(0, -half), (0, half)]
        for number, places in enumerate(starts):
            noise = draw.uniform(len(cells), len(cells), dtype=torch.float64).flatten()
            for (y, x), uniform in zip(places, noise, strict=True):
                near = [heights[(y + dy) % side, (x + dx) % side] for dy, dx in (straight if number else diagonal)]
                heights[y, x] = sum(near) / 4 + size * (2 * uniform - 1)
        step, size = half, size / decay**2
    heights = (heights - heights.min()) / (heights.max() - heights.min())
    assert torch.allclose(result[0, 0], heights, atol=1e-12)


def test_fog_on_a_constant_image():
    """The lightest fog does not change it; the darkest place is where the fractal is 0."""
    value = 102 / 255
    x = torch.full((3, 3, 32, 32), value)
    for severity, strength in ((1, 0.2), (5, 1.5)):
        result = 255 * corrupt(x, "fog", severity)
        assert result.amax((1, 2, 3)).round().tolist() == [102] * 3
        darkest = int(255 * value * value / (value + strength) + 1e-4)
        assert result.amin((1, 2, 3)).round().tolist() == [darkest] * 3


def test_snow_falls_on_both_halves_alike():
    """Flakes are added together with the same ones rotated by 180 degrees; between them the image is whitened."""
    x = torch.full((4, 1, 32, 32), 51 / 255)
    result = (255 * corrupt(x, "snow", 1)).round()
    assert torch.equal(result, result.flip(2, 3))
    background = int(255 * (0.95 * 0.2 + 0.05 * (1.5 * 0.2 + 0.5)) + 1e-4)
    assert result.min().item() == background
    assert result.max() > background + 10


def test_ice_is_like_photographs_of_frost():
    """Mean, spread and color of the photographs, measured once; see ``Frost``."""
    for side in (32, 64):
        texture = ice(torch.zeros(100, 3, side, side, dtype=torch.float64), streams(100))
        gray = texture.mean(1)
        assert gray.mean().item() == pytest.approx(0.635, abs=0.05)
        assert gray.mean((1, 2)).std().item() == pytest.approx(0.15, abs=0.03)
        assert gray.flatten(1).std(1).mean().item() == pytest.approx(0.09, abs=0.02)
        red, green, blue = texture.mean((0, 2, 3)).tolist()
        assert red < green < blue


@pytest.mark.parametrize(
    ("severity", "image", "texture"), [(1, 1, 0.2), (2, 1, 0.3), (3, 0.9, 0.4), (4, 0.85, 0.4), (5, 0.75, 0.45)]
)
def test_frost_adds_a_share_of_the_texture(severity, image, texture):
    """On black only the texture is left; on gray, a share of the gray is added to the same texture."""
    black, gray = torch.zeros(20, 3, 32, 32), torch.full((20, 3, 32, 32), 40 / 255)
    layers = [255 * corrupt(x, "frost", severity) for x in (black, gray)]
    assert layers[0].max() <= texture * 255
    assert layers[0].mean().item() / 255 == pytest.approx(0.635 * texture, abs=0.1 * texture)
    assert ((layers[1] - layers[0]).round() - 40 * image).abs().max() <= 1
