"""Centroid Nets (thesis, chapter 6), which predict the class of the nearest centroid in feature space."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import LARGEST_SIZE, InputError, check_count, check_range
from atoll.models.base import MODELS, Classifier
from atoll.models.stretch import Stretch

EncoderFactory = Callable[[tuple[int, ...], int], Classifier]


class Centroids(nn.Module):
    r"""The head of a Centroid Net: :math:`f_j(z) = -\min_i \|z - c_{ji}\|` (thesis, equation 6.1).

    Each class j has k centroids.  Every logit is 1-Lipschitz in z.  With ``stretch``, it is the negative distance from
    the stretched z, with the Lipschitz constant of ``Stretch``.

    Args:
        features: size of z.
        num_classes: number of logits.
        per_class: number of centroids per class, k.
        stretch: features within this distance of 0 or 1 become 0 or 1, see ``Stretch``; 0 to disable.
        learn_stretch: whether to learn thresholds for every feature, starting at ``stretch``.

    >>> head = Centroids(2, 2, 1)
    >>> _ = head.centroids.data.copy_(torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]]]))
    >>> head(torch.zeros(1, 2))
    tensor([[-0., -5.]], grad_fn=<NegBackward0>)
    """

    def __init__(
        self, features: int, num_classes: int, per_class: int, stretch: float = 0.0, learn_stretch: bool = False
    ) -> None:
        super().__init__()
        check_count(1, LARGEST_SIZE, per_class=per_class)
        self.stretch = Stretch(stretch, features if learn_stretch else 0) if stretch else None
        self.centroids = nn.Parameter(torch.empty(num_classes, per_class, features))
        nn.init.normal_(self.centroids, std=1 / math.sqrt(features))

    @property
    def lipschitz(self) -> float:
        """Lipschitz constant of every logit."""
        return 1.0 if self.stretch is None else self.stretch.lipschitz

    @property
    def gain(self) -> Tensor:
        """Largest slope of every feature."""
        return self.centroids.new_ones(1) if self.stretch is None else self.stretch.gain

    def stretched(self, z: Tensor) -> Tensor:
        """Return the (stretched) features that are compared with centroids."""
        return z if self.stretch is None else self.stretch(z)

    def squares(self, z: Tensor) -> Tensor:
        """Return squared distances to all centroids minus the square of z, ``(batch, classes, per_class)``.

        They have no gradient and serve only to find the nearest centroid, because their differences suffer from
        cancellation.
        """
        flat = self.centroids.detach().flatten(0, 1)
        squares = torch.addmm(flat.square().sum(1), self.stretched(z.detach()), flat.T, alpha=-2)
        return squares.view(-1, *self.centroids.shape[:2])

    def forward(self, z: Tensor) -> Tensor:
        nearest = self.squares(z).argmin(2)
        centroids = self.centroids[torch.arange(nearest.shape[1], device=z.device), nearest]
        distances: Tensor = torch.linalg.vector_norm(self.stretched(z)[:, None] - centroids, dim=2)
        return -distances

    def extra_repr(self) -> str:
        classes, per_class, features = self.centroids.shape
        return f"features={features}, num_classes={classes}, per_class={per_class}"


@MODELS.register()
class CentroidNet(Classifier):
    """Centroid Net: predicts the class of the nearest centroid, in the feature space of an optional encoder.

    Without an encoder it is a nearest-prototype classifier of the inputs.  Its certificates are the tightest, because
    they do not depend on a Lipschitz constant.  The method ``CentroidsFromData`` initializes centroids with training
    points.

    Args:
        per_class: number of centroids per class.
        encoder: a model whose body computes the features, such as a ``LiResNet``; its head is not used.  None for no
            encoder.
        stretch: pixels within this distance of 0 or 1 become 0 or 1 (``Stretch``); only without an encoder.  The
            certificates remain nearly tight, up to a small duality gap.
        learn_stretch: whether to learn two thresholds for every pixel, starting at ``stretch``.

    >>> CentroidNet((1, 8, 8), 10, per_class=5)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    head: Centroids

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        per_class: int = 10,
        encoder: EncoderFactory | None = None,
        stretch: float = 0.0,
        learn_stretch: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(input_shape, num_classes, **options)
        features = math.prod(input_shape)
        if encoder is None:
            self.body = nn.Flatten()
        else:
            other = encoder(self.input_shape, num_classes)
            if type(other).features is not Classifier.features or not isinstance(other.head, nn.Linear):
                raise InputError(f"encoder: expected a model with a body and a linear head, got {type(other).__name__}")
            self.body, features = other.body, other.head.in_features
        if stretch and not (self.is_nearest_prototype and self.bounds == (0.0, 1.0)):
            raise InputError("stretch: expected a net without an encoder and inputs in [0, 1]")
        if learn_stretch and not stretch:
            raise InputError("learn_stretch: expected stretch > 0, got 0")
        self.head = Centroids(features, num_classes, per_class, stretch, learn_stretch)

    @property
    def is_nearest_prototype(self) -> bool:
        """Whether the features are the inputs themselves."""
        return type(self.body) is nn.Flatten and self.normalize.identity


class EtaLayer(nn.Module):
    r"""Appends a logit for rejection: :math:`\frac{1 - \eta}{1 + \eta}` times the second largest logit.

    Thesis, Definition 22.  It follows a ``CentroidNet`` and has no parameters, so eta can be chosen after training.
    With the distances :math:`d_1 \le d_2` to the two nearest classes, an input is accepted if
    :math:`d_2 - d_1 \ge \eta (d_1 + d_2)` (Theorem 7).  Features far from all centroids are never accepted, so the
    accepted region is bounded in feature space, but not necessarily in input space: an encoder can map distant inputs
    close to a centroid.

    >>> accepts = EtaLayer(0.5)
    >>> accepts(torch.tensor([[-1.0, -3.0], [-2.0, -3.0]]))  # the second one is between the two
    tensor([[-1., -3., -1.],
            [-2., -3., -1.]])
    """

    def __init__(self, eta: float) -> None:
        super().__init__()
        check_range("[0, 1]", eta=eta)
        self.eta = eta

    def forward(self, logits: Tensor) -> Tensor:
        second = logits.topk(2, dim=1).values[:, 1:]
        return torch.cat([logits, (1 - self.eta) / (1 + self.eta) * second], 1)

    def extra_repr(self) -> str:
        return f"eta={self.eta}"
