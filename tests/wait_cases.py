"""Operations and waits of attacks and training steps on the pretend accelerator, and the most that are allowed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.attacks import APGD, FAB, FMN, PDPGD, PGD, Attack, CarliniWagner, RayS, SigmaZero, Square
from atoll.data import Batch, Data, MemorySplit, Splits
from atoll.losses import AT, TRADES, Loss
from atoll.models import SmallConvNet
from atoll.threat import ThreatModel
from atoll.training.trainer import Trainer, TrainerSettings
from pretend import DEVICE, Counts, accelerator

STEPS = 100


@dataclass(frozen=True)
class Count:
    """What one iteration of an attack or one training step costs."""

    operations: float  # for attacks, besides those of the model's passes
    waits: float


def threat(norm: str) -> ThreatModel:
    """A threat model under which no attack succeeds, so that all of them run to the end."""
    return ThreatModel(norm, 1e-5 if norm != "l0" else 0)


@dataclass(frozen=True)
class AttackCase:
    build: Callable[[], Attack]
    limit: Count | None = None  # None if the attack must know the sizes of its squares

    def count(self) -> Count:
        """Count one run of the attack, and the same passes without the attack."""
        model = small_model().eval()
        x = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
        y = model(x).argmax(1)
        with accelerator() as counts:
            model, x, y = model.to(DEVICE), x.to(DEVICE), y.to(DEVICE)
            passes: list[tuple[int, bool]] = []
            hook = model.register_forward_hook(lambda _, inputs, out: passes.append((len(out), out.requires_grad)))
            start = copy.deepcopy(counts)
            self.build()(model, x, y)
            attack = difference(counts, start)
            hook.remove()
            start = copy.deepcopy(counts)
            for rows, has_gradient in passes:
                run_pass(model, x[:rows], has_gradient)
            alone = difference(counts, start)
        return Count((attack.operations - alone.operations) / len(passes), attack.waits / len(passes))


def run_pass(model: nn.Module, x: Tensor, has_gradient: bool) -> None:
    x = x.detach().requires_grad_(has_gradient)
    with torch.set_grad_enabled(has_gradient):
        logits = model(x)
    if has_gradient:
        torch.autograd.grad(logits, x, torch.ones_like(logits))


def difference(end: Counts, start: Counts) -> Counts:
    return Counts(end.by_operation - start.by_operation, end.by_wait - start.by_wait)


def small_model() -> SmallConvNet:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return SmallConvNet((1, 28, 28), 10, widths=(2, 2), hidden=4)


class Images(Data):
    """Sixteen random images."""

    classes = tuple("0123456789")

    def load(self) -> Splits:
        images = torch.randint(0, 255, (16, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        split = MemorySplit(images, torch.arange(16) % 10)
        return Splits(split, split)


@dataclass(frozen=True)
class StepCase:
    loss: Callable[[], Loss]
    limit: Count

    def count(self) -> Count:
        """Count the second step; the first one creates the state of the optimizer."""
        with accelerator() as counts:
            trainer = Trainer(
                small_model(),
                Images(validation=0),
                self.loss(),
                ThreatModel("linf", 0.1),
                settings=TrainerSettings(batch_size=16),
                device=DEVICE,
            )
            x, y = trainer.data.tensors("train")
            batch = Batch(x.to(DEVICE), y.to(DEVICE), torch.arange(16, device=DEVICE))
            trainer.train_step(batch)
            start = copy.deepcopy(counts)
            trainer.train_step(batch)
            step = difference(counts, start)
        return Count(step.operations, step.waits)


def apgd(norm: str, **options: Any) -> Callable[[], Attack]:
    return lambda: APGD(threat(norm), steps=STEPS, **options)


CASES: dict[str, AttackCase | StepCase] = {
    "training step, AT, PGD-10": StepCase(AT, Count(390, 1)),
    "training step, TRADES, PGD-10": StepCase(TRADES, Count(510, 1)),
    "PGD": AttackCase(lambda: PGD(threat("linf"), steps=STEPS), Count(12, 0.1)),
    "APGD-CE": AttackCase(apgd("linf"), Count(60, 0.1)),
    "APGD-CE, l2": AttackCase(apgd("l2"), Count(75, 0.1)),
    "APGD-CE, l1": AttackCase(apgd("l1"), Count(130, 0.1)),
    "APGD-T": AttackCase(apgd("linf", targets=1), Count(90, 0.1)),
    "FAB": AttackCase(lambda: FAB(threat("linf"), steps=STEPS), Count(270, 0.1)),
    "FAB-T": AttackCase(lambda: FAB(threat("linf"), steps=STEPS, targets=1), Count(150, 0.1)),
    "FAB-T, l2": AttackCase(lambda: FAB(threat("l2"), steps=STEPS, targets=1), Count(155, 0.1)),
    "FAB-T, l1": AttackCase(lambda: FAB(threat("l1"), steps=STEPS, targets=1), Count(80, 0.1)),
    "Square": AttackCase(lambda: Square(threat("linf"), queries=STEPS), Count(60, 0.1)),
    "Square, l2": AttackCase(lambda: Square(threat("l2"), queries=STEPS)),
    "Square, l1": AttackCase(lambda: Square(threat("l1"), queries=STEPS)),
    "FMN": AttackCase(lambda: FMN(threat("linf"), steps=STEPS), Count(65, 0.1)),
    "PDPGD": AttackCase(lambda: PDPGD(threat("l1"), steps=STEPS), Count(80, 0.1)),
    "SigmaZero": AttackCase(lambda: SigmaZero(threat("l0"), steps=STEPS), Count(80, 0.1)),
    "CarliniWagner": AttackCase(
        lambda: CarliniWagner(threat("l2"), steps=STEPS // 2, binary_search_steps=2), Count(130, 0.1)
    ),
    "RayS": AttackCase(lambda: RayS(threat("linf"), queries=STEPS), Count(85, 0.1)),
}
QUICK = ("training step, TRADES, PGD-10", "APGD-CE", "FAB-T", "Square")
