"""Iterative attacks with a full batch: finished points leave the batch and new points take their place.

Without this, an iterative attack would spend most of its passes on points that are already broken.  Every row of the
batch has its own state, iteration count and random stream, so the result for a point does not depend on the other
points of the batch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor, nn

from atoll.attacks.base import Attack, check_labels
from atoll.errors import InputError
from atoll.rng import PointRNG
from atoll.threat import AttackNorm, ThreatModel, per_point

BETA_1, BETA_2 = 0.9, 0.999  # Adam's decay rates
CHECK_EVERY = 16  # iterations between checks on accelerators whether rows are done; each waits for the device


@dataclass
class Points:
    """Points to attack: inputs, labels, indices in the data set, and clean logits."""

    x: Tensor
    y: Tensor
    index: Tensor
    logits: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, rows: Tensor | slice) -> Points:
        return Points(self.x[rows], self.y[rows], self.index[rows], self.logits[rows])


@dataclass
class AttackState:
    """Points under attack: input, label, candidate and iteration count of each row, and the state of the attack."""

    x: Tensor
    y: Tensor
    index: Tensor
    streams: PointRNG
    x_adv: Tensor  # the current candidate; adversarial if ``success``
    success: Tensor
    iteration: Tensor  # number of finished iterations
    state: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, rows: Tensor | slice) -> AttackState:
        return self.from_tensors({name: value[rows] for name, value in self.tensors().items()})

    @staticmethod
    def cat(parts: Sequence[AttackState]) -> AttackState:
        tensors = [part.tensors() for part in parts]
        return AttackState.from_tensors({name: torch.cat([part[name] for part in tensors]) for name in tensors[0]})

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, to save them."""
        own = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return own | self.streams.tensors() | {f"state/{name}": value for name, value in self.state.items()}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> AttackState:
        """Restore the state from ``tensors``."""
        state = {name.removeprefix("state/"): value for name, value in tensors.items() if name.startswith("state/")}
        own = {name: tensors[name] for name in ("x", "y", "index", "x_adv", "success", "iteration")}
        return AttackState(**own, streams=PointRNG.from_tensors(tensors), state=state)


