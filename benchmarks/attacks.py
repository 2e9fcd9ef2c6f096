"""Speed of attacks: passes, time relative to their passes alone, and memory by number of points."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from atoll.attacks import APGD, FAB, Attack, Square
from atoll.attacks.evaluate import evaluate
from atoll.data import MemorySplit
from atoll.frozen import CompiledForm, FrozenForm
from atoll.models import ConvNet4C3F, PreActResNet, SmallConvNet
from atoll.threat import ThreatModel
from atoll_papers.cost import peak_memory, ratio
from benchmarks.measure import Row

BATCH = 500
# No attack succeeds at this radius, so the batch stays full, which is the most expensive case.
THREAT = ThreatModel("linf", 1e-5)
ATTACKS: dict[str, Callable[[], Attack]] = {
    "APGD-CE": lambda: APGD(THREAT, steps=20),
    "APGD-T": lambda: APGD(THREAT, steps=8, targets=3),
    "FAB-T": lambda: FAB(THREAT, steps=10, targets=2),
    "Square": lambda: Square(THREAT, queries=60),
}


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return SmallConvNet((1, 28, 28), 10).eval()


def points(count: int, model: nn.Module) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return x, torch.cat([model(part) for part in x.split(BATCH)]).argmax(1)


def passes(attack: Attack, model: nn.Module, x: Tensor, y: Tensor) -> list[tuple[int, bool]]:
    """The model passes of an attack: number of rows, and whether a gradient is computed."""
    seen: list[tuple[int, bool]] = []
    handle = model.register_forward_hook(lambda _, inputs, output: seen.append((len(output), output.requires_grad)))
    attack(model, x, y)
    handle.remove()
    return seen


def replay(model: nn.Module, x: Tensor, seen: list[tuple[int, bool]]) -> None:
    """Run the same passes and nothing else."""
    for count, graded in seen:
        part = x[:count].detach().requires_grad_(graded)
        with torch.set_grad_enabled(graded):
            logits = model(part)
        if graded:
            torch.autograd.grad(logits.sum(), part)


def _in_form(form: FrozenForm | CompiledForm, work: Callable[[], object]) -> Callable[[], object]:
    def inside() -> None:
        with form:
            work()

    return inside


def pass_rows() -> Iterator[Row]:
    """A pass of an attack relative to a pass of the model itself."""
    for name, make, size in (
        ("small ConvNet", make_model, BATCH),
        ("small ConvNet, batch norm", lambda: SmallConvNet((1, 28, 28), 10, batch_norm=True).eval(), BATCH),
        ("4C3F", lambda: ConvNet4C3F((1, 28, 28), 10).eval(), 128),
        ("PreActResNet-18", lambda: PreActResNet((3, 32, 32), 10).eval(), 32),
    ):
        model = make()
        x = torch.rand(size, 3 if "ResNet" in name else 1, *[32 if "ResNet" in name else 28] * 2)
        forms = {"in an attack": FrozenForm(model, x), "compiled": CompiledForm(model, x)}
        for kind, graded in (("forward pass", False), ("forward pass and gradient", True)):
            plain = partial(replay, model, x, [(size, graded)])
            for how, form in forms.items():
                value = ratio(_in_form(form, plain), plain, rounds=9)
                yield Row(f"{kind} {how} / of the model, time, {name}", value, note=f"batch {size}")


def _evaluation(count: int) -> Callable[[], object]:
    model = make_model()
    x, y = points(count, model)
    split = MemorySplit((x * 255).to(torch.uint8), y)
    attacks = {"APGD-CE": APGD(THREAT, steps=3), "Square": Square(THREAT, queries=3)}
    return lambda: evaluate(model, split, attacks, cascade=True, batch_size=100, check=False)


def run() -> Iterator[Row]:
    yield from pass_rows()
    model = make_model()
    x, y = points(BATCH, model)
    form = FrozenForm(model, x)
    for name, make in ATTACKS.items():
        attack = make()
        seen = passes(attack, model, x, y)
        overhead = ratio(
            _in_form(form, partial(attack, model, x, y)), _in_form(form, partial(replay, model, x, seen)), 9
        )
        note = f"{len(seen)} passes, batch {BATCH}, SmallConvNet"
        yield Row(f"{name}, time / model passes alone", overhead, 1.2, note=note)
    few, many = (peak_memory(partial(_evaluation, count)) for count in (500, 4000))
    yield Row("evaluation, peak memory with 4,000 points / 500", many / few, 1.1, note=f"{few / 2**20:.0f} MiB")
