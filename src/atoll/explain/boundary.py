"""The closest point with another prediction for every input, and the two sides of the boundary there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from atoll.attacks.evaluate import OnProgress
from atoll.attacks.fab import FAB
from atoll.attacks.iterative import AttackState, Points, where_rows
from atoll.attacks.rays import FAR, RayS
from atoll.errors import InputError, check_range
from atoll.modules import evaluation_mode
from atoll.rng import PointRNG, content_hash
from atoll.threat import Bounds, Norm, ThreatModel, per_point

BUDGET = 400  # model calls per point
NONE = "none"  # the method of points for which nothing was found
# Runs that are left in each round, by how many begin; every round gets about an equal share of the iterations.
ROUNDS = {9: (9, 3, 1), 3: (3, 1), 1: (1,)}
CLEAN = {9: 2, 3: 1, 1: 0}  # how many of them begin at the clean point if there are enough examples
COARSE = 3  # halvings of the way to an example before FAB starts there: it only has to be roughly on the boundary


@dataclass(frozen=True)
class BoundaryPoints:
    """Points on both sides of the decision boundary, one pair for each input, and how the search got there.

    Args:
        x: the inputs.
        prediction: the class of each.
        x_inside: a point that still has this class (by a forward pass), on the way from x to ``x_outside``.
        x_outside: the closest point known that has another class.
        other: the class of that point.
        distance: from x to ``x_outside`` in the norm; infinite if there is none.
        method: what led there: ``FAB from examples``, ``FAB from clean``, ``example`` (an example of another
            prediction; no attack got closer), ``RayS``, or ``none``.
        forward: forward passes spent on each point.
        backward: backward passes.
        shared_forward: passes that belong to no single point: predictions of the examples.
        norm: of the distance.
        tolerance: distance between ``x_inside`` and ``x_outside`` as a share of the segment that was bisected.

    If the search failed for an input, ``x_inside`` and ``x_outside`` are the input itself, and ``notes`` says so.
    """

    x: Tensor
    prediction: Tensor
    x_inside: Tensor
    x_outside: Tensor
    other: Tensor
    distance: Tensor
    method: tuple[str, ...]
    forward: Tensor
    backward: Tensor
    shared_forward: int
    norm: Norm
    tolerance: float

    def __len__(self) -> int:
        return len(self.x)

    @property
    def success(self) -> Tensor:
        """Which inputs have a boundary point."""
        return self.distance.isfinite()

    @property
    def calls(self) -> Tensor:
        """Model passes per point, forward and backward."""
        return self.forward + self.backward

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know: that some inputs have no boundary point."""
        missing = ~self.success
        if not missing.any():
            return ()
        classes = ", ".join(map(str, sorted(set(self.prediction[missing].tolist()))))
        return (
            f"boundary: no other prediction was found for {int(missing.sum())} of {len(self)} inputs (class {classes});"
            " the model may be constant",
        )

    def __getitem__(self, rows: slice | Tensor) -> BoundaryPoints:
        numbers = torch.arange(len(self), device=self.x.device)[rows].tolist()
        tensors = {name: value[rows] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return BoundaryPoints(**vars(self) | tensors | {"method": tuple(self.method[i] for i in numbers)})


@dataclass(frozen=True)
class Examples:
    """Inputs with the model's predictions, to start from."""

    x: Tensor
    classes: Tensor


class Strategy(Protocol):
    """Looks for a point with another prediction for each point, within a number of model calls per point.

    The model is in evaluation mode, and the labels of the points are its predictions.  ``boundary_search`` checks and
    bisects what a strategy returns.
    """

    def __call__(
        self,
        model: nn.Module,
        threat: ThreatModel,
        points: Points,
        examples: Examples,
        calls: float,
        *,
        seed: object,
        batch_size: int,
    ) -> SearchState: ...


def boundary_search(
    model: nn.Module,
    x: Tensor,
    *,
    norm: Norm = "l2",
    strategy: Strategy | None = None,
    budget: float = BUDGET,
    pool: Tensor | None = None,
    seed: object = 0,
    tolerance: float = 1e-3,
    bounds: Bounds | None = (0.0, 1.0),
    batch_size: int = 256,
    on_progress: OnProgress | None = None,
) -> BoundaryPoints:
    r"""Find for each input the closest point with another prediction, then bisect onto the boundary.

    The default strategy, ``multi_start_fab``, lets several runs of FAB compete.  Most of them start at the nearest
    examples of another prediction, so every input has a boundary point if any example or input has another prediction.
    If there is none, and no gradient leads to one, RayS searches by labels alone.

    The result for a point depends on the point, the model, the examples and the seed, not on the batch size (up to
    rounding).

    Args:
        model: any module from inputs to logits.  The search uses evaluation mode and restores the model's state.
        x: inputs; the model's own prediction is the class, so no labels are needed.
        norm: of the distances.
        strategy: how to search (default: ``multi_start_fab``).
        budget: model calls per point, forward and backward counted one each; never exceeded.
        pool: examples to start from, such as training images (default: the inputs themselves).  Their predictions are
            made once and counted apart.
        seed: for strategies that draw random numbers; ``multi_start_fab`` draws none.
        tolerance: distance between the two sides of the boundary as a share of the segment that is bisected.
        bounds: valid range of inputs.
        batch_size: rows that go through the model together; the search stores nine times as many images.
        on_progress: called with ``boundary``, how many points are done, and of how many.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> boundary = boundary_search(model, torch.tensor([[0.6, 0.4], [0.2, 0.5]]))
    >>> [f"{d:.3f}" for d in boundary.distance], boundary.other.tolist(), bool((boundary.calls <= 400).all())
    (['0.141', '0.212'], [1, 0], True)
    """
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance: expected a share between 0 and 1, got {tolerance}")
    check_range("[1, inf)", batch_size=batch_size)
    threat = ThreatModel(norm, 0.0, bounds)
    for inputs in (x,) if pool is None else (x, pool):
        threat.check(inputs)
    if x.dim() < 2 or not len(x) or (pool is not None and pool.shape[1:] != x.shape[1:]):
        shapes = f"{tuple(x.shape)}" if pool is None else f"{tuple(x.shape)} and {tuple(pool.shape)}"
        raise InputError(f"inputs: expected (points, ...), and a pool of the same shape, got {shapes}")
    halvings = math.ceil(math.log2(1 / tolerance))
    fixed = 2 + halvings  # the clean pass, the one that confirms the strategy's point, bisection
    least = fixed + COARSE + 2  # one step of FAB, from an example
    if not budget >= least:
        raise InputError(f"budget: expected at least {least} calls at this tolerance, got {budget}")
    strategy = strategy or multi_start_fab
    parts: list[dict[str, Tensor]] = []
    methods: list[str] = []
    with evaluation_mode(model), torch.no_grad():
        logits = _logits(model, x, batch_size)
        points = Points(x.detach(), logits.argmax(1), content_index(x), logits)
        examples = Examples(points.x, points.y)
        if pool is not None:
            pool = pool.detach().to(x)
            examples = Examples(pool, _logits(model, pool, batch_size).argmax(1))
        for start in range(0, len(x), batch_size):
            part = points[start : start + batch_size]
            state = strategy(model, threat, part, examples, budget - fixed, seed=seed, batch_size=batch_size)
            parts.append(_both_sides(model, threat, part, state, halvings))
            methods += state.method
            if on_progress is not None:
                on_progress("boundary", start + len(part), len(x))
    return BoundaryPoints(
        x=points.x,
        prediction=points.y,
        **{name: torch.cat([part[name] for part in parts]) for name in parts[0]},
        method=tuple(methods),
        shared_forward=0 if pool is None else len(pool),
        norm=norm,
        tolerance=tolerance,
    )


def _logits(model: nn.Module, x: Tensor, batch_size: int) -> Tensor:
    logits = torch.cat([model(part) for part in torch.split(x.detach(), batch_size)])
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise InputError(f"model: expected logits of shape (batch, classes), got {tuple(logits.shape)}")
    if not logits.isfinite().all():
        raise InputError("model: expected finite logits, got NaN or infinity")
    return logits


def content_index(x: Tensor) -> Tensor:
    """Points are identified by their content, not by their place in the batch."""
    return torch.tensor([content_hash(point) for point in x], device=x.device)


def _both_sides(
    model: nn.Module, threat: ThreatModel, points: Points, state: SearchState, halvings: int
) -> dict[str, Tensor]:
    """The search's results by bisection; a point of the strategy counts only if a plain pass confirms its class."""
    x, y = points.x, points.y
    sides = {"x_inside": x.clone(), "x_outside": x.clone(), "other": y.clone()}
    rows = torch.tensor([row for row, name in enumerate(state.method) if name != NONE], device=x.device, dtype=y.dtype)
    if len(rows):
        classes = model(state.x_adv[rows]).argmax(1)
        holds = classes != y[rows]
        bisected = bisect(model, x[rows], y[rows], state.x_adv[rows], classes, halvings)
        for whole, part in zip(sides.values(), bisected, strict=True):
            whole[rows[holds]] = part[holds]
        state.count(rows, 1 + halvings)
    success = sides["other"] != y
    state.method = [name if holds else NONE for name, holds in zip(state.method, success.tolist(), strict=True)]
    distance = torch.where(success, threat.distance(sides["x_outside"], x), math.inf)
    passes = {"forward": state.forward + 1, "backward": state.backward}  # with the clean pass
    return {**sides, "distance": distance, **passes}


@dataclass
class SearchState:
    """The closest points with another prediction so far, how they came about, and how many passes they cost.

    Where there is none yet, it is the point itself, and the method ``none``.
    """

    x_adv: Tensor
    method: list[str]
    forward: Tensor
    backward: Tensor

    @staticmethod
    def start(points: Points) -> SearchState:
        zeros = torch.zeros_like(points.y)
        return SearchState(points.x.clone(), [NONE] * len(points), zeros, zeros.clone())

    def record(self, rows: Tensor, x_adv: Tensor, method: str | Sequence[str]) -> None:
        """Store the points that a method gives for some rows."""
        self.x_adv[rows] = x_adv
        for number, row in enumerate(rows.tolist()):
            self.method[row] = method if isinstance(method, str) else method[number]

    def count(self, rows: Tensor, forward: int | Tensor, backward: int = 0) -> None:
        """Add model passes of some rows."""
        self.forward[rows] += forward
        self.backward[rows] += backward


def bisect(
    model: nn.Module, x: Tensor, y: Tensor, ends: Tensor, classes: Tensor, halvings: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Both sides of the boundary on the way from each point to an end of another class, and the class there.

    Every point that is returned has gone through the model as it is.  Costs ``halvings`` forward passes.

    >>> model = nn.Linear(1, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[0.0], [1.0]]))  # the boundary is at 0
    >>> bisect(model, torch.tensor([[-1.0]]), torch.tensor([0]), torch.tensor([[2.0]]), torch.tensor([1]), 2)
    (tensor([[-0.2500]]), tensor([[0.5000]]), tensor([1]))
    """
    x_inside, x_outside = x, ends
    low = x.new_zeros(len(x))
    high = torch.ones_like(low)
    for _ in range(halvings):
        middle = (low + high) / 2
        candidate = x + per_point(middle, x) * (ends - x)
        with torch.no_grad():
            predicted = model(candidate).argmax(1)
        over = predicted != y
        x_inside, x_outside = where_rows(over, x_inside, candidate), where_rows(over, candidate, x_outside)
        classes = torch.where(over, predicted, classes)
        low, high = torch.where(over, low, middle), torch.where(over, middle, high)
    return x_inside, x_outside, classes


@dataclass(frozen=True)
class Plan:
    """How the model calls for a point are spent.

    Args:
        rounds: for each round how many runs there are, and how many iterations each of them makes.
        examples: how many of the runs begin at examples; the others begin at the clean point.
    """

    rounds: tuple[tuple[int, int], ...]
    examples: int

    @property
    def runs(self) -> int:
        return self.rounds[0][0]

    @property
    def iterations(self) -> int:
        """Of all runs together; each is a forward and a backward pass."""
        return sum(runs * length for runs, length in self.rounds)

    @property
    def forward(self) -> int:
        return COARSE * self.examples + self.iterations


def plan(calls: int, examples: int, others: int) -> Plan:
    """The rounds for a number of calls, given how many examples and how many other classes there are.

    >>> plan(388, 1000, 9)
    Plan(rounds=((9, 6), (3, 20), (1, 69)), examples=7)
    >>> plan(60, 1000, 9)
    Plan(rounds=((3, 4), (1, 15)), examples=2)
    >>> plan(388, 0, 1)  # two classes and no example: there is one run
    Plan(rounds=((1, 194),), examples=0)
    """
    for most, shape in ROUNDS.items():
        starts = min(examples, most - min(CLEAN[most], others))
        iterations = (calls - COARSE * starts) // 2
        if iterations >= 2 * most * len(shape):  # with fewer than two steps a round would select at random
            break
    runs = min(most, starts + others)
    counts = sorted({min(runs, count) for count in shape}, reverse=True)
    lengths = [iterations // len(counts) // count for count in counts[:-1]]
    left = iterations - sum(count * length for count, length in zip(counts, lengths, strict=False))
    return Plan(tuple(zip(counts, [*lengths, left // counts[-1]], strict=True)), starts)


def multi_start_fab(
    model: nn.Module,
    threat: ThreatModel,
    points: Points,
    examples: Examples,
    calls: float,
    *,
    seed: object = 0,
    batch_size: int,
) -> SearchState:
    """The closest points with another prediction that FAB finds from several starts, the best runs longest.

    FAB from the clean point follows the gradients it meets there, and on robust models these mislead.  A run that
    starts across the boundary, at an example of another prediction, has found something before it begins, and leads to
    parts of the boundary that the gradient does not point to (Brendel et al., 2019, also start there).  After each
    round the runs with the closest points continue with all their state (successive halving, Jamieson & Talwalkar,
    2016).

    A ``Strategy``: of the examples, the nearest of another prediction are used, seven if there are more than two
    classes.  If there are none, half of the calls are reserved for RayS, which needs no gradient.  Nothing is drawn.
    """
    if not math.isfinite(calls):
        raise InputError(f"budget: expected a finite number of calls, got {calls}")
    state = SearchState.start(points)
    logits, y = points.logits, points.y
    apart = _distances(threat, points.x, examples.x).masked_fill(examples.classes[None] == y[:, None], math.inf)
    order = logits.scatter(1, y[:, None], -math.inf).argsort(dim=1, descending=True)
    available = apart.isfinite().sum(1).clamp_max(max(ROUNDS))
    # Points with as many examples have the same plan, and no point has another one because of its company.
    for count in sorted(set(available.tolist())):
        rows = (available == count).nonzero().squeeze(1)
        schedule = plan(int(calls if count else calls // 2), count, logits.shape[1] - 1)
        part, clean = points[rows], schedule.runs - schedule.examples
        near = apart[rows].topk(schedule.examples, dim=1, largest=False).indices
        starts = [
            bisect(model, part.x, part.y, examples.x[column], examples.classes[column], COARSE)[1]
            for column in near.unbind(1)
        ]
        targets = torch.cat([examples.classes[near], order[rows, :clean]], 1)
        begin = torch.stack([*starts, *[part.x] * clean], 1)
        adv, distance, run = _compete(model, threat, part, begin, targets, schedule, batch_size)
        state.count(rows, schedule.forward, schedule.iterations)
        hit = distance.isfinite()
        still = torch.eq(adv, begin[torch.arange(len(run), device=run.device), run]).flatten(1).all(1)
        names = [
            "FAB from clean" if number >= schedule.examples else "example" if same else "FAB from examples"
            for number, same in zip(run[hit].tolist(), still[hit].tolist(), strict=True)
        ]
        state.record(rows[hit], adv[hit], names)
        if not count and not hit.all():
            _rays(model, threat, points, state, rows[~hit], int(calls) - 2 * schedule.iterations)
    return state


def _distances(threat: ThreatModel, x: Tensor, examples: Tensor) -> Tensor:
    # The quick way to l2 distances, by a matrix product, rounds by the size of the batch.
    p = {"linf": math.inf, "l2": 2.0, "l1": 1.0}[threat.norm]
    return torch.cdist(x.flatten(1), examples.flatten(1), p=p, compute_mode="donot_use_mm_for_euclid_dist")


def _compete(
    model: nn.Module,
    threat: ThreatModel,
    points: Points,
    starts: Tensor,
    targets: Tensor,
    schedule: Plan,
    batch_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """All runs of all points; for each point the closest place, its distance (infinite if there is none), the run."""
    attack = FAB(threat, targets=1, steps=schedule.iterations + 1, minimum_norm=True)
    count, runs = targets.shape
    origin = torch.arange(count, device=targets.device).repeat_interleave(runs)
    every = points[origin]
    # FAB takes its target from the logits.
    every.logits = torch.zeros_like(every.logits).scatter(1, targets.reshape(-1, 1), 1.0)
    rows = attack.init_state(every, PointRNG("FAB", index=every.index))  # one run each: nothing is drawn
    rows.state["iterate"] = starts.flatten(0, 1)
    rows.state["run"] = torch.arange(runs, device=targets.device).repeat(count)
    for left, length in schedule.rounds:
        rows = _best(rows, count, left)
        parts = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
        for part in parts:
            for _ in range(length):
                attack.step(model, part)
        rows = AttackState.cat(parts)
    rows = _best(rows, count, 1)
    return rows.x_adv, rows.state["closest"], rows.state["run"]


def _best(rows: AttackState, points: int, left: int) -> AttackState:
    """The ``left`` rows of each point with the closest points; of equal ones the first."""
    runs = len(rows) // points
    if runs == left:
        return rows
    order = rows.state["closest"].view(points, runs).argsort(dim=1, stable=True)[:, :left].sort(1).values
    first = torch.arange(points, device=order.device)[:, None] * runs
    return rows[(first + order).flatten()]


def _rays(
    model: nn.Module, threat: ThreatModel, points: Points, state: SearchState, rows: Tensor, queries: int
) -> None:
    """Labels alone, along rays to corners of the bounds: any point with another prediction will do."""
    reach = FAR if threat.bounds is None else threat.bounds[1] - threat.bounds[0]
    attack, part = RayS(ThreatModel("linf", reach, threat.bounds), queries=queries), points[rows]
    under = attack.init_state(part, PointRNG("RayS", index=part.index))  # draws nothing
    while (active := ~under.success & (under.iteration < queries)).any():
        attack.step(model, under)
        state.count(rows, active.long())
    state.record(rows[under.success], under.x_adv[under.success], "RayS")
