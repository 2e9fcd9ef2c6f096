"""Certificates of Centroid Nets: distances to where a centroid of another class would be nearest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from atoll.certify.certificate import Certificate
from atoll.certify.lipschitz import UNIT_ROUNDOFF, Bound, LayerBound, gamma, lipschitz_of_body
from atoll.certify.norms import BUDGET
from atoll.certify.polyhedra import distance_bounds
from atoll.models.centroid import CentroidNet, EtaLayer
from atoll.modules import evaluation_mode

CHUNK = 2**22  # numbers that are looked at together
OWN = 4  # own centroids, from the nearest on, that a bisecting plane is drawn for
REFINED_OWN = 24  # the same when all planes are used together,
REFINED_OTHER = 8  # for this many other centroids at a time


class NearestCentroid:
    r"""Certifies a ``CentroidNet`` whose encoder has a Lipschitz constant L.

    The class can only change to that of a centroid c at features z' to which c is at least as close as every centroid
    p of the predicted class.  For a single p these z' are a half-space, at the distance

    .. math:: \frac{\|z - c\|^2 - \|z - p\|^2}{2 \|c - p\|}

    from z, so the largest of these over some p bounds the distance to c's region, the smallest over all c the distance
    to any other class, and that divided by L is a radius.  With ``radii`` the p are taken together where that decides
    about one of these radii: c's region is a polyhedron, and its distance is bounded by ``polyhedra.distance_bounds``.
    Without an encoder the polyhedron is also cut with the box of valid inputs (``model.bounds``), and the radius then
    is about valid inputs only; so are threat models.  If inputs are stretched, centroids are compared with
    :math:`\phi(z)`; a plane's distance there, with every feature multiplied by its gain, is a first bound, and
    ``distance_bounds`` finds that of the inputs themselves.

    Rounding.  The head chooses centroids by products and then computes their distances; with the unit roundoff of the
    network a computed squared logit is off by no more than :math:`5 \gamma (\|z'\| + \max \|c\|)^2`.  That, at any z'
    that matters, and the error of the differences computed here, in float64, is subtracted from the numerator; the
    encoder's error is paid for at both ends, as in ``gloro.radius``.  A stretched pixel is off by at most four
    roundings of its slope.

    Args:
        model: with the weights that ``encoder`` was computed from.
        encoder: bound of the features; ``NearestCentroid.proven`` makes it.
        layers: what it was made of, for the table.
        radii: where tighter bounds are worth their time.
        eta: with an eta-layer; where it rejects, the radius is 0, and elsewhere the prediction within the radius is
            the same, or rejected.

    >>> model = CentroidNet((2,), 2, per_class=1).double()
    >>> _ = model.head.centroids.data.copy_(torch.tensor([[[0.0, 0.0]], [[1.0, 0.0]]]))
    >>> certificate = NearestCentroid.proven(model)(torch.tensor([[0.2, 0.9]]))
    >>> certificate.prediction, certificate.radius
    (tensor([0]), tensor([0.3000], dtype=torch.float64))
    """

    def __init__(
        self,
        model: CentroidNet,
        encoder: Bound,
        layers: tuple[LayerBound, ...] = (),
        *,
        radii: Sequence[float] = (),
        eta: float = 0.0,
    ) -> None:
        self.model = model
        self.encoder = encoder
        self.layers = layers
        self.radii = sorted(radii)
        self.eta = EtaLayer(eta)
        self.centroids = model.head.centroids.detach().double().flatten(0, 1)
        self.unit = UNIT_ROUNDOFF[model.head.centroids.dtype]

    @staticmethod
    def proven(
        model: CentroidNet,
        *,
        budget: float = BUDGET,
        on_layer: Callable[[LayerBound], None] | None = None,
        radii: Sequence[float] = (),
        eta: float = 0.0,
    ) -> NearestCentroid:
        """With a proven constant; an InputError names a layer that has none."""
        encoder = lipschitz_of_body(model, budget=budget, on_layer=on_layer)
        return NearestCentroid(model, encoder.bound, encoder.layers, radii=radii, eta=eta)

    @property
    def lipschitz(self) -> float:
        """The encoder's constant."""
        return self.encoder.lipschitz

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Certificate:
        x = x.to(self.model.head.centroids.dtype)
        with evaluation_mode(self.model):
            z = self.model.features(x)
            logits = self.model.head(z)
        size = torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.float64)
        error = 2 * (self.encoder.relative * size + self.encoder.absolute)
        gain = self.encoder.lipschitz + self.encoder.relative
        prediction = logits.argmax(1)
        rows = max(1, CHUNK // max(OWN * len(self.centroids), REFINED_OWN * z.shape[1]))
        parts = zip(*(torch.split(v, rows) for v in (z.double(), prediction, error)), strict=True)
        # What has to be reached in feature space for a radius, and a little more.
        distances = [self._distance(z, top, [r * gain * (1 + 1e-9) + e for r in self.radii]) for z, top, e in parts]
        radius = ((torch.cat(distances) - error) / gain).clamp_min(0) * (1 - 1e-12)
        return Certificate(prediction, radius.where(self._accepted(logits), 0.0))

    def _distance(self, z: Tensor, top: Tensor, goals: Sequence[Tensor]) -> Tensor:
        """How far features are from those of any other class, at least."""
        near = _Neighbourhood.of(z, top, self)
        bounds = self._planes(near)
        for goal in goals:
            self._refine(near, bounds, goal)
        return bounds.amin(1)

    def _planes(self, near: _Neighbourhood) -> Tensor:
        """The distance to the region of every centroid, by single planes, ``(batch, centroids)``."""
        c = self.centroids * self.model.head.gain  # no move changes a feature by more than its gain
        own, norms = near.own[:, :OWN], c.square().sum(1)
        between = norms[own][:, :, None] - 2 * c[own] @ c.T + norms
        # Computed by a difference, so that rounding is not small where two centroids almost meet.
        between = (between.clamp_min(0) + 8 * gamma(c.shape[1] + 8, UNIT_ROUNDOFF[torch.float64]) * norms.max()).sqrt()
        margin = near.squares[:, None] - near.squares.gather(1, own)[:, :, None] - near.slack[:, None, None]
        distance = (margin / (2 * between)).amax(1)
        classes = torch.arange(len(c), device=c.device) // self.model.head.centroids.shape[1]
        return distance.masked_fill(classes == near.top[:, None], math.inf)

    def _refine(self, near: _Neighbourhood, bounds: Tensor, goal: Tensor) -> None:
        """Raise the bounds below the goal, as far as that may lift a point's smallest one to it."""
        c, below = self.centroids, bounds < goal[:, None]
        rows = ((bounds.amin(1) > 0) & below.any(1)).nonzero().squeeze(1)
        while len(rows):
            # The most threatening first: mostly they decide.
            some = min(REFINED_OTHER, int(below[rows].sum(1).max()))
            other = bounds[rows].masked_fill(~below[rows], math.inf).topk(some, dim=1, largest=False).indices
            own = near.own[rows]
            margin = near.squares[rows].gather(1, other)[:, :, None] - near.squares[rows].gather(1, own)[:, None]
            refined = distance_bounds(
                c[own],
                c[other],
                margin - near.slack[rows, None, None],
                near.low[rows],
                near.high[rows],
                torch.where(below[rows].gather(1, other), goal[rows, None], 0.0),
                gain=self.model.head.gain.double(),
            )
            better = torch.maximum(refined, bounds[rows].gather(1, other))
            bounds[rows[:, None], other] = better
            below[rows[:, None], other] = False
            rows = rows[(better >= goal[rows, None]).all(1) & below[rows].any(1)]

    # --- the guarantees of an eta-layer ---------------------------------------------------------------------------

    @torch.no_grad()
    def accepts(self, x: Tensor) -> Tensor:
        """Whether the eta-layer accepts each input (thesis, Definition 22); the radius there may still be 0."""
        with evaluation_mode(self.model):
            return self._accepted(self.model(x.to(self.model.head.centroids.dtype)))

    def _accepted(self, logits: Tensor) -> Tensor:
        accepted: Tensor = self.eta(logits).argmax(1) == logits.argmax(1)
        return accepted

    @property
    def separation(self) -> float:
        """The smallest distance between centroids of different classes (d_min)."""
        classes = self.model.head.centroids.detach().double()
        return min(
            float(torch.cdist(one, two, compute_mode="donot_use_mm_for_euclid_dist").min())
            for one, two in combinations(classes, 2)
        )

    @property
    def global_radius(self) -> float:
        r""":math:`\eta\, d_{\min} / L`: two inputs that close are never accepted in different classes.

        Thesis, Theorem 8, corrected: accepted as y, the nearest centroid of any other class y' is further away than
        that of y by at least :math:`\eta (d_1 + d_2) \ge \eta\, d_{\min}`; accepted as y', it is the other way round;
        and a step of r changes the difference by at most 2 L r.
        """
        return self.eta.eta * self.separation / (self.encoder.lipschitz * self.model.head.lipschitz)

    @property
    def local_radius(self) -> float:
        r""":math:`\eta\, d_{\min} / (2L)`: within it the class of an accepted input is also the nearest one.

        Thesis, Theorem 9, corrected, for the net without rejection.  The radius of a call is never smaller, since
        :math:`\|c - p\| \le d_1 + d_2`.
        """
        return self.global_radius / 2


@dataclass(frozen=True)
class _Neighbourhood:
    """What the certificates of some points are made of."""

    top: Tensor  # predicted classes
    squares: Tensor  # squared distances (of stretched features) to all centroids, ``(batch, centroids)``
    own: Tensor  # the nearest centroids of the predicted class, nearest first
    slack: Tensor  # what rounding may have added to a difference of two squared distances
    low: Tensor  # moves of a feature below it change nothing more, where that is known,
    high: Tensor  # nor do moves above it

    @staticmethod
    def of(z: Tensor, top: Tensor, certifier: NearestCentroid) -> _Neighbourhood:
        model, c, stretch = certifier.model, certifier.centroids, certifier.model.head.stretch
        per_class = model.head.centroids.shape[1]
        norms = c.square().sum(1)
        u = model.head.stretched(z)
        squares = u.square().sum(1, keepdim=True) - 2 * u @ c.T + norms
        mine = squares.view(len(z), -1, per_class)[torch.arange(len(z), device=z.device), top]
        own = mine.topk(min(REFINED_OWN, per_class), largest=False).indices + per_class * top[:, None]
        low, high = torch.full_like(z, -math.inf), torch.full_like(z, math.inf)
        size, largest = u.norm(dim=1), norms.max().sqrt()
        # No region is further away than its own centroid, so features beyond that do not matter.
        farthest = 2 * size + largest
        if model.is_nearest_prototype and model.bounds is not None:
            # A little wider, because of rounding here; and never without z itself, should it not be valid.
            low, high = (model.bounds[0] - z - 1e-12).clamp_max(0), (model.bounds[1] - z + 1e-12).clamp_min(0)
            farthest = farthest.clamp_min(max(map(abs, model.bounds)) * math.sqrt(z.shape[1]))
        terms, unit = z.shape[1] + 16, UNIT_ROUNDOFF[torch.float64]
        rounding = 5 * gamma(terms, certifier.unit) + 5 * gamma(terms, unit)
        slack = rounding * (farthest + largest) ** 2 * (1 + 1e-12)
        if stretch is not None:
            low, high = stretch.slope(z)
            # The difference of two squared distances is linear in u, with slopes of length 2 |p - c|.
            off = 4 * (certifier.unit + unit) * stretch.lipschitz * math.sqrt(z.shape[1])
            slack = slack + 4 * largest * off * (1 + 1e-12)
        return _Neighbourhood(top, squares, own, slack, low, high)
