"""Loading weights: against a transformer in numpy on the file's own layout, and all that can be wrong."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from scipy.special import erf
from torch import Tensor

from atoll.errors import CheckpointError
from atoll.models import Classifier, HybridViT, PreActResNet, ViT, load_pretrained
from atoll.models.pretrained import resize, resize_positions
from models.cases import MODELS, Case

Array = NDArray[np.float64]
Arrays = dict[str, Array]
WIDTH, HEADS, DEPTH, HIDDEN = 6, 2, 2, 12
TINY: dict[str, Any] = {"width": WIDTH, "heads": HEADS, "depth": DEPTH, "mlp_ratio": 2}
STEM: dict[str, Any] = {"stem_width": 32, "blocks": (2, 1), "strides": (2, 2, 2)}


def google_file(
    patch: int = 4, grid: tuple[int, int] = (2, 2), classes: int = 3, channels: int = 3, seed: int = 0
) -> Arrays:
    """A tiny ViT in Google's names and layout."""
    generator = np.random.default_rng(seed)

    def draw(*shape: int) -> Array:
        return generator.normal(size=shape) * 0.5

    head_width = WIDTH // HEADS
    file = {
        "cls": draw(1, 1, WIDTH),
        "embedding/kernel": draw(patch, patch, channels, WIDTH),
        "embedding/bias": draw(WIDTH),
        "Transformer/posembed_input/pos_embedding": draw(1, 1 + math.prod(grid), WIDTH),
        "Transformer/encoder_norm/scale": draw(WIDTH),
        "Transformer/encoder_norm/bias": draw(WIDTH),
        "head/kernel": draw(WIDTH, classes),
        "head/bias": draw(classes),
    }
    for i in range(DEPTH):
        block = f"Transformer/encoderblock_{i}"
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            file[f"{block}/{norm}/scale"], file[f"{block}/{norm}/bias"] = draw(WIDTH), draw(WIDTH)
        for part in ("query", "key", "value"):
            file[f"{block}/MultiHeadDotProductAttention_1/{part}/kernel"] = draw(WIDTH, HEADS, head_width)
            file[f"{block}/MultiHeadDotProductAttention_1/{part}/bias"] = draw(HEADS, head_width)
        file[f"{block}/MultiHeadDotProductAttention_1/out/kernel"] = draw(HEADS, head_width, WIDTH)
        file[f"{block}/MultiHeadDotProductAttention_1/out/bias"] = draw(WIDTH)
        file[f"{block}/MlpBlock_3/Dense_0/kernel"], file[f"{block}/MlpBlock_3/Dense_0/bias"] = (
            draw(WIDTH, HIDDEN),
            draw(HIDDEN),
        )
        file[f"{block}/MlpBlock_3/Dense_1/kernel"], file[f"{block}/MlpBlock_3/Dense_1/bias"] = (
            draw(HIDDEN, WIDTH),
            draw(WIDTH),
        )
    return file


def google_hybrid_file(grid: tuple[int, int] = (2, 2), seed: int = 1) -> Arrays:
    """The same with a ResNet of two stages (2 and 1 blocks) in front; group norms as (1, 1, 1, C)."""
    generator = np.random.default_rng(seed)
    file = google_file(patch=1, grid=grid, channels=256)

    def add(conv: str, norm: str, *shape: int) -> None:
        file[f"{conv}/kernel"] = generator.normal(size=shape)
        file[f"{norm}/scale"] = generator.normal(size=(1, 1, 1, shape[-1]))
        file[f"{norm}/bias"] = generator.normal(size=(1, 1, 1, shape[-1]))

    add("conv_root", "gn_root", 7, 7, 3, 32)
    for unit, into, inner in (("block1/unit1", 32, 32), ("block1/unit2", 128, 32), ("block2/unit1", 128, 64)):
        add(f"{unit}/conv1", f"{unit}/gn1", 1, 1, into, inner)
        add(f"{unit}/conv2", f"{unit}/gn2", 3, 3, inner, inner)
        add(f"{unit}/conv3", f"{unit}/gn3", 1, 1, inner, 4 * inner)
        if unit.endswith("unit1"):
            add(f"{unit}/conv_proj", f"{unit}/gn_proj", 1, 1, into, 4 * inner)
    return file


