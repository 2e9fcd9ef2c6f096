"""Cost of full-size runs, counted instead of timed: passes, FLOPs, memory and communication.

    python -m benchmarks.results.scaling  # the tables of docs/scaling.md

Operations of a whole training step are counted with torch's formulas on a small network and divided by the operations
of its forward pass.  For the large networks, forward passes and the memory that autograd saves are counted on the meta
device, where nothing is computed.  ``check`` compares this count with the measured memory of a small step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from atoll.attacks import PGD
from atoll.data import batches
from atoll.losses import AT, TRADES, Loss, Standard
from atoll.models import Classifier, PreActResNet, ViT
from atoll.runs.recipe import build_recipe
from atoll.threat import ThreatModel
from atoll.training.methods import AWP, AWPT, RAT, S2O, SAM, SWA, Method, TrH
from atoll.training.trainer import Trainer, TrainerSettings
from atoll_papers.cost import Noise, peak_memory

BATCH = 16
SMALL: dict[str, Callable[[], Classifier]] = {
    "PreAct ResNet": lambda: PreActResNet((3, 32, 32), 10, width=16),
    "ViT": lambda: ViT((3, 32, 32), 10, patch_size=4, width=96, depth=6, heads=3),
}
METHODS: dict[str, list[Callable[[], Method]]] = {
    "base": [],
    "TrH": [lambda: TrH(lambda_=1e-3)],
    "SWA": [SWA],
    "S2O": [lambda: S2O(weight=0.3)],
    "AWP": [AWP],
    "AWPT": [AWPT],
    "SAM": [SAM],
    "RAT, both terms": [lambda: RAT(order=2)],
    "RAT exact, both": [lambda: RAT(order=2, terms="exact")],
}
LOSSES: dict[str, Callable[[], Loss]] = {"standard": Standard, "AT": AT, "TRADES": TRADES}
# Name: (recipe, shape of the images, number of classes, number of training images).
RUNS = {
    "RAT, WCI: CIFAR-10": ("rat/cifar10-preact18-linf-at-0th", (3, 32, 32), 10, 50_000),
    "RAT: CIFAR-10, WRN-34-10": ("rat/cifar10-wrn34-linf-at-0th", (3, 32, 32), 10, 50_000),
    "TrH: CIFAR-10, ViT-L16": ("trh-cifar/cifar10-vit_l16-at-trh", (3, 32, 32), 10, 50_000),
    "TrH: ImageNet, ViT-B16": ("trh-imagenet/linf-vit_b16-at-trh", (3, 224, 224), 1000, 1_281_167),
    "TrH: ImageNet, ViT-L16": ("trh-imagenet/linf-vit_l16-at-trh", (3, 224, 224), 1000, 1_281_167),
    "GloRo: ImageNet, LiResNet L18W588": ("gloro-imagenet", (3, 224, 224), 1000, 1_281_167),
}
SUSTAINED = 100e12  # FLOP/s; an assumption: a third of the peak of an A100 in bfloat16


class Operations(TorchDispatchMode):
    """Adds up torch's formulas.  FlopCounterMode also tracks modules and fails with ``autograd.grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._overloadpacket in flop_registry:
            self.total += int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out))
        return out


def counted(work: Callable[[], object]) -> int:
    with Operations() as operations:
        work()
    return operations.total


def passes(model: str, loss: str, method: str, steps: int) -> float:
    """The operations of a training step, in forward passes over its batch."""
    data, net = Noise((3, 32, 32), BATCH), SMALL[model]()
    trainer = Trainer(
        net,
        data,
        LOSSES[loss](),
        ThreatModel("linf", "8/255"),
        attack=lambda threat, objective: PGD(threat, objective, steps=steps),
        methods=[make() for make in METHODS[method]],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-5),
        settings=TrainerSettings(batch_size=BATCH),
        device="cpu",
    )
    for each in trainer.methods:
        each.setup(trainer)
    batch = next(batches(data.train, [torch.arange(BATCH)]))
    return counted(lambda: trainer.train_step(batch)) / counted(lambda: net.eval()(batch.x))


