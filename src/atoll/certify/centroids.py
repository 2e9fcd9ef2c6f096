"""Certificates of Centroid Nets, from distances to the regions in which a centroid of another class is nearest."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from atoll.certify.bounds import UNIT_ROUNDOFF, Bound, Precision, gamma
from atoll.certify.certificate import Certificate, input_size, rounded_inputs
from atoll.certify.lipschitz import OnLayer, check_arithmetic, ensure_captured, propagate
from atoll.certify.norms import BUDGET
from atoll.certify.polyhedra import distance_bounds
from atoll.certify.propagation import LayerBound
from atoll.errors import InputError
from atoll.graph import CapturedModel, capture, find_input
from atoll.models.centroid import CentroidNet, Centroids, EtaLayer
from atoll.models.stretch import Stretch
from atoll.modules import evaluation_mode
from atoll.threat import Bounds

CHUNK = 2**22  # largest number of elements to process together
OWN = 4  # number of nearest own centroids that are used for single bisecting planes
LARGEST_NORM = 1e3  # largest norm of inputs without bounds, for the guarantees of an eta layer
REFINED_OWN = 24  # number of nearest own centroids when all planes are used together
REFINED_OTHER = 8  # number of other centroids to refine at a time


class NearestCentroid:
    r"""Certifier for a ``CentroidNet`` whose encoder has a Lipschitz constant L.

    The class can change to that of a centroid c only at features z' that are at least as close to c as to every
    centroid p of the predicted class.  For a single p, these z' form a half-space at the distance

    .. math:: \frac{\|z - c\|^2 - \|z - p\|^2}{2 \|c - p\|}

    from z.  The largest of these distances over some p is a lower bound of the distance to the region of c, the
    smallest over all c a lower bound of the distance to any other class, and this divided by L is a radius.  With
    ``radii``, all p are used together if this may decide one of these radii: the region of c is a polyhedron, whose
    distance ``polyhedra.distance_bounds`` bounds.  Without an encoder, the polyhedron is also intersected with the box
    of valid inputs (``model.bounds``), and the radius then refers to valid inputs only, as threat models do.  If inputs
    are stretched, centroids are compared with :math:`\phi(z)`.  The distance of a plane in this space, with every
    feature multiplied by its gain, is a first bound, and ``distance_bounds`` finds that of the inputs themselves.

    Rounding: the head selects centroids by products and then computes their distances.  With the unit roundoff of the
    network, the error of a computed squared logit is at most :math:`5 \gamma (\|z'\| + \max \|c\|)^2`.  This error, at
    any relevant z', and the error of the differences computed here in float64, are subtracted from the numerator.  The
    error of the encoder counts at both points, as in ``gloro.radius``.  The error of a stretched pixel is at most four
    roundings times its slope.

    ``NearestCentroid.proven`` captures the model and verifies that the end of the graph is equal to ``Centroids``; the
    certificates are about the captured graph.

    Args:
        head: the centroids.
        encoder: bound of the features.
        run: returns features and logits of inputs.
        layers: bounds of the layers, for reports.
        model: the model that ``run`` runs.
        bounds: valid range of inputs.
        input_size: number of elements of an input.
        identity: whether the features are the inputs themselves.
        largest_input: largest norm of inputs that cannot overflow in the encoder.
        radii: radii for which to compute tighter bounds.
        eta: parameter of an eta layer.  If it rejects an input, the radius is 0; otherwise the prediction within the
            radius is the same, or rejected.

    >>> model = CentroidNet((2,), 2, per_class=1).double()
    >>> _ = model.head.centroids.data.copy_(torch.tensor([[[0.0, 0.0]], [[1.0, 0.0]]]))
    >>> certificate = NearestCentroid.proven(model)(torch.tensor([[0.2, 0.9]]))
    >>> certificate.prediction, certificate.radius
    (tensor([0]), tensor([0.3000], dtype=torch.float64))
    """

    def __init__(
        self,
        head: Centroids,
        encoder: Bound,
        run: Callable[[Tensor], tuple[Tensor, Tensor]],
        layers: tuple[LayerBound, ...] = (),
        *,
        model: Any,
        bounds: Bounds | None = None,
        input_size: int = 0,
        identity: bool = False,
        largest_input: float = math.inf,
        radii: Sequence[float] = (),
        eta: float = 0.0,
    ) -> None:
        self.head, self.encoder, self.layers, self.model = head, encoder, layers, model
        self.bounds, self.input_size, self.largest_input = bounds, input_size, largest_input
        self.box = bounds if identity else None
        self.radii, self.eta = sorted(radii), EtaLayer(eta)
        self.centroids = head.centroids.detach().double().flatten(0, 1)
        self.precision = Precision.of(head.centroids.dtype)
        self._run = run

    @staticmethod
    def proven(
        model: CentroidNet,
        *,
        budget: float = BUDGET,
        on_layer: OnLayer | None = None,
        radii: Sequence[float] = (),
        eta: float = 0.0,
    ) -> NearestCentroid:
        """Build a certifier with a proven constant.

        Raises an InputError that names the operation and its source line if an operation has no rule.
        """
        graph, head = ensure_captured(model), _copy_of(model.head)
        features = find_input(graph, capture(head, (head.centroids.shape[2],), dtype=head.centroids.dtype))
        if features is None:
            raise InputError("the model cannot be certified: its head differs from Centroids")
        propagation, value = propagate(graph, budget=budget, on_layer=on_layer, node=features)
        encoder = propagation.bound(value)
        tapped = graph.with_value(features)

        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            check_arithmetic(graph)
            graph.check_unchanged()
            return tapped(x)

        return NearestCentroid(
            head,
            encoder,
            run,
            tuple(propagation.layers),
            model=graph,
            bounds=model.bounds,
            input_size=math.prod(graph.shape),
            identity=propagation.is_input(value),
            largest_input=propagation.largest_input,
            radii=radii,
            eta=eta,
        )

    def with_eta(self, eta: float) -> NearestCentroid:
        """Return the same certifier with another eta layer, which needs no new proof."""
        other = copy.copy(self)
        other.eta = EtaLayer(eta)
        return other

    @staticmethod
    def estimated(model: CentroidNet, lipschitz: float) -> NearestCentroid:
        """Build a certifier with an estimated constant, as in training, which is not a proof."""

        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            with evaluation_mode(model):
                z = model.features(x)
                return z, model.head(z)

        size, identity = math.prod(model.input_shape), model.is_nearest_prototype
        bound = Bound(lipschitz)
        return NearestCentroid(
            model.head, bound, run, model=model, bounds=model.bounds, input_size=size, identity=identity
        )

    @property
    def lipschitz(self) -> float:
        """The Lipschitz constant of the encoder."""
        return self.encoder.lipschitz

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Certificate:
        given, x = x.dtype, x.to(self.head.centroids.dtype)
        z, logits = self._run(x)
        size = input_size(x)
        error = 2 * ((1 + 1e-10) * self.encoder.relative * size + self.encoder.absolute)
        gain = self.encoder.lipschitz + self.encoder.relative
        prediction = logits.argmax(1)
        rows = max(1, CHUNK // max(OWN * len(self.centroids), REFINED_OWN * z.shape[1]))
        parts = zip(*(torch.split(v, rows) for v in (z.double(), prediction, error)), strict=True)
        # The required distances in feature space for the radii, and a little more.
        distances = [self._distance(z, top, [r * gain * (1 + 1e-9) + e for r in self.radii]) for z, top, e in parts]
        radius = ((torch.cat(distances) - error) / gain).clamp_min(0) * (1 - 1e-12)
        room = (self._largest_size() - size).clamp_min(0)
        safe = logits.isfinite().all(1) & (room > 0) & self._accepted(logits)
        function = self.model.digest if isinstance(self.model, CapturedModel) else ""
        radius = torch.where(safe & (radius > 0), torch.minimum(radius, room), 0.0)
        return Certificate(prediction, rounded_inputs(radius, size, given, x.dtype), function)

    def _largest_size(self) -> float:
        """Return the largest norm of inputs that overflow neither in the encoder nor in the squares of the head."""
        squares = math.sqrt(self.precision.largest) / 8 - float(self.centroids.norm(dim=1).max())
        encoder = self.encoder
        slope = encoder.lipschitz + encoder.relative
        room = squares - encoder.offset - encoder.absolute
        return max(0.0, min(self.largest_input, room / slope if slope else math.inf))

    def _distance(self, z: Tensor, top: Tensor, goals: Sequence[Tensor]) -> Tensor:
        """Return lower bounds of the distance of features to the regions of other classes."""
        near = _Neighborhood.of(z, top, self)
        bounds = self._planes(near)
        for goal in goals:
            self._refine(near, bounds, goal)
        return bounds.amin(1)

    def _planes(self, near: _Neighborhood) -> Tensor:
        """Return lower bounds of the distances to all regions, by single planes, ``(batch, centroids)``."""
        c = self.centroids * self.head.gain  # a move changes a feature by at most its gain
        own, norms = near.own[:, :OWN], c.square().sum(1)
        between = norms[own][:, :, None] - 2 * c[own] @ c.T + norms
        # This is a difference, so rounding is not negligible if two centroids are almost equal.
        between = (between.clamp_min(0) + 8 * gamma(c.shape[1] + 8, UNIT_ROUNDOFF[torch.float64]) * norms.max()).sqrt()
        margin = near.squares[:, None] - near.squares.gather(1, own)[:, :, None] - near.slack[:, None, None]
        distance = (margin / (2 * between)).amax(1)
        classes = torch.arange(len(c), device=c.device) // self.head.centroids.shape[1]
        return distance.masked_fill(classes == near.top[:, None], math.inf)

    def _refine(self, near: _Neighborhood, bounds: Tensor, goal: Tensor) -> None:
        """Improve bounds below the goal, in place, as long as the smallest bound of a point may reach the goal."""
        c, below = self.centroids, bounds < goal[:, None]
        rows = ((bounds.amin(1) > 0) & below.any(1)).nonzero().squeeze(1)
        while len(rows):
            # The closest regions first, because they usually decide.
            count = min(REFINED_OTHER, int(below[rows].sum(1).max()))
            other = bounds[rows].masked_fill(~below[rows], math.inf).topk(count, dim=1, largest=False).indices
            own = near.own[rows]
            margin = near.squares[rows].gather(1, other)[:, :, None] - near.squares[rows].gather(1, own)[:, None]
            refined = distance_bounds(
                c[own],
                c[other],
                margin - near.slack[rows, None, None],
                near.low[rows],
                near.high[rows],
                torch.where(below[rows].gather(1, other), goal[rows, None], 0.0),
                gain=self.head.gain.double(),
            )
            better = torch.maximum(refined, bounds[rows].gather(1, other))
            bounds[rows[:, None], other] = better
            below[rows[:, None], other] = False
            rows = rows[(better >= goal[rows, None]).all(1) & below[rows].any(1)]

    # --- the guarantees of an eta layer ---------------------------------------------------------------------------

    @torch.no_grad()
    def accepts(self, x: Tensor) -> Tensor:
        """Return whether the eta layer accepts each input (thesis, Definition 22); the radius may still be 0."""
        return self._accepted(self._run(x.to(self.head.centroids.dtype))[1])

    def _accepted(self, logits: Tensor) -> Tensor:
        accepted: Tensor = self.eta(logits).argmax(1) == logits.argmax(1)
        return accepted

    @property
    def separation(self) -> float:
        """The smallest distance between centroids of different classes (d_min)."""
        classes = self.head.centroids.detach().double()
        return min(
            float(torch.cdist(one, two, compute_mode="donot_use_mm_for_euclid_dist").min())
            for one, two in combinations(classes, 2)
        )

    @property
    def global_radius(self) -> float:
        r"""Radius within which valid inputs are never accepted in different classes: :math:`\eta\, d_{\min} / L`.

        Thesis, Theorem 8, corrected.  If an input is accepted as y, the nearest centroid of any other class y' is
        farther away than that of y by at least :math:`\eta (d_1 + d_2) \ge \eta\, d_{\min}`; if it is accepted as y',
        it is the other way around; and a step of r changes the difference by at most 2 L r.  Rounding errors are
        subtracted, see ``_margin``.  Without bounds, inputs up to an l2 norm of ``LARGEST_NORM`` are valid.
        """
        margin, _, error = self._margin()
        return max(0.0, margin - 2 * error) / self._feature_lipschitz() * (1 - 1e-12)

    @property
    def local_radius(self) -> float:
        r"""Radius within which the class of an accepted valid input does not change: :math:`\eta\, d_{\min} / (2L)`.

        Thesis, Theorem 9, corrected, for the net without rejection.  Rounding errors are subtracted.  In exact
        arithmetic, the radius of a certificate is never smaller, since :math:`\|c - p\| \le d_1 + d_2`.
        """
        margin, tie, error = self._margin()
        return max(0.0, margin / 2 - tie / 2 - 2 * error) / self._feature_lipschitz() * (1 - 1e-12)

    def _feature_lipschitz(self) -> float:
        return (self.encoder.lipschitz + self.encoder.relative) * self.head.lipschitz

    def _margin(self) -> tuple[float, float, float]:
        r"""Return bounds of :math:`d_2 - d_1` and of the error of features, for valid inputs.

        The three numbers are the smallest difference of an accepted input, the largest difference that is computed as a
        tie, and the error of features.  If the error of computed squares is at most E, acceptance means
        :math:`d_2^2 \ge \kappa^2 d_1^2 - F` with :math:`\kappa = (1 + \eta) / (1 - \eta)` and
        :math:`F = (\kappa^2 + 1) E`, and :math:`d_1 + d_2 \ge D = d_{\min}`.  The difference is smallest if both are
        equalities: :math:`d_1 = (D^2 + F) / (D + \sqrt{\kappa^2 D^2 + (\kappa^2 - 1) F})`, and is then
        :math:`D - 2 d_1`.
        """
        distance, eta = self.separation * (1 - 1e-12), self.eta.eta
        if eta >= 1 or not distance > 0:
            return 0.0, 0.0, 0.0
        encoder, size = self.encoder, self._valid_size()
        error = (encoder.relative * size + encoder.absolute) * self.head.lipschitz
        square = self._square_error(encoder.lipschitz * size + encoder.offset + error)
        kappa = (1 + eta) / (1 - eta) * (1 - 16 * self.precision.unit)
        rest = (kappa**2 + 1) * square
        root = math.sqrt(max(0.0, (kappa * distance) ** 2 + (kappa**2 - 1) * rest))
        nearest = (distance**2 + rest) / (distance + root)
        return distance - 2 * nearest, 2 * square / distance, error

    def _valid_size(self) -> float:
        """Return the largest norm of a valid input; without bounds, the largest norm that the guarantees cover."""
        bounds = self.bounds
        return LARGEST_NORM if bounds is None else max(map(abs, bounds)) * math.sqrt(self.input_size)

    def _square_error(self, size: float) -> float:
        """Return the error of a computed squared distance to the nearest centroid, for features of norm ``size``."""
        features, largest = self.centroids.shape[1], float(self.centroids.norm(dim=1).max())
        size = min(size * self.head.lipschitz, math.sqrt(features)) if self.head.stretch is not None else size
        rounding = 5 * gamma(features + 16, self.precision.unit) * (size + largest) ** 2
        off = (
            8 * self.precision.unit * self.head.lipschitz * math.sqrt(features) if self.head.stretch is not None else 0
        )
        return (rounding + 4 * largest * off + 16 * features * self.precision.tiny) * (1 + 1e-9)


@dataclass(frozen=True)
class _Neighborhood:
    """The quantities from which the certificates of a batch are computed."""

    top: Tensor  # predicted classes
    squares: Tensor  # squared distances (of stretched features) to all centroids, ``(batch, centroids)``
    own: Tensor  # the nearest centroids of the predicted class, nearest first
    slack: Tensor  # rounding error of a difference of two squared distances
    low: Tensor  # moves of a feature below it have no further effect; -inf if there is no such bound
    high: Tensor  # the same for moves above it

    @staticmethod
    def of(z: Tensor, top: Tensor, certifier: NearestCentroid) -> _Neighborhood:
        c, head, precision = certifier.centroids, certifier.head, certifier.precision
        per_class = head.centroids.shape[1]
        norms = c.square().sum(1)
        u = head.stretched(z)
        squares = u.square().sum(1, keepdim=True) - 2 * u @ c.T + norms
        mine = squares.view(len(z), -1, per_class)[torch.arange(len(z), device=z.device), top]
        own = mine.topk(min(REFINED_OWN, per_class), largest=False).indices + per_class * top[:, None]
        low, high = torch.full_like(z, -math.inf), torch.full_like(z, math.inf)
        size, largest = u.norm(dim=1), norms.max().sqrt()
        # A region is at most as far away as its centroid, so features beyond that do not matter.
        farthest = 2 * size + largest
        if certifier.box is not None:
            # A little wider because of rounding here, and including z itself even if it is not valid.
            low, high = (certifier.box[0] - z - 1e-12).clamp_max(0), (certifier.box[1] - z + 1e-12).clamp_min(0)
            farthest = farthest.clamp_min(max(map(abs, certifier.box)) * math.sqrt(z.shape[1]))
        terms, unit = z.shape[1] + 16, UNIT_ROUNDOFF[torch.float64]
        rounding = 5 * gamma(terms, precision.unit) + 5 * gamma(terms, unit)
        slack = rounding * (farthest + largest) ** 2 * (1 + 1e-12) + 32 * terms * precision.tiny
        if head.stretch is not None:
            low, high = head.stretch.slope(z)
            # The difference of two squared distances is linear in u, with slopes of length 2 |p - c|.
            off = 4 * (precision.unit + unit) * head.stretch.lipschitz * math.sqrt(z.shape[1])
            slack = slack + 4 * largest * off * (1 + 1e-12)
        return _Neighborhood(top, squares, own, slack, low, high)


def _copy_of(head: Centroids) -> Centroids:
    """Return a private copy of a head, as an instance of ``Centroids`` itself."""
    classes, per_class, features = head.centroids.shape
    copy = Centroids(features, classes, per_class, head.stretch.t if head.stretch is not None else 0.0)
    if head.stretch is not None and head.stretch.thresholds is not None:
        thresholds = head.stretch.thresholds.detach().clone()
        copy.stretch = Stretch(head.stretch.t, pixels=thresholds.shape[1])
        copy.stretch.thresholds = nn.Parameter(thresholds)
    copy.centroids = nn.Parameter(head.centroids.detach().clone())
    return copy.requires_grad_(False)