class IterativeAttack(Attack):
    """Base class of attacks that run step by step; subclasses implement ``num_steps``, ``init`` and ``step``."""

    @abstractmethod
    def num_steps(self, classes: int) -> int:
        """Return the number of iterations after which a row without success is finished."""

    @abstractmethod
    def init(self, points: Points, streams: PointRNG) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the first candidates and the state of new rows, without model passes so that refills are cheap."""

    @abstractmethod
    def step(self, model: nn.Module, rows: AttackState) -> None:
        """Run one iteration of every row, in place: evaluate the candidates, mark successes, propose new candidates.

        On an accelerator, a row with a success stays in the batch for some iterations.  Its candidate must not change.
        """

    def broken(self, rows: AttackState) -> Tensor:
        """Return which finished rows have an adversarial input."""
        return rows.success

    def init_state(self, points: Points, streams: PointRNG) -> AttackState:
        """Return the state of points before the first iteration."""
        x_adv, state = self.init(points, streams)
        zeros = torch.zeros_like(points.index)
        return AttackState(points.x, points.y, points.index, streams, x_adv, zeros.bool(), zeros, state)

    def search(self, model: nn.Module, x: Tensor, y: Tensor, streams: PointRNG) -> Tensor:
        """Attack one batch, without refilling it as rows finish."""
        with torch.no_grad():
            logits = model(x)
        if y.dim() != 1:
            raise InputError(f"labels: expected class indices for {type(self).__name__}, got probabilities")
        check_labels(logits, y, self.known_classes)
        batches = iter([Points(x, y, torch.arange(len(y), device=y.device), logits)])
        x_adv = x.clone()
        loop = AttackLoop(
            self, model, lambda _: next(batches, None), lambda index: streams[index], logits.shape[1], len(x)
        )
        for rows in loop:
            if len(rows):
                x_adv[rows.index] = rows.x_adv
        return x_adv


class MinimumNormAttack(IterativeAttack):
    """Base class of attacks that search for the closest adversarial point; ``state["closest"]`` is its distance.

    The search stops as soon as this distance is at most eps.  Otherwise it returns the clean point.

    Args:
        threat: the threat model.
        minimum_norm: ignore eps, run the search to the end and return the closest adversarial points at any distance.
    """

    def __init__(self, threat: ThreatModel, *, minimum_norm: bool = False) -> None:
        super().__init__(threat)
        self.minimum_norm = minimum_norm
        self.stop_distance = 0.0 if minimum_norm else threat.radius  # stop the search at this distance
        self.max_distance = math.inf if minimum_norm else threat.radius  # return no points beyond this distance

    def broken(self, rows: AttackState) -> Tensor:
        return rows.state["closest"] <= self.max_distance  # also of rows that ran to the end

    def keep_closest(
        self, rows: AttackState, candidates: Tensor, adversarial: Tensor, *, distance: Tensor | None = None
    ) -> Tensor:
        """Store candidates that are closer than all previous ones and return which ones are."""
        distance = self.threat.distance(candidates, rows.x) if distance is None else distance
        closer = adversarial & ~rows.success & (distance < rows.state["closest"])
        rows.state["closest"] = torch.where(closer, distance, rows.state["closest"])
        assign_rows(rows.x_adv, closer & (distance <= self.max_distance), candidates)
        rows.success |= rows.state["closest"] <= self.stop_distance
        return closer


class OneShot(IterativeAttack):
    """Wraps any other attack as a single iteration; claims success for every point, which the caller must confirm."""

    norms = get_args(AttackNorm)  # those of the wrapped attack

    def __init__(self, attack: Attack) -> None:
        super().__init__(attack.threat)
        self.attack = attack

    def num_steps(self, classes: int) -> int:
        return 1

    def init(self, points: Points, streams: PointRNG) -> tuple[Tensor, dict[str, Tensor]]:
        return points.x, {}

    def step(self, model: nn.Module, rows: AttackState) -> None:
        rows.x_adv = self.attack.search(model, rows.x, rows.y, rows.streams).detach()
        rows.success |= True
        rows.iteration += 1


@dataclass
class AttackLoop:
    """Runs an attack on all points of a source while keeping the batch full.

    Iterating runs one iteration of the attack at a time and yields the rows that have finished, usually none.  On an
    accelerator, it looks for them only every ``CHECK_EVERY`` iterations, because looking waits for the device.  Between
    two iterations, ``rows``, ``exhausted`` and the position of the source are the complete state: a new loop created
    from them continues exactly where this one stopped.

    Args:
        attack: the attack to run.
        model: the model, in evaluation mode.
        next_batch: returns at most the given number of new points, or None at the end.
        streams: returns the random streams of points, by index.
        classes: number of classes.
        batch_size: number of rows under attack; halved permanently when the device runs out of memory.
        rows: rows that are already under attack.
        exhausted: whether the source has no more points.
        form: a context for the iterations, such as a faster form of the model.
    """

    attack: IterativeAttack
    model: nn.Module
    next_batch: Callable[[int], Points | None]
    streams: Callable[[Tensor], PointRNG]
    classes: int
    batch_size: int
    rows: AttackState | None = None
    exhausted: bool = False
    form: AbstractContextManager[object] = field(default_factory=nullcontext)

    def __iter__(self) -> Iterator[AttackState]:
        num_steps = self.attack.num_steps(self.classes)
        until_check, nothing = 1, None
        while True:
            rows = self.rows
            vacant = self.batch_size - (0 if rows is None else len(rows))
            # Adding rows copies the state, so wait until an eighth of the batch is free.
            if not self.exhausted and vacant >= max(1, self.batch_size // 8):
                points = self.next_batch(vacant)
                self.exhausted = points is None
                if points is not None:
                    new = self.attack.init_state(points, self.streams(points.index))
                    if rows is None or not len(rows):
                        rows, nothing = new, new[:0]
                        until_check = 1 if new.x.device.type == "cpu" else min(CHECK_EVERY, num_steps)
                    else:
                        rows = AttackState.cat([rows, new])
            if rows is None or not len(rows):
                return
            self.rows = rows = self._step(rows)
            until_check -= 1
            if until_check and nothing is not None:
                yield nothing
                continue
            # Remove the rows that are done, before the next iteration.  This waits for the device once.
            progress = torch.where(rows.success, num_steps, rows.iteration).cpu()
            done = progress >= num_steps
            if done.all():
                self.rows = nothing = rows[:0]
                yield rows
            elif done.any():
                finished, rest = (m.nonzero().squeeze(1).to(rows.x.device, non_blocking=True) for m in (done, ~done))
                self.rows, nothing = rows[rest], rows[:0]
                yield rows[finished]
            else:
                nothing = rows[:0] if nothing is None else nothing
                yield nothing
            # On an accelerator, rows that succeed before the next check stay in the batch and do not change.
            waits = rows.x.device.type != "cpu" and len(self.rows)
            until_check = min(CHECK_EVERY, num_steps - int(progress[~done].max())) if waits else 1

    def _step(self, rows: AttackState) -> AttackState:
        """Run one iteration of all rows, in as many parts as memory requires."""
        if len(rows) <= self.batch_size:
            try:
                with self.form:
                    self.attack.step(self.model, rows)
                return rows
            except torch.OutOfMemoryError:
                # Attacks run the model before they change a row, so it is safe to try again.
                if len(rows) == 1:
                    raise
                self.batch_size = (len(rows) + 1) // 2
        parts = [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
        return AttackState.cat([self._step(part) for part in parts])


def ranked_targets(points: Points, count: int) -> Tensor:
    """Return at most ``count`` wrong classes for each point, largest clean logit first."""
    others = points.logits.scatter(1, points.y[:, None], -math.inf).argsort(dim=1, descending=True)
    return others[:, : min(count, others.shape[1] - 1)]


def current_target(rows: AttackState, iterations: int) -> Tensor:
    """Return the current target class of each row, ``(batch, 1)``; each in ``state["order"]`` gets ``iterations``."""
    order = rows.state["order"]
    return order.gather(1, (rows.iteration // iterations).clamp_max(order.shape[1] - 1)[:, None])


def anneal(progress: Tensor, first: float, last: float) -> Tensor:
    """Return values on a half cosine from ``first`` to ``last`` for progress from 0 to 1.

    >>> anneal(torch.tensor([0.0, 0.5, 1.0]), 1.0, 0.0)
    tensor([1.0000, 0.5000, 0.0000])
    """
    return last + (first - last) * (1 + torch.cos(math.pi * progress)) / 2


def adam(state: dict[str, Tensor], gradient: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Update Adam's moments ``mean`` and ``square`` in the state, and return the mean and its scale, both unbiased.

    A step is minus the learning rate times mean / scale.

    Args:
        state: state of the rows, with the moments.
        gradient: gradient of each row.
        count: number of steps of each row, including this one, in the data type of the gradient.
    """
    mean = state["mean"].lerp_(gradient, 1 - BETA_1)
    square = state["square"].mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
    scale = (square / per_point(1 - BETA_2**count, square)).sqrt_().add_(1e-8)
    return mean / per_point(1 - BETA_1**count, mean), scale


def where_rows(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Select whole rows with ``torch.where``: ``yes`` if ``mask``, else ``no``."""
    return torch.where(per_point(mask, yes), yes, no)


def assign_rows(target: Tensor, mask: Tensor, values: Tensor) -> None:
    """Copy the rows of ``values`` selected by ``mask``, usually few, into ``target``."""
    if target.device.type != "cpu":  # to select rows, the program would have to wait for the device
        torch.where(per_point(mask, target), values, target, out=target)
        return
    rows = mask.nonzero().squeeze(1)
    if len(rows):
        target[rows] = values[rows]


def draw_rows(target: Tensor, mask: Tensor, rows: AttackState, draw: Callable[..., Tensor], *values: Tensor) -> None:
    """Replace the rows of ``target`` selected by ``mask`` with ``draw(x, streams, *values)`` of these rows."""
    if target.device.type != "cpu":
        streams = rows.streams[:]
        assign_rows(target, mask, draw(rows.x, streams, *values))
        rows.streams.put_where(mask, streams)
        return
    selected = mask.nonzero().squeeze(1)
    if len(selected):
        streams = rows.streams[selected]
        target[selected] = draw(rows.x[selected], streams, *(value[selected] for value in values))
        rows.streams.put(selected, streams)
