"""Data and models for the health checks: sound ones, and defects that can be planted in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.data import Data, Digits, MemorySplit, Splits
from atoll.health import Finding, check_data, check_model, scan_data
from atoll.health.measure import draw_points
from atoll.models.adapted import Adapted, Conventions
from atoll.stats import Accuracy

GRAY = ((0.5,), (0.5,))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Stored(Data):
    """Images in memory.

    Args:
        train: images and labels for training.
        test: images and labels for testing.
        classes: number of classes.
    """

    def __init__(self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], classes: int = 10) -> None:
        super().__init__(validation=0)
        self.parts = train, test
        self.names = tuple(f"c{label}" for label in range(classes))

    @property
    def classes(self) -> tuple[str, ...]:
        return self.names

    def load(self) -> Splits:
        return Splits(*(MemorySplit(images, labels) for images, labels in self.parts))


@cache
def gray() -> Stored:
    """Digits: 8 x 8 pixels, one channel."""
    data = Digits(validation=0)
    return Stored(*((s.fetch(torch.arange(len(s))), s.labels) for s in (data.train, data.test)))


@cache
def color() -> Stored:
    """Noisy digits, 16 x 16 pixels: even ones are red, odd ones are blue."""
    draw = torch.Generator().manual_seed(0)
    parts = []
    for images, labels in gray().parts:
        big = F.interpolate(images.float(), scale_factor=2)
        tint = torch.tensor([[1.0, 0.6, 0.2], [0.2, 0.6, 1.0]])[labels % 2][:, :, None, None]
        noise = 50 * torch.rand(len(images), 3, 16, 16, generator=draw)
        parts.append(((0.75 * big * tint + noise).round().byte(), labels))
    return Stored(*parts)


class Net(nn.Module):
    """A network behind a normalization, as in the code that trains it."""

    def __init__(self, *layers: nn.Module, normalization: tuple[Sequence[float], Sequence[float]] = GRAY) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.mean, self.std = (nn.Buffer(torch.tensor(each)[:, None, None]) for each in normalization)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers((x - self.mean) / self.std)
        return logits


class Tokens(nn.Module):
    """A small vision transformer without a class token."""

    def __init__(self, channels: int, patch: int, tokens: int, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.block = nn.TransformerEncoderLayer(width, 4, 64, batch_first=True, norm_first=True, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.block(self.patches(x).flatten(2).mT + self.position)
        return tokens.mean(1)


def conv_net(channels: int, side: int, normalization: tuple[Sequence[float], Sequence[float]], norm: bool) -> Net:
    def block(source: int, target: int) -> list[nn.Module]:
        return [nn.Conv2d(source, target, 3, 2, 1), nn.BatchNorm2d(target) if norm else nn.Identity(), nn.ReLU()]

    last = 16 * (side // 4) ** 2
    layers = [*block(channels, 8), *block(8, 16), nn.Flatten(), nn.Dropout(0.1), nn.Linear(last, 10)]
    return Net(*layers, normalization=normalization)


def train(model: nn.Module, data: Data, *, steps: int = 150, lr: float = 1e-2, eps: float = 0.0) -> nn.Module:
    """Train briefly, with random corners of the ball if eps is positive."""
    x, y = data.tensors("train")
    x = x.to(next(model.parameters()).dtype)
    draw = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    for _ in range(steps):
        rows = torch.randint(len(x), (128,), generator=draw)
        batch = x[rows]
        if eps:
            batch = attacked(model, batch, y[rows], eps)
        optimizer.zero_grad()
        F.cross_entropy(model.train()(batch), y[rows]).backward()
        optimizer.step()
    return model.eval().requires_grad_(True)


def attacked(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    """Adversarial images after three steps."""
    x_adv = x.clone()
    for _ in range(3):
        x_adv.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model.eval()(x_adv), y), x_adv)
        x_adv = (x + (x_adv.detach() + eps / 2 * gradient.sign() - x).clamp(-eps, eps)).clamp(0, 1)
    return x_adv


def seeded(build: Callable[[], nn.Module], data: Callable[[], Data], **options: float) -> Callable[[], nn.Module]:
    """A function that trains a model, once."""

    @cache
    def make() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return train(build(), data(), **options)  # type: ignore[arg-type]

    return make


gray_net = seeded(lambda: conv_net(1, 8, GRAY, norm=False), gray)
color_net = seeded(lambda: conv_net(3, 16, IMAGENET, norm=True), color)


class Wrapped(nn.Module):
    """A network with something before and after it."""

    def __init__(
        self,
        net: nn.Module,
        before: Callable[[Tensor], Tensor] = lambda x: x,
        after: Callable[[Tensor], Tensor] = lambda z: z,
    ) -> None:
        super().__init__()
        self.net, self.before, self.after = net, before, after
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.net(self.before(x)))


def part(data: Stored, rows: Callable[[Tensor], Tensor], *, test: int | None = None, classes: int = 10) -> Stored:
    """The images whose labels a function accepts; the first ones of the test set."""
    (x, y), (x_test, y_test) = data.parts
    keep, keep_test = rows(y), rows(y_test)
    return Stored((x[keep], y[keep]), (x_test[keep_test][:test], y_test[keep_test][:test]), classes)


def changed(data: Stored, change: Callable[[Tensor], Tensor]) -> Stored:
    """The same data with other images."""
    return Stored(*((change(images), labels) for images, labels in data.parts), classes=data.num_classes)


def few_of_most(labels: Tensor) -> Tensor:
    """All points of class 0, and one in twenty of the others."""
    return (labels == 0) | (torch.rand(len(labels), generator=torch.Generator().manual_seed(0)) < 0.05)


@cache
def noisy() -> Stored:
    """Digits behind so much noise that a network classifies about 60 % correctly."""
    draw = torch.Generator().manual_seed(1)
    return changed(gray(), lambda x: (0.35 * x + 165 * torch.rand(x.shape, generator=draw)).round().byte())


@cache
def dark() -> Stored:
    """Colors that are almost black: 17 levels at most."""
    return changed(color(), lambda x: (x.float() * 16 / 255).round().byte())


@cache
def many_classes() -> Stored:
    """500 classes with five training images and one test image."""
    draw = torch.Generator().manual_seed(0)
    centers = torch.randint(0, 200, (500, 3, 8, 8), generator=draw)

    def points(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(500).repeat(count)
        noise = torch.randint(0, 56, (len(labels), 3, 8, 8), generator=draw)
        return (centers[labels] + noise).byte(), labels

    return Stored(points(5), points(1), classes=500)


@cache
def video() -> Stored:
    """Frames of ten scenes that differ by little: some pixels by one level."""
    draw = torch.Generator().manual_seed(0)
    scenes = torch.randint(1, 250, (10, 3, 8, 8), generator=draw)

    def frames(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(10).repeat_interleave(count)
        return (scenes[labels] + (torch.rand(len(labels), 3, 8, 8, generator=draw) < 0.05)).byte(), labels

    return Stored(frames(60), frames(20))


def centroids(data: Stored) -> nn.Module:
    """The linear model of the nearest class mean."""
    x, y = data.tensors("train")
    means = torch.stack([x[y == label].mean(0).flatten() for label in range(data.num_classes)])
    linear = nn.Linear(means.shape[1], len(means))
    linear.weight = nn.Parameter(2 * means)
    linear.bias = nn.Parameter(-means.square().sum(1))
    return nn.Sequential(nn.Flatten(), linear).eval()


def mlp(inputs: int, activation: type[nn.Module], classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 48), activation(), nn.Linear(48, classes))


def check(model: nn.Module, data: Data, conventions: Conventions | None = None) -> tuple[Accuracy, list[Finding]]:
    """All checks of a model from elsewhere, as ``adopt`` runs them."""
    conventions = conventions or Conventions()
    adapted = Adapted(model, conventions, data.shape[0])
    accuracy, findings = check_model(adapted, data, draw_points(data.test, 500, 0), conventions=conventions)
    return accuracy, findings + check_data(scan_data(data), data.classes)
