"""Every planted defect of a model is reported under its kind, and options that are suggested repair it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.cli import parse
from atoll.errors import InputError
from atoll.health.conventions import alternatives
from atoll.health.function import check_function
from atoll.models.adapted import Adapted, Conventions
from health.health_cases import IMAGENET, Stored, Wrapped, changed, check, color, color_net, gray, gray_net, seeded


class Clip(torch.autograd.Function):
    """The identity with a clipped gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-1e-3, 1e-3)


class Scale(torch.autograd.Function):
    """The identity with a scaled gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 0.5 * gradient


def with_hook(x: Tensor) -> Tensor:
    """The identity with a hook that removes half of the gradient."""
    x = x.clone()
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * (torch.arange(x.shape[-1]) % 2))
    return x


def straight_through(x: Tensor) -> Tensor:
    """Rounding with the gradient of the identity."""
    return x + ((8 * x).round() / 8 - x).detach()


def nan_if_dark(x: Tensor, z: Tensor) -> Tensor:
    return torch.where((x.mean((1, 2, 3)) < 0.25)[:, None], torch.nan, z)


class NanIfDark(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        return nan_if_dark(x, self.net(x))


def trained(net: nn.Module) -> nn.Module:
    """A copy in training mode."""
    return copy.deepcopy(net).train()


ORDER = torch.randperm(10, generator=torch.Generator().manual_seed(1))
NEVER = torch.tensor([0.0] * 3 + [-100.0] + [0.0] * 6)
SHIFT, WIDTH = torch.tensor(IMAGENET[0])[:, None, None], torch.tensor(IMAGENET[1])[:, None, None]
# Defect: the network behind it, the defect, and the kind under which it is reported.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module], str]] = {
    "softmax": (gray_net, lambda net: Wrapped(net, after=lambda z: z.softmax(1)), "softmax"),
    "mean": (color_net, lambda net: Wrapped(net, lambda x: x * WIDTH + SHIFT), "mean"),
    "own mean": (color_net, lambda net: Wrapped(net, lambda x: x * 0.12 + 0.2), "mean"),
    "BGR": (color_net, lambda net: Wrapped(net, lambda x: x.flip(1)), "channels"),
    "0 to 255": (color_net, lambda net: Wrapped(net, lambda x: x / 255), "range"),
    "-1 to 1": (gray_net, lambda net: Wrapped(net, lambda x: (x + 1) / 2), "range"),
    "training mode": (color_net, trained, "training mode"),
    "dropout": (gray_net, lambda net: Wrapped(net, lambda x: F.dropout(x, 0.3)), "dropout"),
    "randomness": (gray_net, lambda net: Wrapped(net, lambda x: x + 0.1 * torch.randn_like(x)), "randomized"),
    "labels": (gray_net, lambda net: Wrapped(net, after=lambda z: z[:, ORDER]), "labels"),
    "two labels": (gray_net, lambda net: Wrapped(net, after=lambda z: z[:, [1, 0, *range(2, 10)]]), "labels"),
    "missing class": (gray_net, lambda net: Wrapped(net, after=lambda z: z + NEVER), "missing class"),
    "quantized": (color_net, lambda net: Wrapped(net, lambda x: (255 * x).round() / 255), "rounding"),
    "few levels": (gray_net, lambda net: Wrapped(net, lambda x: (8 * x).floor() / 8), "rounding"),
    "straight through": (gray_net, lambda net: Wrapped(net, straight_through), "gradients"),
    "clipped": (gray_net, lambda net: Wrapped(net, Clip.apply), "gradients"),
    "scaled": (color_net, lambda net: Wrapped(net, after=Scale.apply), "gradients"),
    "hook": (color_net, lambda net: Wrapped(net, with_hook), "gradients"),
    "detached": (gray_net, lambda net: Wrapped(net, lambda x: x.detach()), "gradients"),
    "large logits": (gray_net, lambda net: Wrapped(net, after=lambda z: 1e4 * z), "saturated"),
    "ReLU": (gray_net, lambda net: Wrapped(net, after=torch.relu), "ReLU"),
    "NaN": (gray_net, NanIfDark, "NaN"),
    "NaN for black": (gray_net, lambda net: Wrapped(net, lambda x: x / x.amax((1, 2, 3), True)), "NaN"),
    "NaN gradient": (gray_net, lambda net: Wrapped(net, lambda x: x.sqrt().square()), "NaN"),
    "batch": (gray_net, lambda net: Wrapped(net, lambda x: x - x.mean(0) + 0.3), "batch-dependent"),
    "constant": (gray_net, lambda net: Wrapped(net, after=lambda z: z + 100 * torch.eye(10)[3]), "constant"),
}  # fmt: skip

ALSO = {
    # what follows from the defect
    "0 to 255": {"constant"}, "straight through": {"rounding"}, "own mean": {"missing class"},
    # dividing all inputs by a constant may also help
    "constant": {"range"},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_defect_is_reported_under_its_kind(name: str) -> None:
    make, plant, kind = MODELS[name]
    data = gray() if make is gray_net else color()
    model = plant(make())
    accuracy, findings = check(model, data)
    kinds = {finding.kind for finding in findings}
    assert kind in kinds
    assert kinds <= {kind} | ALSO.get(name, set())
    for finding in findings:
        assert len(str(finding).splitlines()) == 1
        if finding.option and finding.kind == kind:
            conventions = typed(finding.option)
            repaired, rest = check(model, data, conventions)
            assert repaired.value > max(accuracy.value - 1e-9, 0.9)
            assert rest == []


def typed(option: str) -> Conventions:
    """Conventions from the command line."""
    options = parse(["adopt", "net.py:build", "--data", "Digits", "--out", "run", *option.split()])
    given = {name: value for name in vars(Conventions()) if (value := getattr(options, name)) is not None}
    return Conventions(**given)


def test_suggested_options_change_the_conventions_in_use() -> None:
    """With the options added to those in use, the model gets the inputs of the alternative."""
    x = color().tensors("train", 200)[0]
    now = Conventions(range=(0.0, 255.0), mean=(1.0,), channels="bgr")
    options = []
    for each in alternatives(Adapted(nn.Flatten(), now, 3), now, x):
        conventions = typed(f"--range 0,255 --mean 1 --channels bgr {each.option}")
        torch.testing.assert_close(each.model(x), Adapted(nn.Flatten(), conventions, 3)(x), rtol=1e-4, atol=1e-3)
        options.append(each.option)
    assert "--mean 0 --range 0,1" in options
    assert "--channels rgb" in options
    assert len(set(options)) == len(options) >= 7


def test_the_order_is_relative_to_the_labels_in_use() -> None:
    model = Wrapped(gray_net(), after=lambda z: z[:, ORDER])
    shuffled = torch.randperm(10, generator=torch.Generator().manual_seed(2))
    _, (finding,) = check(model, gray(), Conventions(labels=tuple(shuffled.tolist())))
    assert finding.kind == "labels"
    assert typed(finding.option).labels == tuple(ORDER.argsort().tolist())


def test_nothing_changes() -> None:
    """Modes, buffers and global random numbers are the same as before."""
    model = copy.deepcopy(color_net()).train()
    model.layers[0].eval()  # type: ignore[index, union-attr]
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    state = torch.get_rng_state()
    check(Wrapped(model, lambda x: x + 0.01 * torch.randn_like(x)).train(), color())
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == [True] * len(modes)
    check(model, color())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_training_mode_without_consequences_is_not_reported() -> None:
    assert check(copy.deepcopy(gray_net()).apply(lambda module: setattr(module, "p", 0.0)).train(), gray())[1] == []


class NeedsFloat32(nn.Module):
    """A network that has no copy in float64."""

    def __init__(self, net: nn.Module, gradient: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.gradient = net, gradient
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return self.net(self.gradient(x))

    def __deepcopy__(self, memo: object) -> nn.Module:
        raise RuntimeError("not possible")


@pytest.mark.parametrize(("net", "data"), [(gray_net, gray), (color_net, color)])
def test_gradients_are_also_checked_in_float32(net: Callable[[], nn.Module], data: Callable[[], Stored]) -> None:
    x, y = data().tensors("test", 12)
    assert check_function(NeedsFloat32(net(), lambda x: x), x, y, (0.0, 1.0)) == []
    (finding,) = check_function(NeedsFloat32(net(), Scale.apply), x, y, (0.0, 1.0))
    assert finding.kind == "gradients"


def of_size(channels: int, size: int, outputs: int = 10) -> nn.Module:
    return nn.Sequential(nn.Conv2d(channels, 2, 3), nn.Flatten(), nn.Linear(2 * (size - 2) ** 2, outputs)).eval()


class Photos(Stored):
    resize = 108


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


REFUSALS = {
    "size": (
        lambda: of_size(3, 32),
        r"fails on images of shape \(3, 16, 16\): .*; it accepts images of 32 x 32 pixels$",
    ),
    "channels": (lambda: of_size(1, 16), "it accepts images of 16 x 16 pixels with 1 channel$"),
    "nothing": (lambda: nn.Linear(7, 7), r"fails on images of shape \(3, 16, 16\): [^;]*$"),
    "many outputs": (lambda: of_size(3, 16, 1000), "1000 outputs, but the data has 10 classes; use --labels"),
    "few outputs": (lambda: of_size(3, 16, 2), "the model has 2 outputs, but the data has 10 classes; leave out"),
    "not logits": (Pair, "expected a tensor of logits, got tuple"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_models_that_do_not_fit_the_data_are_refused(name: str) -> None:
    build, message = REFUSALS[name]
    with pytest.raises(InputError, match=message) as error:
        check(build(), color())
    assert "\n" not in str(error.value)


def test_wrong_size_of_photos() -> None:
    with pytest.raises(InputError, match=r"images of 224 x 224 pixels; use data\.size=224 data\.resize=256$"):
        check(of_size(3, 224), Photos(*color().parts))


def scaled(factor: int) -> Callable[[Tensor], Tensor]:
    return lambda images: F.interpolate(images.float(), scale_factor=factor).byte()


def any_size() -> nn.Module:
    """A network that accepts images of any size."""
    first = [nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()]
    return nn.Sequential(*first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def test_models_that_accept_any_size() -> None:
    small = changed(color(), scaled(2))
    net = seeded(any_size, lambda: small)()
    assert check(net, small)[1] == []
    accuracy, (finding,) = check(net, Photos(*changed(color(), scaled(6)).parts))
    assert (finding.kind, finding.option) == ("size", "data.size=32 data.resize=36")
    assert accuracy.value < 0.7
