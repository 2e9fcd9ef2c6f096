"""What every model owes the rest of the library, over one table of models."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp

import atoll.models
from atoll import config
from atoll.errors import InputError
from atoll.models import (
    MLP,
    VGG,
    CentroidNet,
    Classifier,
    ConvNet4C3F,
    ConvNet6C2F,
    HybridViT,
    LiResNet,
    MobileNetV2,
    OrthogonalNet,
    PreActResNet,
    SmallConvNet,
    Timm,
    ViT,
    WideResNet,
)
from atoll.models.activations import ACTIVATIONS, Activation
from atoll.models.base import INPUT_RANGES, InputRange
from models.cases import MODELS, TINY_VIT, Case

every_model = pytest.mark.parametrize("case", MODELS, ids=str)


def shaken(case: Case, dtype: torch.dtype = torch.float64) -> Classifier:
    """The model in float64, away from the zeros and ones that layers start at."""
    model = case.build().to(dtype)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class Tempered(MLP):
    """Trained through features and head, it would lose its temperature."""

    def forward(self, x):
        return super().forward(x) / 5


def test_a_forward_of_its_own_is_refused():
    with pytest.raises(InputError, match=r"Tempered: a Classifier must not override forward"):
        Tempered((2,), 3)


def test_every_exported_model_is_in_the_table() -> None:
    exported = {getattr(atoll.models, name) for name in atoll.models.__all__}
    classes = {e for e in exported if inspect.isclass(e) and issubclass(e, Classifier)} - {Classifier, Timm}
    assert classes == {case.model for case in MODELS}


@every_model
def test_shapes_and_composition(case: Case) -> None:
    model, x = case.build().eval(), case.images()
    features = model.features(x)
    assert features.dim() == 2
    if isinstance(model, CentroidNet):
        assert features.shape[1] == model.head.centroids.shape[2]
    else:
        assert isinstance(model.head, nn.Linear)
        assert features.shape[1] == model.head.in_features
    logits = model(x)
    assert logits.shape == (3, 3)
    assert torch.equal(logits, model.head(features))
    assert logits.std() > 0


@every_model
def test_options_are_keywords_with_defaults(case: Case) -> None:
    parameters = list(inspect.signature(case.model).parameters.values())
    assert [p.name for p in parameters[:2]] == ["input_shape", "num_classes"]
    for parameter in parameters[2:]:
        assert parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    options = list(config.parameters(case.model).items())[2:]  # with those of the base classes
    assert {"input_range", "bounds"} <= dict(options).keys()
    assert all(option["default"] != "required" for _, option in options)


@pytest.mark.parametrize("case", [case for case in MODELS if "encoder" not in case.options], ids=str)
def test_options_can_be_given_in_yaml(case: Case) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(case.model, "model", skip={"input_shape", "num_classes"})
    # As it would be read from a file: lists, not tuples.
    options = vars(parser.parse_object({"model": json.loads(json.dumps(case.options))}).model)
    assert case.model(case.input_shape, 3, **options)(case.images()).shape == (3, 3)


@pytest.mark.slow  # tests/graph/test_capture.py captures a net of every kind of layer for any batch
@pytest.mark.parametrize("case", {case.model: case for case in MODELS}.values(), ids=str)
def test_graph_can_be_exported_for_any_batch(case: Case) -> None:
    """Control flow depends on neither the data nor the size of the batch."""
    model, batch = case.build().eval(), torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(model, (case.images(2),), dynamic_shapes=({0: batch},)).module()
    x = case.images(5)
    torch.testing.assert_close(exported(x), model(x))


@every_model
@pytest.mark.parametrize("training", [True, False])
def test_gradient_reaches_input_and_all_parameters(case: Case, training: bool) -> None:
    model = shaken(case).train(training)
    x = case.images(batch=8).double().requires_grad_()
    torch.manual_seed(0)
    model(x).logsumexp(1).sum().backward()
    assert x.grad is not None
    assert x.grad.flatten(1).norm(dim=1).min() > 0
    untouched = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert untouched == []


def input_gradient(model: Classifier, x: Tensor) -> Tensor:
    def loss(point: Tensor) -> Tensor:
        torch.manual_seed(0)  # the same dropout every time
        output: Tensor = functional_call(model, {k: b.clone() for k, b in model.named_buffers()}, (point,))
        return (output**2).sum()

    return grad(loss)(x)


@every_model
@pytest.mark.parametrize("training", [True, False])
def test_double_backward_agrees_with_forward_over_reverse(case: Case, training: bool) -> None:
    model, x = shaken(case).train(training), case.images(batch=4).double().requires_grad_()
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
    torch.manual_seed(0)
    (gradient,) = torch.autograd.grad((model(x) ** 2).sum(), x, create_graph=True)
    (product,) = torch.autograd.grad((gradient * direction).sum(), x)
    _, forward = jvp(lambda point: input_gradient(model, point), (x.detach(),), (direction,))
    torch.testing.assert_close(product, forward, rtol=1e-6, atol=1e-8 * forward.abs().max().item())


@every_model
def test_second_derivatives_agree_with_differences_of_gradients(case: Case) -> None:
    model, x = shaken(case).eval(), case.images(batch=4).double()
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
    _, product = jvp(lambda point: input_gradient(model, point), (x,), (direction,))
    step = 1e-8 * direction  # so small that hardly a ReLU flips in between
    difference = (input_gradient(model, x + step) - input_gradient(model, x - step)) / 2e-8
    torch.testing.assert_close(product, difference, rtol=1e-3, atol=1e-4 * difference.abs().max().item() + 1e-7)


@every_model
@pytest.mark.parametrize("training", [True, False])
def test_forward_mode_agrees_with_reverse_mode(case: Case, training: bool) -> None:
    """``<u, J v>`` by torch.func.jvp through functional_call equals ``<J^T u, v>`` by backward."""
    model, x = shaken(case).train(training), case.images(batch=4).double()
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    generator = torch.Generator().manual_seed(4)
    tangents = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in parameters.items()}
    u = torch.randn(4, 3, generator=generator, dtype=torch.float64)

    def logits(p: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(0)
        output: Tensor = functional_call(model, (p, {k: b.clone() for k, b in buffers.items()}), (x,))
        return output

    _, forward = jvp(logits, (parameters,), (tangents,))
    gradients = torch.autograd.grad((logits(parameters) * u).sum(), list(parameters.values()))
    reverse = sum(
        ((g * t).sum() for g, t in zip(gradients, tangents.values(), strict=True)),
        torch.zeros((), dtype=u.dtype),
    )
    torch.testing.assert_close((forward * u).sum(), reverse, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("case", [case for case in MODELS if case.model is not CentroidNet], ids=str)
def test_hessian_of_the_head_by_torch_func(case: Case) -> None:
    """jacfwd over jacrev works, and the logits are linear in the head."""
    model, x = shaken(case).eval(), case.images(batch=2).double()
    rest = {name: p.detach() for name, p in model.named_parameters() if name != "head.bias"}

    def loss(bias: Tensor) -> Tensor:
        output: Tensor = functional_call(model, {**rest, "head.bias": bias}, (x,))
        return (output**2).sum()

    curvature = hessian(loss)(model.get_parameter("head.bias").detach())
    torch.testing.assert_close(curvature, 2 * len(x) * torch.eye(3, dtype=x.dtype))


@every_model
def test_eval_is_deterministic_and_leaves_no_trace(case: Case) -> None:
    model, x = case.build().eval(), case.images()
    before = state(model)
    first = model(x)
    assert torch.equal(first, model(x))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@every_model
def test_eval_treats_every_image_by_itself(case: Case) -> None:
    model, x = shaken(case).eval(), case.images(batch=5).double()
    together = model(x)
    apart = torch.cat([model(image[None]) for image in x])
    torch.testing.assert_close(together, apart)
    torch.testing.assert_close(together.flip(0), model(x.flip(0)))


@every_model
def test_same_seed_same_model(case: Case) -> None:
    first, again, other = state(case.build(0)), state(case.build(0)), state(case.build(1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@every_model
def test_weights_survive_safetensors(case: Case, tmp_path: Path) -> None:
    model, other, x = case.build(0).eval(), case.build(1).eval(), case.images()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(model(x), other(x))


@every_model
def test_normalization_is_inside(case: Case) -> None:
    """The ``[-1,1]`` model on x is the ``[0,1]`` model on 2 x - 1."""
    plain = Case(case.name, case.model, case.input_shape, {**case.options, "input_range": "[0,1]"}).build().eval()
    signed = Case(case.name, case.model, case.input_shape, {**case.options, "input_range": "[-1,1]"}).build().eval()
    x = case.images()
    torch.testing.assert_close(signed(x), plain(2 * x - 1))


@every_model
@pytest.mark.parametrize("shape", [(), (3, 0, 8), (-1, 8, 8)])
def test_bad_shapes_are_refused(case: Case, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="expected"):
        case.model(shape, 3, **case.options)


@pytest.mark.parametrize("case", [case for case in MODELS if len(case.input_shape) == 3], ids=str)
@pytest.mark.parametrize("shape", [(8, 8), (64,), (1, 3, 8, 8)])
def test_image_models_refuse_what_is_no_image(case: Case, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"\(channels, height, width\)"):
        case.model(shape, 3, **case.options)


BAD_OPTIONS: list[tuple[type[Classifier], tuple[int, ...], dict[str, Any], str]] = [
    (
        SmallConvNet,
        (1, 8, 8),
        {"activation": "tanh"},
        "activation: expected one of relu, gelu, softplus, minmax, groupsort, householder, got 'tanh'",
    ),
    (SmallConvNet, (1, 8, 8), {"widths": (4, 0)}, "at least 1"),
    (SmallConvNet, (1, 8, 8), {"hidden": 0}, "at least 1"),
    (SmallConvNet, (1, 3, 8), {}, "at least 4"),
    (
        SmallConvNet,
        (1, 8, 8),
        {"activation": "minmax", "widths": (4, 5)},
        "activation: minmax requires widths divisible by 2, got 4, 5, 64",
    ),
    (LiResNet, (3, 6, 8), {}, "at least 7"),
    (LiResNet, (3, 8, 8), {"width": 7}, "divisible by 2"),
    (LiResNet, (3, 8, 8), {"depth": 0}, "depth"),
    (LiResNet, (3, 8, 8), {"width": 4, "features": 7}, "divisible by 2"),
    (LiResNet, (3, 8, 8), {"initialization": "zero"}, "initialization: expected one of default, orthogonal, published"),
    (LiResNet, (3, 8, 8), {"block": "dense"}, "block: expected one of linear, conventional, plain"),
    (
        LiResNet,
        (3, 8, 8),
        {"width": 6, "activation": "groupsort"},
        "groupsort requires widths divisible by 4, got 6",
    ),
    (
        MLP,
        (2,),
        {"hidden": (4, 3), "activation": "householder"},
        "householder requires widths divisible by 2, got 4, 3",
    ),
    (OrthogonalNet, (3, 7, 8), {"stages": 3}, "at least 8"),
    (OrthogonalNet, (3, 8, 8), {"width": 7}, "divisible by 2"),
    (OrthogonalNet, (3, 8, 8), {"features": 0}, "features"),
    (OrthogonalNet, (3, 8, 8), {"stages": 0}, "stages"),
    (OrthogonalNet, (3, 8, 8), {"depth": -1}, "depth"),
    (PreActResNet, (3, 7, 8), {}, "at least 8"),
    (PreActResNet, (3, 8, 8), {"depth": 50}, "depth: expected one of 18, 34"),
    (PreActResNet, (3, 8, 8), {"width": 0}, "width"),
    (WideResNet, (3, 8, 8), {"depth": 30}, r"6 n \+ 4"),
    (WideResNet, (3, 8, 8), {"depth": 4}, r"6 n \+ 4"),
    (WideResNet, (3, 8, 8), {"depth": 10, "dropout": 1.0}, "dropout"),
    (VGG, (3, 8, 8), {"depth": 12}, "depth"),
    (MobileNetV2, (3, 8, 8), {"width_multiplier": 0.0}, "width_multiplier"),
    (MobileNetV2, (3, 8, 8), {"width_multiplier": float("nan")}, "width_multiplier"),
    (ViT, (3, 8, 8), {}, "at least 16"),
    (ViT, (3, 33, 32), {}, "do not reach the edge"),
    (ViT, (3, 32, 32), {"patch_size": 4, "stride": 3}, "do not reach the edge"),
    (ViT, (3, 32, 32), {"patch_size": 0}, "patch_size"),
    (ViT, (3, 32, 32), {"variant": "XL"}, "variant: expected one of Ti, S, B, L"),
    (ViT, (3, 32, 32), {"width": 10, "heads": 3}, "divisor"),
    (ViT, (3, 32, 32), {"depth": 0}, "depth"),
    (ViT, (3, 32, 32), {"depth": 1, "dropout": -0.1}, "dropout"),
    (HybridViT, (3, 32, 32), {"stem_width": 48}, "multiple of 32"),
    (HybridViT, (3, 32, 32), {"strides": (2, 2, 2)}, "strides"),
    (HybridViT, (3, 32, 32), {"blocks": (3, 0, 9)}, "blocks"),
    (HybridViT, (3, 32, 32), {"blocks": (), "strides": (1,)}, "blocks"),
    (HybridViT, (3, 32, 32), {"root_kernel": 1}, "root_kernel"),
    (SmallConvNet, (1, 8, 8), {"input_range": "[0,255]"}, "input_range: expected one of"),
]


@pytest.mark.parametrize(("model", "shape", "options", "message"), BAD_OPTIONS)
def test_bad_options_are_refused(
    model: type[Classifier], shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with torch.device("meta"), pytest.raises(InputError, match=message):
        model(shape, 3, **options)


@every_model
def test_one_class_is_refused(case: Case) -> None:
    with pytest.raises(InputError, match="num_classes"):
        case.model(case.input_shape, 1, **case.options)


def test_tables_and_literals_list_the_same() -> None:
    assert set(get_args(Activation)) == set(ACTIVATIONS)
    assert set(get_args(InputRange)) == set(INPUT_RANGES)


# Published counts: PreAct ResNet-18 11.17 M; WRN-34-10 46.16 M, WRN-28-10 36.48 M; ViT as timm counts them,
# and R50+ViT-B/16 at 384 as its vit_base_r50_s16_384.  VGG16 is the usual 14,728,266 less the 4,224 biases
# that batch normalization makes redundant.  The others (4C3F, 6C2F, PreAct-34, MobileNetV2) have no published count:
# they are ours, kept so that an architecture does not change unnoticed.
COUNTS: list[tuple[type[Classifier], tuple[int, ...], int, dict[str, Any], int]] = [
    (ConvNet4C3F, (1, 28, 28), 10, {}, 1_974_762),
    (ConvNet6C2F, (3, 32, 32), 10, {}, 2_250_378),
    (LiResNet, (3, 32, 32), 10, {"depth": 6, "width": 128}, 9_831_690),
    (LiResNet, (3, 32, 32), 10, {"depth": 18, "width": 256}, 29_542_922),
    (PreActResNet, (3, 32, 32), 10, {}, 11_172_170),
    (PreActResNet, (3, 32, 32), 10, {"depth": 34}, 21_280_330),
    (WideResNet, (3, 32, 32), 10, {}, 46_160_474),
    (WideResNet, (3, 32, 32), 10, {"depth": 28}, 36_479_194),
    (VGG, (3, 32, 32), 10, {}, 14_728_266 - 4_224),
    (MobileNetV2, (3, 32, 32), 10, {}, 2_296_922),
    (ViT, (3, 224, 224), 1000, {"variant": "Ti"}, 5_717_416),
    (ViT, (3, 224, 224), 1000, {"variant": "S"}, 22_050_664),
    (ViT, (3, 224, 224), 1000, {"variant": "B"}, 86_567_656),
    (ViT, (3, 224, 224), 1000, {"variant": "L"}, 304_326_632),
    (HybridViT, (3, 384, 384), 1000, {"variant": "B"}, 98_950_952),
]


@pytest.mark.parametrize(("model", "shape", "classes", "options", "count"), COUNTS)
def test_parameter_counts(
    model: type[Classifier], shape: tuple[int, ...], classes: int, options: dict[str, Any], count: int
) -> None:
    with torch.device("meta"):
        assert model(shape, classes, **options).num_parameters == count


@pytest.mark.parametrize(
    ("options", "shape", "grid"),
    [
        ({"variant": "L"}, (3, 224, 224), (14, 14)),
        ({"variant": "L"}, (3, 32, 32), (2, 2)),
        ({"variant": "L", "strides": (1, 1, 1, 2)}, (3, 32, 32), (16, 16)),
    ],
)
def test_hybrid_grid_is_what_the_stem_gives(
    options: dict[str, Any], shape: tuple[int, ...], grid: tuple[int, int]
) -> None:
    with torch.device("meta"):
        model = HybridViT(shape, 10, **options)
        assert model.body.grid == grid
        assert model.body.stem(torch.zeros(1, *shape)).shape == (1, 1024, *grid)


any_size = st.tuples(st.integers(1, 4), st.integers(8, 40), st.integers(8, 40))


@settings(max_examples=5, deadline=None)
@given(shape=any_size)
@pytest.mark.parametrize(
    "case",
    [
        Case("small", SmallConvNet, (), {"widths": (4, 4, 4)}),
        Case("6c2f", ConvNet6C2F, ()),
        Case("preact", PreActResNet, (), {"width": 2}),
        Case("liresnet", LiResNet, (), {"depth": 1, "width": 2, "features": 4}),
        Case("wrn", WideResNet, (), {"depth": 10, "widen_factor": 1}),
        Case("vgg", VGG, (), {"width": 2}),
        Case("mobilenet", MobileNetV2, (), {"width_multiplier": 0.1}),
        Case("hybrid", HybridViT, (), {"stem_width": 32, "blocks": (1, 1, 1), **TINY_VIT}),
    ],
    ids=str,
)
def test_convolutional_models_take_images_of_any_size(case: Case, shape: tuple[int, int, int]) -> None:
    with torch.device("meta"):
        assert case.model(shape, 5, **case.options)(torch.zeros(2, *shape)).shape == (2, 5)


@settings(max_examples=30, deadline=None)
@given(
    channels=st.integers(1, 3),
    patch=st.integers(1, 6),
    stride=st.integers(1, 6),
    rows=st.integers(1, 6),
    columns=st.integers(1, 6),
)
def test_vit_takes_all_images_its_patches_cover(
    channels: int, patch: int, stride: int, rows: int, columns: int
) -> None:
    shape = (channels, patch + stride * (rows - 1), patch + stride * (columns - 1))
    with torch.device("meta"):
        model = ViT(shape, 5, patch_size=patch, stride=stride, **TINY_VIT)
        assert model.body.grid == (rows, columns)
        assert model(torch.zeros(2, *shape)).shape == (2, 5)
