"""Attacks as loops over rows with clocks of their own, so that finished points leave and fresh ones take their place.

An iterative attack spends most of its passes on points that are broken already or will be in a few steps.  Here every
row of the batch carries all its state, its clock included: a row that is done is taken out, a new point is put in, and
the batch stays full.  Because a row's arithmetic and its random stream are its own, what happens to a point does not
depend on which points it shares a batch with.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.attacks.base import Attack, check_labels
from atoll.streams import Streams
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
    streams: Streams
    adv: Tensor  # the current candidate, adversarial where ``success``
    success: Tensor
    clock: Tensor  # iterations done
    state: dict[str, Tensor]

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, keep: Tensor) -> Rows:
        return Rows(
            self.x[keep],
            self.y[keep],
            self.index[keep],
            self.streams[keep],
            self.adv[keep],
            self.success[keep],
            self.clock[keep],
            {name: value[keep] for name, value in self.state.items()},
        )

    @staticmethod
    def cat(a: Rows, b: Rows) -> Rows:
        def join(u: Tensor, v: Tensor) -> Tensor:
            return torch.cat([u, v])

        return Rows(
            join(a.x, b.x),
            join(a.y, b.y),
            join(a.index, b.index),
            Streams.cat([a.streams, b.streams]),
            join(a.adv, b.adv),
            join(a.success, b.success),
            join(a.clock, b.clock),
            {name: join(value, b.state[name]) for name, value in a.state.items()},
        )


class RowAttack(Attack):
    """An attack that advances rows by one iteration at a time; a subclass implements ``begin`` and ``advance``."""

    @abstractmethod
    def length(self, classes: int) -> int:
        """Iterations after which a row is done, if it has not succeeded before."""

    @abstractmethod
    def begin(self, points: Points, streams: Streams) -> tuple[Tensor, dict[str, Tensor]]:
        """First candidate and state of fresh rows; no model passes here, so that small refills cost nothing."""

    @abstractmethod
    def advance(self, model: nn.Module, rows: Rows) -> None:
        """One iteration of every row: look at the candidates, note successes in place, make the next candidates."""

    def rows(self, points: Points, streams: Streams) -> Rows:
        """Fresh rows for some points."""
        adv, state = self.begin(points, streams)
        zeros = torch.zeros_like(points.index)
        return Rows(points.x, points.y, points.index, streams, adv, zeros.bool(), zeros, state)

    def search(self, model: nn.Module, x: Tensor, y: Tensor, streams: Streams) -> Tensor:
        """On one batch: rows leave as they finish, and no others come."""
        with torch.no_grad():
            logits = model(x)
        feed = iter([Points(x, y, torch.arange(len(y), device=y.device), logits)])
        found = x.clone()
        for rows in drive(self, model, lambda _: next(feed, None), lambda index: streams[index], batch_size=len(x)):
            found[rows.index] = rows.adv
        return found


def drive(
    attack: RowAttack,
    model: nn.Module,
    feed: Callable[[int], Points | None],
    streams: Callable[[Tensor], Streams],
    *,
    batch_size: int,
) -> Iterator[Rows]:
    """Run an attack on all points of a feed; yields rows as they finish, in no particular order.

    Args:
        attack: what to run.
        model: in evaluation mode.
        feed: gives up to so many further points, None when there are no more.
        streams: the random streams of points, by index.
        batch_size: rows under attack at a time.
    """
    rows: Rows | None = None
    length = 0
    exhausted = False
    # Taking rows out and in copies the state, so it waits until an eighth of the batch is due.
    due = max(1, batch_size // 8)
    while True:
        vacant = batch_size - (len(rows) if rows is not None else 0)
        if not exhausted and vacant >= due:
            points = feed(vacant)
            exhausted = points is None
            if points is not None:
                check_labels(points.logits, points.y)  # here, once, and not in every iteration
                length = attack.length(points.logits.shape[1])
                fresh = attack.rows(points, streams(points.index))
                rows = fresh if rows is None or not len(rows) else Rows.cat(rows, fresh)
        if rows is None or not len(rows):
            return
        attack.advance(model, rows)
        done = rows.success | (rows.clock >= length)
        count = int(done.sum())
        if count >= due or (exhausted and 8 * count >= len(rows)):
            yield rows[done]
            rows = rows[~done]


def choose(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """``yes`` in the rows where ``mask``, ``no`` in the others."""
    return torch.where(per_point(mask, yes), yes, no)