def layer_norm(x: Array, scale: Array, bias: Array) -> Array:
    centered = x - x.mean(-1, keepdims=True)
    result: Array = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6) * scale + bias
    return result


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    result: Array = powers / powers.sum(-1, keepdims=True)
    return result


def numpy_vit(file: Arrays, maps: Array) -> Array:
    """The logits of a ViT for maps (batch, height, width, channels), read off Google's layout."""
    kernel = file["embedding/kernel"]
    side = len(kernel)
    cells = [
        np.einsum("bhwc,hwcd->bd", maps[:, i : i + side, j : j + side], kernel)
        for i in range(0, maps.shape[1], side)
        for j in range(0, maps.shape[2], side)
    ]
    tokens = np.stack(cells, axis=1) + file["embedding/bias"]
    tokens = np.concatenate([np.repeat(file["cls"], len(maps), axis=0), tokens], axis=1)
    tokens = tokens + file["Transformer/posembed_input/pos_embedding"]
    for i in range(DEPTH):
        part = {k.removeprefix(f"Transformer/encoderblock_{i}/"): v for k, v in file.items()}
        x = layer_norm(tokens, part["LayerNorm_0/scale"], part["LayerNorm_0/bias"])
        attention = "MultiHeadDotProductAttention_1"
        q, k, v = (
            np.einsum("btd,dhe->bhte", x, part[f"{attention}/{name}/kernel"])
            + part[f"{attention}/{name}/bias"][None, :, None, :]
            for name in ("query", "key", "value")
        )
        weights = softmax(np.einsum("bhte,bhse->bhts", q, k) / math.sqrt(WIDTH // HEADS))
        mixed = np.einsum("bhts,bhse->bhte", weights, v)
        tokens = tokens + np.einsum("bhte,hed->btd", mixed, part[f"{attention}/out/kernel"])
        tokens = tokens + part[f"{attention}/out/bias"]
        x = layer_norm(tokens, part["LayerNorm_2/scale"], part["LayerNorm_2/bias"])
        x = x @ part["MlpBlock_3/Dense_0/kernel"] + part["MlpBlock_3/Dense_0/bias"]
        x = x * (1 + erf(x / math.sqrt(2))) / 2
        tokens = tokens + x @ part["MlpBlock_3/Dense_1/kernel"] + part["MlpBlock_3/Dense_1/bias"]
    norm = "Transformer/encoder_norm"
    token = layer_norm(tokens[:, 0], file[f"{norm}/scale"], file[f"{norm}/bias"])
    logits: Array = token @ file["head/kernel"] + file["head/bias"]
    return logits


def same_windows(x: Array, side: int, stride: int) -> Array:
    """Windows (batch, i, j, side, side, channels) of zero-padded maps, ceil(size / stride) each way."""
    counts = [-(-size // stride) for size in x.shape[1:3]]
    extra = [max(0, (n - 1) * stride + side - size) for n, size in zip(counts, x.shape[1:3], strict=True)]
    x = np.pad(x, [(0, 0), *((e // 2, e - e // 2) for e in extra), (0, 0)])
    rows = [
        np.stack([x[:, i * stride :, j * stride :][:, :side, :side] for j in range(counts[1])], axis=1)
        for i in range(counts[0])
    ]
    return np.stack(rows, axis=1)


def numpy_stem(file: Arrays, x: Array) -> Array:
    """The maps of the tiny hybrid's ResNet for images (batch, height, width, channels)."""

    def layer(x: Array, conv: str, norm: str, stride: int = 1) -> Array:
        kernel = file[f"{conv}/kernel"]
        kernel = (kernel - kernel.mean((0, 1, 2))) / (kernel.std((0, 1, 2)) + 1e-5)
        y = np.einsum("bijhwc,hwcd->bijd", same_windows(x, len(kernel), stride), kernel)
        grouped = y.reshape(*y.shape[:3], 32, -1)
        mean, var = (f(grouped, axis=(1, 2, 4), keepdims=True) for f in (np.mean, np.var))
        normed = ((grouped - mean) / np.sqrt(var + 1e-6)).reshape(y.shape)
        result: Array = normed * file[f"{norm}/scale"] + file[f"{norm}/bias"]
        return result

    def relu(x: Array) -> Array:
        return np.maximum(x, 0)

    x = relu(layer(x, "conv_root", "gn_root", stride=2))
    x = same_windows(x, 3, 2).max((3, 4))
    for unit, stride in (("block1/unit1", 1), ("block1/unit2", 1), ("block2/unit1", 2)):
        y = relu(layer(x, f"{unit}/conv1", f"{unit}/gn1"))
        y = relu(layer(y, f"{unit}/conv2", f"{unit}/gn2", stride))
        y = layer(y, f"{unit}/conv3", f"{unit}/gn3")
        if unit.endswith("unit1"):
            x = layer(x, f"{unit}/conv_proj", f"{unit}/gn_proj", stride)
        x = relu(x + y)
    return x


def write(path: Path, file: Arrays) -> Path:
    np.savez(path, **file)  # type: ignore[arg-type]
    return path


def snapshot(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model: torch.nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def timm_names(file: Arrays) -> dict[str, Tensor]:
    """Google's tiny ViT in timm's names and layout, written from timm's side."""
    t = {name: torch.from_numpy(array) for name, array in file.items()}
    out = {
        "cls_token": t["cls"],
        "pos_embed": t["Transformer/posembed_input/pos_embedding"],
        "patch_embed.proj.weight": t["embedding/kernel"].permute(3, 2, 0, 1),
        "patch_embed.proj.bias": t["embedding/bias"],
        "norm.weight": t["Transformer/encoder_norm/scale"],
        "norm.bias": t["Transformer/encoder_norm/bias"],
        "head.weight": t["head/kernel"].T,
        "head.bias": t["head/bias"],
    }
    for i in range(DEPTH):
        theirs, block = f"Transformer/encoderblock_{i}", f"blocks.{i}"
        attention = f"{theirs}/MultiHeadDotProductAttention_1"
        for n, norm in (("norm1", "LayerNorm_0"), ("norm2", "LayerNorm_2")):
            out[f"{block}.{n}.weight"] = t[f"{theirs}/{norm}/scale"]
            out[f"{block}.{n}.bias"] = t[f"{theirs}/{norm}/bias"]
        for n, dense in (("fc1", "Dense_0"), ("fc2", "Dense_1")):
            out[f"{block}.mlp.{n}.weight"] = t[f"{theirs}/MlpBlock_3/{dense}/kernel"].T
            out[f"{block}.mlp.{n}.bias"] = t[f"{theirs}/MlpBlock_3/{dense}/bias"]
        qkv = ("query", "key", "value")
        out[f"{block}.attn.qkv.weight"] = torch.cat([t[f"{attention}/{p}/kernel"].reshape(WIDTH, WIDTH).T for p in qkv])
        out[f"{block}.attn.qkv.bias"] = torch.cat([t[f"{attention}/{p}/bias"].reshape(WIDTH) for p in qkv])
        out[f"{block}.attn.proj.weight"] = t[f"{attention}/out/kernel"].reshape(WIDTH, WIDTH).T
        out[f"{block}.attn.proj.bias"] = t[f"{attention}/out/bias"]
    return {name: tensor.contiguous() for name, tensor in out.items()}


def tiny_vit(shape: tuple[int, int, int] = (3, 8, 8), classes: int = 3, **options: Any) -> ViT:
    return ViT(shape, classes, **{"patch_size": 4, **TINY, **options}).double().eval()


def tiny_hybrid(shape: tuple[int, int, int] = (3, 16, 16), classes: int = 3, **options: Any) -> HybridViT:
    return HybridViT(shape, classes, **{**TINY, **STEM, **options}).double().eval()


def images(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


# Right files


def test_google_file_gives_the_numpy_transformer(tmp_path: Path) -> None:
    file, model, x = google_file(), tiny_vit(), images(2, 3, 8, 8)
    assert load_pretrained(model, write(tmp_path / "vit.npz", file)) == []
    expected = numpy_vit(file, x.permute(0, 2, 3, 1).numpy())
    np.testing.assert_allclose(model(x).detach().numpy(), expected, rtol=1e-9)


def test_google_hybrid_file_gives_the_numpy_resnet_and_transformer(tmp_path: Path) -> None:
    file, model, x = google_hybrid_file(), tiny_hybrid(), images(2, 3, 16, 16)
    assert load_pretrained(model, write(tmp_path / "hybrid.npz", file)) == []
    maps = numpy_stem(file, x.permute(0, 2, 3, 1).numpy())
    assert maps.shape == (2, 2, 2, 256)
    np.testing.assert_allclose(model(x).detach().numpy(), numpy_vit(file, maps), rtol=1e-7)


def test_timm_file_gives_the_numpy_transformer(tmp_path: Path) -> None:
    file, model, x = google_file(), tiny_vit(), images(2, 3, 8, 8)
    save_file(timm_names(file), tmp_path / "vit.safetensors")
    assert load_pretrained(model, tmp_path / "vit.safetensors") == []
    expected = numpy_vit(file, x.permute(0, 2, 3, 1).numpy())
    np.testing.assert_allclose(model(x).detach().numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_own_files_load_into_any_model(case: Case, tmp_path: Path) -> None:
    saved, model, x = case.build(0).eval(), case.build(1).eval(), case.images()
    save_file(saved.state_dict(), tmp_path / "own.safetensors")
    assert load_pretrained(model, tmp_path / "own.safetensors") == []
    assert torch.equal(model(x), saved(x))


def test_half_precision_is_widened(tmp_path: Path) -> None:
    model = tiny_vit()
    save_file({k: v.half() for k, v in timm_names(google_file()).items()}, tmp_path / "vit.safetensors")
    assert load_pretrained(model, tmp_path / "vit.safetensors") == []
    assert model.body.patch.weight.dtype == torch.float64


# Files that are made to fit


def test_patches_and_positions_are_resized(tmp_path: Path) -> None:
    file = google_file(patch=16, grid=(14, 14))
    model = tiny_vit((3, 32, 32), patch_size=4, stride=2)
    assert load_pretrained(model, write(tmp_path / "vit.npz", file)) == [
        "body.patch.weight: resized from 16x16 to 4x4",
        "body.position: grid resized from 14x14 to 15x15",
    ]
    kernel = torch.from_numpy(file["embedding/kernel"]).permute(3, 2, 0, 1)
    torch.testing.assert_close(model.body.patch.weight.detach(), resize(kernel, (4, 4)).double())
    position = torch.from_numpy(file["Transformer/posembed_input/pos_embedding"])
    assert torch.equal(model.body.position.detach()[:, 0], position[:, 0])


def test_hybrid_root_is_resized_and_summed(tmp_path: Path) -> None:
    file = google_hybrid_file()
    model = tiny_hybrid((1, 16, 16), strides=(1, 1, 2), root_kernel=3)
    assert load_pretrained(model, write(tmp_path / "hybrid.npz", file)) == [
        "body.stem.root.weight: summed over the color channels",
        "body.stem.root.weight: resized from 7x7 to 3x3",
        "body.position: grid resized from 2x2 to 8x8",
    ]


def test_grey_images_give_what_equal_channels_give(tmp_path: Path) -> None:
    path = write(tmp_path / "vit.npz", google_file())
    color, gray, x = tiny_vit(), tiny_vit((1, 8, 8)), images(2, 1, 8, 8)
    load_pretrained(color, path)
    assert load_pretrained(gray, path) == ["body.patch.weight: summed over the color channels"]
    torch.testing.assert_close(gray(x), color(x.expand(-1, 3, -1, -1)))


@pytest.mark.parametrize("kind", ["google", "timm", "own"])
def test_a_head_for_other_classes_is_left_alone(kind: str, tmp_path: Path) -> None:
    file, model = google_file(classes=21), tiny_vit(classes=3)
    head = snapshot(model.head)
    if kind == "google":
        path = write(tmp_path / "vit.npz", file)
    else:
        path = tmp_path / "vit.safetensors"
        save_file(timm_names(file) if kind == "timm" else tiny_vit(classes=21).state_dict(), path)
    assert load_pretrained(model, path) == [
        "head.weight: not loaded (the file has 21 classes, the model 3)",
        "head.bias: not loaded (the file has 21 classes, the model 3)",
    ]
    assert unchanged(model.head, head)


def test_a_head_on_pre_logits_is_left_alone(tmp_path: Path) -> None:
    file, model = google_file(), tiny_vit()
    file |= {"pre_logits/kernel": np.zeros((WIDTH, WIDTH)), "pre_logits/bias": np.zeros(WIDTH)}
    head = snapshot(model.head)
    notes = load_pretrained(model, write(tmp_path / "vit.npz", file))
    assert [note.partition(" (")[0] for note in notes] == [
        "head.weight: not loaded",
        "head.bias: not loaded",
    ]
    assert "pre_logits" in notes[0]
    assert unchanged(model.head, head)


def test_a_file_without_head(tmp_path: Path) -> None:
    file = {name: array for name, array in google_file().items() if not name.startswith("head")}
    notes = load_pretrained(tiny_vit(), write(tmp_path / "vit.npz", file))
    assert notes == [f"head.{part}: not loaded (the file has none)" for part in ("weight", "bias")]


# Wrong files


def test_every_fault_is_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    file = google_file()
    del file["cls"], file["Transformer/encoderblock_1/LayerNorm_2/bias"]
    file["extra/kernel"] = np.zeros(3)
    file["Transformer/encoderblock_7/LayerNorm_0/scale"] = np.zeros(WIDTH)
    file["embedding/bias"] = np.zeros(WIDTH + 1)
    file["Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel"] = np.zeros(3)
    file["Transformer/encoder_norm/scale"][2] = np.nan
    model = tiny_vit()
    before = snapshot(model)
    with pytest.raises(CheckpointError) as error:
        load_pretrained(model, write(tmp_path / "vit.npz", file))
    message = str(error.value)
    assert message.startswith("vit.npz does not fit this ViT: ")
    assert message.removeprefix("vit.npz does not fit this ViT: ").split("; ") == [
        "missing: Transformer/encoderblock_1/LayerNorm_2/bias, cls",
        "unexpected: Transformer/encoderblock_7/LayerNorm_0/scale, extra/kernel",
        "wrong shape: Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel (3,)",
        "wrong shape: body.patch.bias, expected (6,), got (7,)",
        "not finite: body.norm.weight",
    ]
    assert unchanged(model, before)


# Tensor of timm's file, what takes its place (None: nothing), and what is said.
TIMM_FAULTS: list[tuple[str, Tensor | None, str]] = [
    ("cls_token", None, "missing: cls_token"),
    ("head.bias", None, "missing: head.bias"),
    ("blocks.1.attn.qkv.bias", None, "missing: blocks.1.attn.qkv.bias"),
    ("reg_token", torch.zeros(1, 4, WIDTH), "unexpected: reg_token"),
    ("pos_embed", torch.zeros(1, 4, WIDTH), "wrong shape: body.position"),
    ("pos_embed", torch.zeros(WIDTH), "wrong shape: body.position"),
    ("pos_embed", torch.zeros(1, 0, WIDTH), "wrong shape: body.position"),
    ("patch_embed.proj.weight", torch.zeros(WIDTH, 4, 4, 4), "wrong shape: body.patch.weight"),
    ("patch_embed.proj.weight", torch.zeros(WIDTH, 48), "wrong shape: body.patch.weight"),
    ("head.weight", torch.zeros(3, WIDTH + 1), "wrong shape: head.weight"),
    ("head.weight", torch.zeros(5, WIDTH), "wrong shape: head.weight"),
    ("norm.bias", torch.full((WIDTH,), math.inf), "not finite: body.norm.bias"),
]


@pytest.mark.parametrize(("name", "tensor", "message"), TIMM_FAULTS)
def test_one_fault(name: str, tensor: Tensor | None, message: str, tmp_path: Path) -> None:
    file, model = timm_names(google_file()), tiny_vit()
    file.pop(name, None)
    if tensor is not None:
        file[name] = tensor
    save_file(file, tmp_path / "vit.safetensors")
    before = snapshot(model)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_pretrained(model, tmp_path / "vit.safetensors")
    assert unchanged(model, before)


@pytest.mark.parametrize(
    ("model", "kind"),
    [(PreActResNet((3, 8, 8), 3, width=2), "PreActResNet"), (ViT((3, 8, 8), 3, patch_size=4, **TINY), "ViT")],
)
def test_own_files_of_another_model(model: Classifier, kind: str, tmp_path: Path) -> None:
    save_file({"body.other": torch.zeros(2)}, tmp_path / "own.safetensors")
    with pytest.raises(CheckpointError, match=rf"fit this {kind}: missing: body\..*; unexpected: body\.other"):
        load_pretrained(model, tmp_path / "own.safetensors")


def test_published_weights_need_a_transformer(tmp_path: Path) -> None:
    path = write(tmp_path / "vit.npz", google_file())
    with pytest.raises(CheckpointError, match="expected a ViT or HybridViT, got PreActResNet"):
        load_pretrained(PreActResNet((3, 8, 8), 3, width=2), path)
    with pytest.raises(CheckpointError, match=r"missing: .*conv_root/kernel"):
        load_pretrained(tiny_hybrid(), path)


@pytest.mark.parametrize("ending", ["pt", "pth", "bin"])
def test_pickles_are_refused_unread(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"weights.{ending}"
    torch.save({}, path)
    with pytest.raises(CheckpointError, match="convert it to safetensors"):
        load_pretrained(tiny_vit(), path)


def test_pickles_inside_npz_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "vit.npz", cls=np.array([{"a": 1}], dtype=object))
    with pytest.raises(CheckpointError, match=r"vit\.npz cannot be read"):
        load_pretrained(tiny_vit(), tmp_path / "vit.npz")


@pytest.mark.parametrize("name", ["vit.npz", "vit.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not weights", b"PK\x03\x04 cut off"])
def test_broken_files(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_pretrained(tiny_vit(), tmp_path / name)


@pytest.mark.parametrize("name", ["vit.npz", "vit.safetensors"])
def test_truncated_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.endswith("npz"):
        write(path, google_file())
    else:
        save_file(timm_names(google_file()), path)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_pretrained(tiny_vit(), path)


def test_missing_and_unknown_files(tmp_path: Path) -> None:
    for name in ("vit.npz", "vit.safetensors"):
        with pytest.raises(CheckpointError, match="no such file"):
            load_pretrained(tiny_vit(), tmp_path / name)
    with pytest.raises(CheckpointError, match=r"expected a \.safetensors or \.npz file"):
        load_pretrained(tiny_vit(), tmp_path / "vit.h5")


# Resizing

sides = st.integers(1, 20)


@settings(max_examples=50, deadline=None)
@given(side=sides, rows=sides, columns=sides)
def test_resizing_keeps_constants_and_the_class_token(side: int, rows: int, columns: int) -> None:
    position = torch.full((1, 1 + side**2, 3), 2.5)
    position[:, 0] = -1
    resized = resize_positions(position, (rows, columns))
    assert resized.shape == (1, 1 + rows * columns, 3)
    assert torch.equal(resized[:, 0], position[:, 0])
    torch.testing.assert_close(resized[:, 1:], torch.full((1, rows * columns, 3), 2.5))


@settings(max_examples=20, deadline=None)
@given(side=sides, seed=st.integers(0, 100))
def test_resizing_to_the_same_size_is_the_identity(side: int, seed: int) -> None:
    position = torch.randn(1, 1 + side**2, 3, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(resize_positions(position, (side, side)), position)


def test_resizing_keeps_rows_and_columns_apart() -> None:
    """A ramp along the rows stays one: the grid is not transposed, and smooth functions are kept."""
    ramp = torch.linspace(0, 1, 14).view(14, 1).expand(14, 14)
    position = torch.cat([torch.zeros(1, 1, 1), ramp.reshape(1, 196, 1)], dim=1)
    grid = resize_positions(position, (28, 28))[0, 1:, 0].view(28, 28)
    torch.testing.assert_close(grid, grid[:, :1].expand(28, 28))
    assert (grid[:, 0].diff() > 0).all()


@pytest.mark.parametrize("size", [(4, 4), (3, 7), (20, 31)])
def test_resizing_is_pillows_bicubic(size: tuple[int, int]) -> None:
    kernel = torch.randn(1, 1, 16, 16, generator=torch.Generator().manual_seed(6))
    image = Image.fromarray(kernel[0, 0].numpy()).resize((size[1], size[0]), Image.Resampling.BICUBIC)
    torch.testing.assert_close(resize(kernel, size)[0, 0], torch.from_numpy(np.array(image)), rtol=1e-4, atol=1e-5)
