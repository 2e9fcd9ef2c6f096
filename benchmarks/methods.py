"""Cost of each method relative to a PGD-10 step of its base loss: time, and total peak memory.

The added time does not depend on the number of attack steps, but measurement noise grows with the duration of a step.
So the added time is measured with PGD-1 and compared with the duration of a step with PGD-10.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from atoll.attacks import PGD
from atoll.data import batches
from atoll.losses import AT, TRADES
from atoll.models import PreActResNet, ViT
from atoll.threat import ThreatModel
from atoll.training.methods import AWP, AWPT, RAT, S2O, SAM, SWA, Method, TrH
from atoll.training.trainer import Trainer, TrainerSettings
from atoll_papers.cost import Noise, added, peak_memory, seconds
from benchmarks.measure import Row

BATCH = 32
MODELS = {
    "PreActResNet-18": lambda: PreActResNet((3, 32, 32), 10),
    "small ViT": lambda: ViT((3, 32, 32), 10, patch_size=4, width=192, depth=6, heads=3),
}
LOSSES = {"AT": AT, "TRADES": TRADES}
# method, base loss, and limits of time and memory relative to the base, and of copies of the weights; None: no limit
CASES: list[tuple[str, Callable[[], Method], str, float | None, float | None, float | None]] = [
    ("TrH", lambda: TrH(lambda_=1e-3), "TRADES", 1.01, 1.00, None),
    ("SWA", SWA, "TRADES", 1.02, None, 1.0),
    ("S2O", lambda: S2O(weight=0.3), "TRADES", 1.01, 1.00, None),
    ("AWP", AWP, "AT", 1.12, None, 1.0),
    ("AWP", AWP, "TRADES", 1.20, None, 1.0),
    ("AWPT", AWPT, "TRADES", None, None, None),
    ("SAM", SAM, "TRADES", None, None, None),
    ("RAT first", lambda: RAT(order=1), "TRADES", 1.02, 1.02, None),
    ("RAT first + second", lambda: RAT(order=2), "TRADES", 1.02, 1.02, None),
    ("RAT exact, first", lambda: RAT(order=1, terms="exact"), "TRADES", None, None, None),
    ("RAT exact, both", lambda: RAT(order=2, terms="exact"), "TRADES", None, None, None),
]


def step(model: str, loss: str, case: int | None, pgd: int = 1) -> Callable[[], object]:
    """A training step, with the method of a case or without any."""
    data = Noise((3, 32, 32), BATCH)
    trainer = Trainer(
        MODELS[model](),
        data,
        LOSSES[loss](),
        ThreatModel("linf", "8/255"),
        attack=lambda threat, objective: PGD(threat, objective, steps=pgd),
        methods=[] if case is None else [CASES[case][1]()],
        # The labels are random; at an ordinary learning rate, exact Taylor terms diverge within a few steps.
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-5, momentum=0.9, weight_decay=5e-4),
        settings=TrainerSettings(batch_size=BATCH),
        device="cpu",
    )
    for method in trainer.methods:
        method.setup(trainer)
    batch = next(batches(data.train, [data.train.labels.new_tensor(range(BATCH))]))
    return lambda: trainer.train_step(batch)


def run(models: tuple[str, ...] = tuple(MODELS)) -> Iterator[Row]:
    for model in models:
        weights = 4 * sum(p.numel() for p in MODELS[model]().parameters())
        base = {loss: peak_memory(functools.partial(step, model, loss, None), whole=True) for loss in LOSSES}
        whole = {loss: min(seconds(step(model, loss, None, pgd=10)) for _ in range(3)) for loss in LOSSES}
        for case, (name, _, loss, time_limit, memory_limit, copies) in enumerate(CASES):
            title = f"{name} / {loss}, {model}"
            rounds = 3 if time_limit is None else 11  # slow methods without a limit can be less exact
            time = 1 + added(step(model, loss, case), step(model, loss, None), rounds) / whole[loss]
            yield Row(f"{title}: time", time, time_limit)
            memory = peak_memory(functools.partial(step, model, loss, case), whole=True)
            extra = (memory - base[loss]) / weights
            # Limits such as 1.00 apply to two decimals, as the papers report them.
            limit = None if memory_limit is None else memory_limit + 0.005
            yield Row(f"{title}: peak memory", memory / base[loss], limit, note=f"{extra:+.2f} copies of the weights")
            if copies is not None:
                yield Row(f"{title}: copies of the weights", extra, copies + 0.05)
