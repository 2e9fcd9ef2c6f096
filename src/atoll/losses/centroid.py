"""The loss that trains Centroid Nets for large certified radii."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.errors import check_range
from atoll.losses.base import LOSSES, Loss, Outputs, Term, hard_labels, require_margin
from atoll.models.stretch import stretch_distance


class PlaneDistance(Term):
    r"""Soft hinge on the distance r of features from the plane between a centroid p of their class and c of another.

    .. math:: \tau \log(1 + \exp((t - r / (\epsilon L)) / \tau)), \quad
              r = \frac{(p - c) \cdot (z - (p + c) / 2)}{\|p - c\|} = \frac{\|z - c\|^2 - \|z - p\|^2}{2 \|p - c\|}

    For each p, c is the one of the ``others`` nearest centroids whose plane is closest; p is the one of the ``own``
    nearest centroids for which this plane is farthest away.  This is the bound with which ``NearestCentroid``
    certifies, except that it considers only the nearest centroids.  The choice has no gradient.  If inputs are
    stretched, the planes are chosen for the stretched inputs, and r is the distance of the input itself
    (``stretch_distance``); if no valid input crosses the plane, r is finite and at most what is certified.  The
    distance is measured in units of eps, so that t and tau mean the same for any eps and encoder.
    """

    def __init__(self, target: float, tau: float, own: int, others: int) -> None:
        check_range("(0, inf)", target=target, tau=tau, own=own, others=others)
        self.target, self.tau, self.own, self.others = target, tau, own, others

    def value(self, out: Outputs, y: Tensor) -> Tensor:
        z, head = out.latent
        pair = self.choose(head.stretched(z), head.centroids, hard_labels(y, "CentroidMargin"))
        p, c = (head.centroids.flatten(0, 1)[rows] for rows in pair)
        distance = plane_distance(z, p, c) if head.stretch is None else stretch_distance(z, p, c, head.stretch)
        # The Lipschitz constant of a logit is that of the encoder times that of the head; of a difference, twice that.
        margin = require_margin(out.certified_margin)[0, 1] / (2 * head.lipschitz)
        return self.tau * F.softplus((self.target - distance / margin) / self.tau)

    @torch.no_grad()
    def choose(self, z: Tensor, centroids: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Choose p and c, and return their row numbers among all centroids."""
        classes, per_class, _ = centroids.shape
        flat, rows = centroids.flatten(0, 1), torch.arange(len(z), device=z.device)
        # Squared distances without the square of z, which is the same for all centroids.
        squares = torch.addmm(flat.square().sum(1), z, flat.T, alpha=-2).view(len(z), classes, per_class)
        mine, own = squares[rows, y].topk(min(self.own, per_class), largest=False)
        own = own + per_class * y[:, None]
        squares[rows, y] = math.inf
        theirs, others = squares.flatten(1).topk(min(self.others, per_class * (classes - 1)), largest=False)
        between = torch.cdist(flat[own], flat[others]).clamp_min(torch.finfo(z.dtype).tiny)
        nearest = ((theirs[:, None] - mine[:, :, None]) / between).min(2)
        best = nearest.values.argmax(1)
        return own[rows, best], others[rows, nearest.indices[rows, best]]


def plane_distance(z: Tensor, p: Tensor, c: Tensor) -> Tensor:
    """Return the distance of z from the plane between p and c, positive on the side of p.

    >>> z, p, c = torch.tensor([[0.5, 7.0]]), torch.zeros(1, 2), torch.tensor([[2.0, 0.0]])
    >>> plane_distance(z, p, c)
    tensor([0.5000])
    """
    return (F.normalize(p - c, dim=1) * (z - (p + c) / 2)).sum(1)


@LOSSES.register()
class CentroidMargin(Loss):
    """Soft hinge on the certified radius r of a Centroid Net: tau softplus((target - r / eps) / tau).

    The radius is computed from the nearest centroids only.

    Args:
        target: target radius, in units of eps.
        tau: softness of the hinge, in units of eps.
        own: number of nearest centroids of the correct class to consider.
        others: number of nearest centroids of other classes to consider.

    >>> list(CentroidMargin(target=1.1, tau=0.2).terms)
    ['margin']
    """

    uses_lipschitz = True

    def __init__(self, *, target: float = 1.1, tau: float = 0.2, own: int = 4, others: int = 12) -> None:
        super().__init__(margin=(1.0, PlaneDistance(target, tau, own, others)))
