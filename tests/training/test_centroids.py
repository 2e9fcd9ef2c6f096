"""The margin of Centroid Nets against certificates, and its way through the trainer."""

import pytest
import torch

from atoll.certify import NearestCentroid
from atoll.certify.power import LipschitzEstimator
from atoll.errors import InputError, RecipeError, TrainingError
from atoll.losses import CentroidMargin, Outputs
from atoll.models import MLP, CentroidNet
from atoll.runs.recipe import build_recipe
from atoll.runs.run import open_run
from atoll.runs.train import build_model, train
from atoll.threat import ThreatModel
from atoll.training.methods import CentroidsFromData
from atoll.training.trainer import Trainer, TrainerSettings
from support import CENTROID, TinyData, assert_identical, first_batch, naive_margin, tiny_trainer, weights


def margin_and_certificate(seed, *, classes, bounds, stretch):
    """A random net, random points, the r that the loss sees, and the certificate of the same points."""
    draw = torch.Generator().manual_seed(seed)
    model = CentroidNet((3,), classes, per_class=1, bounds=bounds, stretch=stretch).double()
    torch.nn.init.normal_(model.head.centroids, std=3**-0.5, generator=draw)
    x = torch.rand(20, 3, dtype=torch.float64, generator=draw)
    certificate = NearestCentroid.proven(model, radii=[9.0] if stretch else [])(x)
    term = CentroidMargin(target=1.0, tau=1e-3).terms["margin"][1]
    certified_margin = 2 * model.head.lipschitz * (1 - torch.eye(classes, dtype=torch.float64))
    out = Outputs(features=model.features(x), head=model.head, certified_margin=100 * certified_margin)
    margin = 100 * (1 - term.value(out, certificate.prediction).detach())  # the hinge is 1 - r / eps if r < eps
    return model, margin, certificate


# A few networks in the quick tests: the captures take half a second each.
SEEDS = [range(6), pytest.param(range(6, 60), marks=pytest.mark.slow)]


