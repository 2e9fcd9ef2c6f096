"""Boundary search: the closest point with another prediction for every input, on both sides of the boundary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from atoll.attacks.fab import FAB
from atoll.attacks.iterative import AttackState, Points, where_rows
from atoll.attacks.rays import FAR, RayS
from atoll.errors import InputError, check_count
from atoll.measure import OnProgress
from atoll.modules import evaluation_mode
from atoll.rng import PointRNG, content_hash
from atoll.threat import Bounds, Norm, ThreatModel, per_point

BUDGET = 400  # model calls per point
NONE = "none"  # method of points for which the search failed
# Number of runs in each round, by the number of initial runs; each round gets about the same number of iterations.
ROUNDS = {9: (9, 3, 1), 3: (3, 1), 1: (1,)}
CLEAN = {9: 2, 3: 1, 1: 0}  # number of runs that start at the clean point if there are enough examples
COARSE = 3  # bisections toward an example before FAB starts there, because it only has to be close to the boundary


@dataclass(frozen=True)
class BoundaryPoints:
    """Points on both sides of the decision boundary, one pair per input, and how the search found them.

    Args:
        x: the inputs.
        prediction: the predicted class of each input.
        x_inside: a point on the line from x to ``x_outside`` that still has this class.
        x_outside: the closest known point with another class.
        other: the class of ``x_outside``.
        distance: distance from x to ``x_outside``; infinite if the search failed.
        method: how the point was found: ``FAB from examples``, ``FAB from clean``, ``example`` (an example with another
            prediction, because no attack got closer), ``RayS``, or ``none``.
        forward: number of forward passes for each point.
        backward: number of backward passes for each point.
        shared_forward: number of forward passes for the examples, which all points share.
        norm: norm of the distance.
        tolerance: distance between ``x_inside`` and ``x_outside`` as a share of the bisected segment.

    If the search failed for an input, ``x_inside`` and ``x_outside`` are the input itself, and ``notes`` reports it.
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
        """Whether each input has a boundary point."""
        return self.distance.isfinite()

    @property
    def calls(self) -> Tensor:
        """Number of model passes per point, forward and backward."""
        return self.forward + self.backward

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user, if some inputs have no boundary point."""
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
    """Inputs with their predictions, from which a search may start."""

    x: Tensor
    classes: Tensor


class Strategy(Protocol):
    """A strategy that searches for a point with another prediction, within a number of model calls per point.

    The model is in evaluation mode, and the labels of the points are its predictions.  ``boundary_search`` verifies and
    bisects the results of a strategy.
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
    r"""Find the closest point with another prediction for each input, then bisect to reach the boundary.

    The default strategy, ``multi_start_fab``, lets several runs of FAB compete.  Most of them start at the nearest
    examples with another prediction, so every input has a boundary point if any example or input has another
    prediction.  If there is none, and gradients do not lead to one, RayS searches with predicted labels only.

    The result for a point depends on the point, the model, the examples and the seed, not on the batch size (up to
    rounding).

    Args:
        model: maps inputs to logits.  The search switches it to evaluation mode and restores its state.
        x: inputs; no labels are needed, because the search uses the predicted classes.
        norm: norm of the distances.
        strategy: the search strategy (default: ``multi_start_fab``).
        budget: maximum number of forward plus backward passes per point.
        pool: examples to start from, such as training images (default: the inputs themselves).  Their predictions are
            computed once and counted separately.
        seed: seed for strategies that draw random numbers; ``multi_start_fab`` draws none.
        tolerance: distance between the two sides of the boundary as a share of the bisected segment.
        bounds: valid range of inputs.
        batch_size: number of rows per pass; the search stores nine times as many images.
        on_progress: called with ``boundary``, the number of finished points, and the total.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> boundary = boundary_search(model, torch.tensor([[0.6, 0.4], [0.2, 0.5]]))
    >>> [f"{d:.3f}" for d in boundary.distance], boundary.other.tolist(), bool((boundary.calls <= 400).all())
    (['0.141', '0.212'], [1, 0], True)
    """
    if not 0 < tolerance < 1:
        raise InputError(f"tolerance: expected a number between 0 and 1, got {tolerance}")
    check_count(1, batch_size=batch_size)
    threat = ThreatModel(norm, 0.0, bounds)
    threat.require_convex("norm")
    for inputs in (x,) if pool is None else (x, pool):
        threat.check(inputs)
    if x.dim() < 2 or not len(x) or (pool is not None and pool.shape[1:] != x.shape[1:]):
        shapes = f"{tuple(x.shape)}" if pool is None else f"{tuple(x.shape)} and {tuple(pool.shape)}"
        raise InputError(f"inputs: expected (points, ...), and a pool of the same shape, got {shapes}")
    halvings = math.ceil(math.log2(1 / tolerance))
    fixed = 2 + halvings  # clean pass, confirmation of the strategy's point, bisection
    least = fixed + COARSE + 2  # plus one step of FAB from an example
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
    """Return an index that identifies points by their content instead of their position in the batch."""
    return torch.tensor([content_hash(point) for point in x], device=x.device)


