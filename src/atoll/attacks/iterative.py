"""Attacks as loops over rows with clocks of their own, so that finished points leave and fresh ones take their place.

An iterative attack spends most of its passes on points that are broken already or will be in a few steps.  Here every
row of the batch carries all its state, its clock included: a row that is done is taken out, a new point is put in, and
the batch stays full.  Because a row's arithmetic and its random stream are its own, what happens to a point does not
depend on which points it shares a batch with.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.attacks.base import Attack, check_labels
from atoll.rng import PointRNG
from atoll.threat import per_point


@dataclass
class Points:
    """Points on their way into an attack: inputs, labels, which ones they are, and the model's clean logits."""

    x: Tensor
    y: Tensor
    index: Tensor
    logits: Tensor

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, rows: Tensor | slice) -> Points:
        return Points(self.x[rows], self.y[rows], self.index[rows], self.logits[rows])


@dataclass
class Rows:
    """The points under attack: for each row its input, label, candidate, clock, and whatever the attack keeps."""

    x: Tensor
    y: Tensor
    index: Tensor
    streams: PointRNG
    adv: Tensor  # the current candidate, adversarial where ``success``
    success: Tensor
    clock: Tensor  # iterations done
    state: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, keep: Tensor | slice) -> Rows:
        return self.of([self], lambda values: values[0][keep])

    @staticmethod
    def cat(parts: Sequence[Rows]) -> Rows:
        return Rows.of(parts, torch.cat)

    @staticmethod
    def of(parts: Sequence[Rows], make: Callable[[list[Tensor]], Tensor]) -> Rows:
        """Rows whose every tensor is made of those of some other rows."""
        tensors = [part.tensors() for part in parts]
        return Rows.from_tensors({name: make([part[name] for part in tensors]) for name in tensors[0]})

    def tensors(self) -> dict[str, Tensor]:
        """All there is, by name, to be saved."""
        own = {"x": self.x, "y": self.y, "index": self.index, "adv": self.adv}
        own |= {"success": self.success, "clock": self.clock, **self.streams.tensors()}
        return own | {f"state/{name}": value for name, value in self.state.items()}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> Rows:
        """What ``tensors`` gave."""
        state = {name.removeprefix("state/"): value for name, value in tensors.items() if name.startswith("state/")}
        own = {name: tensors[name] for name in ("x", "y", "index", "adv", "success", "clock")}
        return Rows(**own, streams=PointRNG.from_tensors(tensors), state=state)


class IterativeAttack(Attack):
    """An attack that advances rows by one iteration at a time; a subclass implements ``begin`` and ``advance``."""

    @abstractmethod
    def length(self, classes: int) -> int:
        """Iterations after which a row is done, if it has not succeeded before."""

    @abstractmethod
    def begin(self, points: Points, streams: PointRNG) -> tuple[Tensor, dict[str, Tensor]]:
        """First candidate and state of fresh rows; no model passes here, so that small refills cost nothing."""

    @abstractmethod
    def advance(self, model: nn.Module, rows: Rows) -> None:
        """One iteration of every row: look at the candidates, note successes in place, make the next candidates."""

    def rows(self, points: Points, streams: PointRNG) -> Rows:
        """Fresh rows for some points."""
        adv, state = self.begin(points, streams)
        zeros = torch.zeros_like(points.index)
        return Rows(points.x, points.y, points.index, streams, adv, zeros.bool(), zeros, state)

    def search(self, model: nn.Module, x: Tensor, y: Tensor, streams: PointRNG) -> Tensor:
        """On one batch: rows leave as they finish, and no others come."""
        with torch.no_grad():
            logits = model(x)
        check_labels(logits, y)
        feed = iter([Points(x, y, torch.arange(len(y), device=y.device), logits)])
        found = x.clone()
        drive = Drive(self, model, lambda _: next(feed, None), lambda index: streams[index], logits.shape[1], len(x))
        for rows in drive:
            found[rows.index] = rows.adv
        return found


class OneShot(IterativeAttack):
    """Any other attack as a single iteration; what it returns is taken as a claim for the caller to confirm."""

    def __init__(self, attack: Attack) -> None:
        super().__init__(attack.threat)
        self.attack = attack

    def length(self, classes: int) -> int:
        return 1

    def begin(self, points: Points, streams: PointRNG) -> tuple[Tensor, dict[str, Tensor]]:
        return points.x, {}

    def advance(self, model: nn.Module, rows: Rows) -> None:
        rows.adv = self.attack.search(model, rows.x, rows.y, rows.streams).detach()
        rows.success |= True
        rows.clock += 1


@dataclass
class Drive:
    """An attack on its way through all points of a feed.

    Iterating makes one iteration of the attack at a time and yields the rows that have finished, mostly none.  Between
    two iterations ``rows`` and ``exhausted`` (and where the feed is) are all there is to know: a drive made with them
    goes on exactly where this one was.

    Args:
        attack: what to run.
        model: in evaluation mode.
        feed: gives up to so many further points, None when there are no more.
        streams: the random streams of points, by index.
        classes: how many the model has.
        batch_size: rows under attack at a time; halved for good when the device runs out of memory.
        rows: rows under attack already.
        exhausted: whether the feed has ended.
    """

    attack: IterativeAttack
    model: nn.Module
    feed: Callable[[int], Points | None]
    streams: Callable[[Tensor], PointRNG]
    classes: int
    batch_size: int
    rows: Rows | None = None
    exhausted: bool = False

    def __iter__(self) -> Iterator[Rows]:
        length = self.attack.length(self.classes)
        while True:
            rows = self.rows
            vacant = self.batch_size - (0 if rows is None else len(rows))
            # Taking rows in copies the state, so it waits until an eighth of the batch is free.
            if not self.exhausted and vacant >= max(1, self.batch_size // 8):
                points = self.feed(vacant)
                self.exhausted = points is None
                if points is not None:
                    fresh = self.attack.rows(points, self.streams(points.index))
                    rows = fresh if rows is None or not len(rows) else Rows.cat([rows, fresh])
            if rows is None or not len(rows):
                return
            rows = self._advance(rows)
            # Rows go as soon as they are done: another iteration would be one more than they are due.
            done = rows.success | (rows.clock >= length)
            finished = done.nonzero().squeeze(1)
            self.rows = rows[(~done).nonzero().squeeze(1)] if len(finished) else rows
            yield rows[finished] if len(finished) else rows[:0]

    def _advance(self, rows: Rows) -> Rows:
        """One iteration of all rows, in as many parts as memory asks for."""
        if len(rows) <= self.batch_size:
            try:
                self.attack.advance(self.model, rows)
                return rows
            except torch.OutOfMemoryError:
                # Attacks look at the model before they change a row, so nothing has happened yet.
                if len(rows) == 1:
                    raise
                self.batch_size = (len(rows) + 1) // 2
        parts = [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
        return Rows.cat([self._advance(part) for part in parts])


def choose(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """``yes`` in the rows where ``mask``, ``no`` in the others."""
    return torch.where(per_point(mask, yes), yes, no)


def put(into: Tensor, mask: Tensor, values: Tensor) -> None:
    """Rows of ``values`` take the place of those of ``into`` where ``mask``; mostly few, so only those are touched."""
    chosen = mask.nonzero().squeeze(1)
    if len(chosen):
        into[chosen] = values[chosen]