@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
def test_the_margin_is_the_certified_radius(seeds):
    """With all centroids to choose from it is the bound by planes, as far as one own centroid serves against all."""
    for each in seeds:
        _, margin, certificate = margin_and_certificate(each, classes=3, bounds=None, stretch=0.0)
        torch.testing.assert_close(margin, certificate.radius, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seeds", SEEDS, ids=["few", "many"])
def test_the_margin_of_stretched_inputs_is_the_certified_radius_if_the_plane_can_be_reached(seeds):
    """If it cannot, every radius is true, and the margin is no larger than the one that is certified.

    There is one plane only: with more, the closest one is chosen after stretching, not before.
    """
    reached, beyond = 0, 0
    for each in seeds:
        model, margin, certificate = margin_and_certificate(each, classes=2, bounds=(0.0, 1.0), stretch=0.2)
        p, c = model.head.centroids.detach()[:, 0][torch.stack([certificate.prediction, 1 - certificate.prediction])]
        farthest = (p < c).double()  # of all stretched inputs the one that is best for c
        lead = (farthest - c).square().sum(1) - (farthest - p).square().sum(1)
        crosses, never = lead < -1e-6, lead > 1e-6
        # Both are bounds; that of the loss does not fall below 1.5e-4.
        torch.testing.assert_close(margin[crosses], certificate.radius[crosses], rtol=1e-6, atol=1.5e-4)
        assert (margin[never] <= certificate.radius[never] + 1e-6).all()
        reached, beyond = reached + int(crosses.sum()), beyond + int((margin < certificate.radius - 0.1).sum())
    assert reached > 5 * len(seeds)
    assert beyond > len(seeds) / 2


@pytest.mark.parametrize("loss", CENTROID)
def test_gradient_is_that_of_the_loss_written_by_hand(loss):
    trainer = tiny_trainer(loss, double=True, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    batch = first_batch(trainer)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train_step(batch)
    model = tiny_trainer(loss, double=True).model
    margin = trainer.threat.radius * LipschitzEstimator(model, iterations=5)()[0][0, 1] / 2
    naive_margin(trainer.loss, model.features(batch.x), model.head.centroids, batch.y, margin).mean().backward()
    for old, new, truth in zip(before, trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close((old - new) / 0.1, truth.grad, rtol=1e-6, atol=1e-9)


def test_centroids_begin_at_training_points_and_the_run_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr("atoll.runs.train.final_test", lambda *_: None)  # the test below has one
    overrides = ("data.limit=160", "model.per_class=2", "trainer.epochs=2", "trainer.batch_size=32")
    overrides += ("trainer.test_steps=0",)
    run = train("digits-centroid", *overrides, out=tmp_path / "straight")
    with pytest.raises(TrainingError, match="Interrupted at step 3"):
        train("digits-centroid", *overrides, out=tmp_path / "stopped", on_trainer=stop_at_3)
    again = train("digits-centroid", *overrides, out=tmp_path / "stopped", resume=True)
    assert_identical(weights(again.model("last")), weights(run.model("last")))
    epochs = [record for record in run.metrics if record["kind"] == "epoch"]
    assert all("validation_vra" in record and "validation_vra_estimate" not in record for record in epochs)
    trainer = Trainer(
        CentroidNet((1, 8, 8), 10, per_class=2), run.data, CentroidMargin(), ThreatModel("l2", 0.5),
        methods=[CentroidsFromData()], settings=TrainerSettings(epochs=1),
    )  # fmt: skip
    trainer.methods[0].setup(trainer)
    x, y = run.data.tensors("train")
    for label, own in enumerate(trainer.model.head.centroids.detach()):
        distances = torch.cdist(own, x[y == label].flatten(1), compute_mode="donot_use_mm_for_euclid_dist")
        assert (distances.min(1).values == 0).all()
        assert distances.argmin(1).unique().numel() == 2


def stop_at_3(trainer):
    """End a run in the middle of an epoch, as a signal would."""
    step = trainer.train_step

    def counted(batch):
        trainer.stop_requested = trainer.step + 1 >= 3
        return step(batch)

    trainer.train_step = counted


def test_an_encoder_in_a_recipe(tmp_path):
    encoder = "model.encoder={class_path: SmallConvNet, init_args: {widths: [4, 4], hidden: 8, activation: minmax}}"
    overrides = (encoder, "data.limit=128", "model.per_class=3", "trainer.epochs=1", "trainer.test_steps=0")
    run = train("digits-centroid", *overrides, out=tmp_path / "run")
    assert run.metrics[-1]["validation_vra_estimate"] >= 0
    assert run.tests()[-1].verified is not None
    model = open_run(tmp_path / "run").model("last")
    assert model.head.centroids.shape == (10, 3, 8)
    assert type(build_model(build_recipe("digits-centroid")).body).__name__ == "Flatten"
    with pytest.raises(RecipeError, match=r"model.encoder.width: SmallConvNet has no such argument"):
        build_recipe("digits-centroid", "model.encoder={class_path: SmallConvNet, init_args: {width: 3}}")
    with pytest.raises(InputError, match="encoder: expected a model with a body and a linear head, got CentroidNet"):
        CentroidNet((2,), 2, encoder=CentroidNet)


def test_what_does_not_go_together_is_refused():
    data = TinyData(validation=1 / 6)
    trainer = Trainer(
        MLP((1, 8, 8), 3), data, CentroidMargin(), ThreatModel("l2", 0.1), settings=TrainerSettings(epochs=1)
    )
    with pytest.raises(InputError, match="CentroidMargin requires a CentroidNet"):
        trainer.train_step(first_batch(trainer))
    with pytest.raises(InputError, match="CentroidsFromData: expected a CentroidNet, got SmallConvNet"):
        CentroidsFromData().setup(tiny_trainer())
    trainer = Trainer(CentroidNet((1, 8, 8), 3, per_class=50), data, CentroidMargin(), ThreatModel("l2", 0.1))
    with pytest.raises(InputError, match=r"per_class: expected at most \d+, the training points of class 0, got 50"):
        CentroidsFromData().setup(trainer)
    with pytest.raises(InputError, match="tau: expected a number > 0, got 0"):
        CentroidMargin(tau=0)