@dataclass(frozen=True)
class Size:
    """Size of a network: parameters, and per image the operations of a forward pass and the bytes saved by autograd."""

    parameters: int
    flops: int
    saved: int


def size(model: nn.Module, shape: tuple[int, ...]) -> Size:
    model = model.to("meta").train()
    x = torch.empty(2, *shape, device="meta")
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:  # tensors saved by two operations count once
            saved[storage._cdata] = storage.nbytes()
            alive.append(storage)
        return tensor

    alive: list[object] = []  # otherwise an address could be reused
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    del output
    flops = counted(lambda: model(x))
    return Size(sum(p.numel() for p in model.parameters()), flops // 2, sum(saved.values()) // 2)


def steps_table() -> list[str]:
    lines = ["| step, PGD-10 | " + " | ".join(SMALL) + " |", "| --- | --- | --- |"]
    for loss in LOSSES:
        for method in METHODS if loss != "standard" else ["base"]:
            cells = [f"{passes(model, loss, method, 10):.1f}" for model in SMALL]
            lines.append(f"| {loss}{'' if method == 'base' else ' + ' + method} | " + " | ".join(cells) + " |")
    return lines


def runs_table() -> list[str]:
    titles = ["run", "parameters, M", "forward, GFLOP / image", "passes / step", "TFLOP / step", "images / step"]
    titles += [
        "epochs",
        "total EFLOP",
        "GPU hours",
        "weights, gradients, momentum, GB",
        "saved for backward, MB / image",
    ]
    lines = ["| " + " | ".join([*titles, "sent, MB / step and GPU"]) + " |", "|" + " --- |" * (len(titles) + 1)]
    for name, (row, shape, classes, images) in RUNS.items():
        recipe = build_recipe(row)
        with torch.device("meta"):
            net = recipe.model(shape, classes)
        network, settings = size(net, shape), recipe.trainer
        steps = recipe.tree["attack"]["init_args"]["steps"] if recipe.loss.objective else 0
        model = "ViT" if "ViT" in type(net).__name__ else "PreAct ResNet"
        count = passes(model, "AT" if steps else "standard", "base", max(steps, 1))
        each = network.flops * count
        total = each * images * settings.epochs
        cells = [
            f"{network.parameters / 1e6:.1f}",
            f"{network.flops / 1e9:.2f}",
            f"{count:.1f}",
            f"{each * settings.batch_size / 1e12:,.0f}",
            f"{settings.batch_size}",
            f"{settings.epochs}",
            f"{total / 1e18:.2f}",
            f"{total / SUSTAINED / 3600:,.0f}",
            f"{3 * 4 * network.parameters / 1e9:.2f}",
            f"{network.saved / 1e6:.1f}",
            f"{2 * 4 * network.parameters / 1e6:,.0f}",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _step(count: int) -> Callable[[], object]:
    net = PreActResNet((3, 32, 32), 10, width=16)
    x, y = torch.rand(count, 3, 32, 32), torch.zeros(count, dtype=torch.int64)
    return lambda: nn.functional.cross_entropy(net(x), y).backward()


def check() -> str:
    """Compare the measured memory per image with the counted memory."""
    few, many = 64, 256
    measured = (peak_memory(functools.partial(_step, many)) - peak_memory(functools.partial(_step, few))) / (many - few)
    expected = size(PreActResNet((3, 32, 32), 10, width=16), (3, 32, 32)).saved
    return (
        f"Measured on a small step (PreAct ResNet-18, width 16, {few} and {many} images), an image adds"
        f" {measured / 1e6:.2f} MB to the peak; the counted size is {expected / 1e6:.2f} MB"
        f" (ratio {measured / expected:.2f})."
    )


def main() -> None:
    print("\n".join([*steps_table(), "", *runs_table(), "", check()]))


if __name__ == "__main__":
    main()
