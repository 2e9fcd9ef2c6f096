"""Prototypes where they are known, and rejection of other data."""

import pytest
import torch

from atoll.certify import GloRo, NearestCentroid
from atoll.certify.evaluate import noise, rejected
from atoll.certify.prototypes import nearest_examples, prototypes, prototypes_with_examples
from atoll.data import Digits, MemorySplit
from atoll.errors import InputError
from atoll.models import MLP, CentroidNet
from atoll.plots import plot_prototypes


def test_the_prototype_has_the_features_of_the_nearest_centroid():
    """An encoder that can be inverted, and centroids that are features of inputs: then there is an exact prototype."""

    def encoder(shape, classes):
        return MLP(shape, classes, hidden=(2, 2), activation="minmax", initialization="orthogonal")

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CentroidNet((2,), 2, per_class=3, encoder=encoder).double()
        sources, x = torch.rand(6, 2).double(), torch.rand(8, 2).double()
    model.head.centroids.data = model.features(sources).detach().view(2, 3, 2)
    before = torch.cdist(model.features(x), model.features(sources)).min(1)
    result = prototypes(model, x, steps=1000)
    torch.testing.assert_close(result.centroid, model.features(sources[before.indices]))
    torch.testing.assert_close((model.features(result.inputs) - result.centroid).norm(dim=1), result.distance)
    assert (result.distance <= before.values).all()
    assert result.distance.median() < 1e-2
    assert all(p.grad is None for p in model.parameters())
    assert 0 <= result.inputs.min() <= result.inputs.max() <= 1


def test_examples_and_picture():
    data = Digits(limit=200)
    x, _ = data.tensors("train")
    model = CentroidNet((1, 8, 8), 10, per_class=3)
    model.head.centroids.data = x[:30].view(10, 3, 64)
    result, examples = prototypes_with_examples(model, x[:4], data.train, 3)
    torch.testing.assert_close(result.inputs[:, None], examples[:, :1])  # the centroids are training points
    assert torch.equal(result.inputs, x[:4])
    rows = nearest_examples(model, result.centroid, data.train, 2)
    distances = (x.flatten(1) - result.centroid[1]).norm(dim=1)
    assert distances[rows[1]].tolist() == distances.sort().values[:2].tolist()
    assert len(plot_prototypes(x[:4], result.inputs, examples).axes) == 4 * 5
    assert prototypes_with_examples(model, x[:1], data.train)[1].shape[:2] == (1, 5)
    assert nearest_examples(model, result.centroid, data.train).shape == (4, 5)
    with pytest.raises(InputError, match="expected images of one shape"):
        plot_prototypes(x[:4], result.inputs[:2], examples)


def test_rejection_counts_what_is_not_certified():
    model = CentroidNet((2,), 2, per_class=1).double()
    model.head.centroids.data = torch.tensor([[[0.0, 0.5]], [[1.0, 0.5]]], dtype=torch.float64)
    split = MemorySplit(torch.tensor([[0.1, 0.1], [0.45, 0.9], [0.6, 0.0], [0.95, 0.2]]), torch.zeros(4).long())
    assert rejected(NearestCentroid.proven(model), split, 0.2).correct == 2
    assert rejected(NearestCentroid.proven(model, eta=0.3), split, 0.0).correct == 2
    # An eta-layer rejects what is far away, which no other certificate does.
    far = MemorySplit(100 + split.images, split.labels)
    assert rejected(NearestCentroid.proven(model, eta=0.3), far, 0.0).correct == 4
    assert rejected(GloRo.proven(MLP((2,), 2).double()), far, 0.0).correct < 4


def test_noise_is_the_same_for_any_count():
    assert torch.equal(noise((3,), 5).images, noise((3,), 9).images[:5])
    assert not torch.equal(noise((3,), 5).images, noise((3,), 5, seed=1).images)