def _both_sides(
    model: nn.Module, threat: ThreatModel, points: Points, state: SearchState, halvings: int
) -> dict[str, Tensor]:
    """Bisect the points of a strategy, if a plain forward pass confirms that they have another class."""
    x, y = points.x, points.y
    sides = {"x_inside": x.clone(), "x_outside": x.clone(), "other": y.clone()}
    rows = torch.tensor([row for row, name in enumerate(state.method) if name != NONE], device=x.device, dtype=y.dtype)
    if len(rows):
        classes = model(state.x_adv[rows]).argmax(1)
        confirmed = classes != y[rows]
        bisected = bisect(model, x[rows], y[rows], state.x_adv[rows], classes, halvings)
        for side, part in zip(sides.values(), bisected, strict=True):
            side[rows[confirmed]] = part[confirmed]
        state.count(rows, 1 + halvings)
    success = sides["other"] != y
    state.method = [name if succeeded else NONE for name, succeeded in zip(state.method, success.tolist(), strict=True)]
    distance = torch.where(success, threat.distance(sides["x_outside"], x), math.inf)
    passes = {"forward": state.forward + 1, "backward": state.backward}  # including the clean pass
    return {**sides, "distance": distance, **passes}


@dataclass
class SearchState:
    """The closest points with another prediction so far, how they were found, and the number of passes.

    If there is none yet, it is the point itself, and the method is ``none``.
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
        """Store the points that a method found for some rows."""
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
    """Return both sides of the boundary between each point and an end of another class, and the class of the latter.

    All returned points have passed through the model unchanged.  Costs ``halvings`` forward passes.

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
    """The distribution of model calls for a point.

    Args:
        rounds: the number of runs and the number of iterations per run, for each round.
        examples: number of runs that start at examples; the others start at the clean point.
    """

    rounds: tuple[tuple[int, int], ...]
    examples: int

    @property
    def runs(self) -> int:
        return self.rounds[0][0]

    @property
    def iterations(self) -> int:
        """Number of iterations of all runs; each is a forward and a backward pass."""
        return sum(runs * length for runs, length in self.rounds)

    @property
    def forward(self) -> int:
        return COARSE * self.examples + self.iterations


def plan(calls: int, examples: int, others: int) -> Plan:
    """Return the rounds for a number of calls, given the number of examples and of other classes.

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
        if iterations >= 2 * most * len(shape):  # with fewer than two steps, a round would select at random
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
    """Run FAB from several starts and continue the best runs longest.

    FAB from the clean point follows the gradients there, which are misleading for robust models.  A run that starts
    across the boundary, at an example with another prediction, has already succeeded when it starts, and reaches parts
    of the boundary to which the gradient does not point (Brendel et al., 2019, also start there).  After each round,
    the runs with the closest points continue from their state (successive halving, Jamieson & Talwalkar, 2016).

    This is a ``Strategy``.  It uses the nearest examples with another prediction, seven if there are more than two
    classes.  If there are none, half of the calls are reserved for RayS, which needs no gradients.  It draws no random
    numbers.
    """
    if not math.isfinite(calls):
        raise InputError(f"budget: expected a finite number of calls, got {calls}")
    state = SearchState.start(points)
    logits, y = points.logits, points.y
    apart = _distances(threat, points.x, examples.x).masked_fill(examples.classes[None] == y[:, None], math.inf)
    order = logits.scatter(1, y[:, None], -math.inf).argsort(dim=1, descending=True)
    available = apart.isfinite().sum(1).clamp_max(max(ROUNDS))
    # The plan of a point depends only on its number of examples, not on the other points of the batch.
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
    # Not by a matrix product, which is faster but whose rounding depends on the batch size.
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
    """Run all rounds and return, for each point, the closest point, its distance (infinite if none), and the run."""
    attack = FAB(threat, targets=1, steps=schedule.iterations + 1, minimum_norm=True)
    count, runs = targets.shape
    origin = torch.arange(count, device=targets.device).repeat_interleave(runs)
    every = points[origin]
    # FAB chooses its target by the logits.
    every.logits = torch.zeros_like(every.logits).scatter(1, targets.reshape(-1, 1), 1.0)
    rows = attack.init_state(every, PointRNG("FAB", index=every.index))  # draws nothing with a single run
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
    """Return the ``left`` rows with the closest results for each point; in case of ties, the first."""
    runs = len(rows) // points
    if runs == left:
        return rows
    order = rows.state["closest"].view(points, runs).argsort(dim=1, stable=True)[:, :left].sort(1).values
    first = torch.arange(points, device=order.device)[:, None] * runs
    return rows[(first + order).flatten()]


def _rays(
    model: nn.Module, threat: ThreatModel, points: Points, state: SearchState, rows: Tensor, queries: int
) -> None:
    """Search with RayS, which uses only predicted labels, for any point with another prediction."""
    reach = FAR if threat.bounds is None else threat.bounds[1] - threat.bounds[0]
    attack, part = RayS(ThreatModel("linf", reach, threat.bounds), queries=queries), points[rows]
    search = attack.init_state(part, PointRNG("RayS", index=part.index))  # draws nothing
    while (active := ~search.success & (search.iteration < queries)).any():
        attack.step(model, search)
        state.count(rows, active.long())
    state.record(rows[search.success], search.x_adv[search.success], "RayS")
