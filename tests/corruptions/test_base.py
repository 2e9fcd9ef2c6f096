"""All corruptions: range, rounding, seeds, batches, severities, sizes and names."""

import pytest
import torch
from sklearn.datasets import load_sample_image

from atoll.corruptions import COMMON, CORRUPTIONS, SEVERITIES, Contrast, corrupt
from atoll.corruptions import base as corruptions_base
from atoll.errors import InputError

NAMES = [name for names in COMMON.values() for name in names]
DETERMINISTIC = {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"}
# In the benchmark itself, the mean squared distance to these photographs does not increase with every severity.
NOT_MONOTONE = {32: {"pixelate"}, 64: {"defocus_blur"}}
MINE = '''
from atoll.corruptions import Corruption

class Darker(Corruption):
    """Multiplies all values."""

    def apply(self, x, severity, streams):
        return x * (1 - 0.1 * severity) - 0.5 * streams.uniform(1, 1, 1, dtype=x.dtype) / 255
'''


def photos(side=32, count=4):
    """Parts of a photograph with 3 channels."""
    whole = torch.from_numpy(load_sample_image("china.jpg").copy()).movedim(2, 0)
    return torch.stack([whole[:, 40 : 40 + side, 90 * k : 90 * k + side] for k in range(1, count + 1)]) / 255


def test_the_benchmark_is_what_is_registered():
    assert sorted(NAMES) == list(CORRUPTIONS.members())
    assert len(NAMES) == 15
    for member in CORRUPTIONS.members().values():
        assert [len(table) for table in (member.cls.small, member.cls.medium, member.cls.large)] == [5, 5, 5]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 13), (3, 50, 64)])
def test_shape_range_levels_seeds_and_batches(name, shape):
    x = torch.rand(5, *shape)
    whole = corrupt(x, name, 4, seed=3)
    assert (whole.shape, whole.dtype) == (x.shape, x.dtype)
    assert whole.min() >= 0
    assert whole.max() <= 1
    levels = (255 * whole).round().to(torch.uint8)
    assert torch.equal(levels.float() / 255, whole)  # as images from files
    assert not torch.equal(whole, x)
    index = torch.arange(5)
    parts = [corrupt(x[rows], name, 4, seed=3, index=rows) for rows in (index[3:], index[:1], index[1:3])]
    assert torch.equal(torch.cat([parts[1], parts[2], parts[0]]), whole)
    assert torch.equal(corrupt(x, name, 4, seed=4), whole) == (name in DETERMINISTIC)
    assert torch.equal(corrupt(x, CORRUPTIONS.resolve(name).cls(), 4, seed=3), whole)
    same = corrupt(x[:1].expand_as(x), name, 4)  # every point has random numbers of its own
    assert torch.equal(same[0], same[1]) == (name in DETERMINISTIC)


@pytest.mark.parametrize("name", NAMES)
def test_large_images_in_small_parts(name, monkeypatch):
    x = photos(130, 2)
    whole = corrupt(x, name, 1)
    monkeypatch.setattr(corruptions_base, "CHUNK", 1)
    assert torch.equal(corrupt(x, name, 1), whole)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", [32, 64])
def test_severity_increases_distortion(name, side):
    x = photos(side)
    distances = [(corrupt(x, name, severity) - x).square().mean().item() for severity in SEVERITIES]
    assert 0 < distances[0] < 0.05
    # The others draw a few numbers for a whole image, so the order of two severities can be luck.
    if name in DETERMINISTIC.union(COMMON["noise"]) - NOT_MONOTONE[side]:
        assert distances == sorted(distances)
    # Elastic transforms get finer, not larger.  Frost replaces more of the image, but these photographs are as bright
    # as the frost, so the distance does not show it; see test_frost_adds_a_share_of_the_texture.
    if name not in ("elastic_transform", "frost"):
        assert distances[0] < distances[4]


@pytest.mark.parametrize(
    ("shape", "factors"),
    [
        ((47, 200), (0.75, 0.5, 0.4, 0.3, 0.15)),
        ((200, 48), (0.4, 0.3, 0.2, 0.1, 0.05)),
        ((128, 128), (0.4, 0.3, 0.2, 0.1, 0.05)),
    ],
)
def test_the_shorter_side_selects_the_table(shape, factors):
    x = torch.zeros(1, 1, *shape)
    x[..., ::2] = 1
    mean = x.mean().item()
    for severity, factor in zip(SEVERITIES, factors, strict=True):
        expected = {int(255 * (mean + factor * (value - mean)) + 1e-4) for value in (0, 1)}
        assert set((255 * corrupt(x, "contrast", severity)).round().unique().tolist()) == expected


@pytest.mark.parametrize(("side", "noise"), [(47, 0.10), (48, 0.18), (127, 0.18), (128, 0.38)])
def test_the_three_tables_differ(side, noise):
    assert CORRUPTIONS.resolve("gaussian_noise").cls().parameters(torch.zeros(1, 1, side, 300), 5) == noise


def test_inputs_are_rounded_and_results_rounded_down(monkeypatch):
    class Same(Contrast):
        """Adds a part of a gray level."""

        def apply(self, x, severity, streams):
            return x + 0.9 / 255 * (severity - 1)

    levels = torch.arange(256.0).view(1, 1, 16, 16)
    for dtype in (torch.float32, torch.float64):
        x = (levels.to(dtype) + 0.4).clamp(max=255) / 255
        assert torch.equal(corrupt(x, Same(), 1), levels.to(dtype) / 255)
        assert torch.equal(corrupt(x, Same(), 2), levels.to(dtype) / 255)
    assert torch.equal(corrupt(levels / 255, Same(), 3), (levels + 1).clamp(max=255) / 255)


def test_a_corruption_in_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    x = torch.full((2, 1, 8, 8), 200 / 255)
    result = corrupt(x, f"{tmp_path / 'mine.py'}:Darker", 5)
    assert torch.equal((255 * result).round(), torch.full_like(x, 99))


def test_no_images_and_the_global_generator():
    state = torch.get_rng_state()
    assert corrupt(torch.zeros(0, 3, 32, 32), "snow", 2).shape == (0, 3, 32, 32)
    corrupt(torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)), "snow", 2)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("x", "name", "severity", "sentence"),
    [
        (torch.zeros(2, 2), "fog", 1, r"images \(1 or 3, H, W\) of at least 8 x 8 pixels, got inputs of shape \(2,\)"),
        (torch.zeros(2, 3, 7, 8), "fog", 1, r"got inputs of shape \(3, 7, 8\)"),
        (torch.zeros(2, 4, 8, 8), "fog", 1, r"got inputs of shape \(4, 8, 8\)"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "fog", 1, "floating-point numbers in"),
        (torch.full((2, 3, 8, 8), 1.1), "fog", 1, "floating-point numbers in"),
        (torch.full((2, 3, 8, 8), torch.nan), "fog", 1, "floating-point numbers in"),
        (torch.zeros(2, 3, 8, 8), "fog", 0, "severity: expected"),
        (torch.zeros(2, 3, 8, 8), "fog", 6, "severity: expected"),
        (torch.zeros(2, 3, 8, 8), "frog", 1, "did you mean fog or frost"),
    ],
)
def test_errors_are_one_sentence(x, name, severity, sentence):
    with pytest.raises(InputError, match=sentence):
        corrupt(x, name, severity)
