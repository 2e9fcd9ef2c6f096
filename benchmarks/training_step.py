"""A PGD-10 AT step of the trainer compared with the fastest loop in plain PyTorch, and speed of the data pipeline."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from atoll.data import Batch, batches, shuffled
from atoll.losses import AT
from atoll.models import Classifier, ConvNet4C3F, ConvNet6C2F, PreActResNet, SmallConvNet
from atoll.threat import ThreatModel
from atoll.training.trainer import Trainer, TrainerSettings
from atoll_papers.cost import Noise, peak_memory, ratio
from benchmarks.measure import Row

# model, input shape, batch size, repeats
CASES: dict[str, tuple[type[Classifier], tuple[int, ...], int, int]] = {
    "PreActResNet-18, CIFAR": (PreActResNet, (3, 32, 32), 32, 7),
    "4C3F, MNIST": (ConvNet4C3F, (1, 28, 28), 128, 15),
    "6C2F, CIFAR": (ConvNet6C2F, (3, 32, 32), 128, 11),
    "SmallConvNet, MNIST": (SmallConvNet, (1, 28, 28), 128, 31),
}


def setting(name: str) -> tuple[Trainer, Batch]:
    model, shape, size, _ = CASES[name]
    data = Noise(shape, size)
    trainer = Trainer(
        model(shape, 10),
        data,
        AT(),
        ThreatModel("linf", "8/255"),
        settings=TrainerSettings(batch_size=size),
        device="cpu",
    )
    return trainer, next(batches(data.train, [torch.arange(size)]))


def ours(name: str) -> Callable[[], object]:
    trainer, batch = setting(name)
    return lambda: trainer.train_step(batch)


def bare(name: str) -> Callable[[], object]:
    """A minimal loop for this case: ten forward and backward passes for the attack, then a training step.

    It uses what is fast in plain PyTorch: `channels_last`, no gradients of weights in the attack, a fused optimizer.
    """
    trainer, batch = setting(name)
    model, y, eps = trainer.model.to(memory_format=torch.channels_last), batch.y, 8 / 255
    x = batch.x.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, fused=True)

    def step() -> None:
        model.eval().requires_grad_(False)
        x_adv = (x + eps * (2 * torch.rand_like(x) - 1)).clamp(0, 1)
        for _ in range(10):
            x_adv.requires_grad_()
            (gradient,) = torch.autograd.grad(F.cross_entropy(model(x_adv), y), x_adv)
            x_adv = x_adv.detach() + eps / 4 * gradient.sign()
            x_adv = torch.min(torch.max(x_adv, x - eps), x + eps).clamp(0, 1)
        model.train().requires_grad_(True)
        optimizer.zero_grad()
        F.cross_entropy(model(x_adv), y).backward()
        optimizer.step()

    return step


def images_per_second(source: Iterator[Batch], budget: float) -> float:
    start, count = time.perf_counter(), 0
    for batch in source:
        count += len(batch.y)
        if time.perf_counter() - start > budget:
            break
    return count / (time.perf_counter() - start)


def data_path(name: str) -> Row:
    trainer, batch = setting(name)
    data = Noise(CASES[name][1], 10_000)
    order = [index for epoch in range(50) for index in shuffled(len(data.train), 128, 0, epoch)]
    _ = data.train
    supply = images_per_second(batches(data.train, order, augment=data.augment), budget=2.0)
    trainer.train_step(batch)
    start = time.perf_counter()
    trainer.train_step(batch)
    use = len(batch.y) / (time.perf_counter() - start)
    note = f"{supply:,.0f} and {use:,.0f} images/s"
    return Row(f"data pipeline / PGD-10 training, throughput, {name}", supply / use, 20, at_least=True, note=note)


def run() -> Iterator[Row]:
    for name, (_, _, size, repeats) in CASES.items():
        time_ratio = ratio(ours(name), bare(name), repeats)
        yield Row(f"PGD-10 AT step / fastest loop, time, {name}, batch {size}", time_ratio, 1.05)
        memory = peak_memory(functools.partial(ours, name)) / peak_memory(functools.partial(bare, name))
        yield Row(f"PGD-10 AT step / fastest loop, peak memory, {name}", memory, 1.05)
        yield data_path(name)
