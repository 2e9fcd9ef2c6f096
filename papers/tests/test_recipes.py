"""Recipes of the papers' size have the papers' settings, table by table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.certify import NearestCentroid
from atoll.certify.measure import CertifySettings, MeasureCertify
from atoll.data import MemorySplit
from atoll.errors import CheckpointError, DataError
from atoll.measure import Context
from atoll.models import CentroidNet
from atoll.runs.recipe import Recipe, build_recipe, variants
from atoll.runs.train import build_model, build_trainer
from atoll.subject import Subject
from atoll_papers.cost import Noise

PAPER_GRIDS = ("rat", "rat-eta", "wci", "trh-cifar", "trh-imagenet", "trh-imagenet-lambda1", "gloro", "gloro-ablation")
CIFAR, IMAGENET = 50_000, 1_281_167  # training images


def one_row_per_data_set(grid: str) -> list[str]:
    """One variant for each choice of the first axis."""
    return list({row.partition("-")[0]: row for row in variants(grid)}.values())


def named(recipe: Recipe, name: str) -> Any:
    """The method of a recipe with this name."""
    (method,) = (method for method in recipe.methods if type(method).__name__ == name)
    return method


@pytest.mark.parametrize(
    "row", [row for grid in PAPER_GRIDS for row in one_row_per_data_set(grid)] + ["gloro-imagenet"]
)
def test_nothing_is_held_out_and_the_best_checkpoint_is_chosen_as_in_the_paper(row: str) -> None:
    recipe = build_recipe(row)
    assert recipe.data.validation_share == 0
    assert recipe.trainer.select_on == ("test" if row.startswith(("rat", "wci")) else "validation")


def test_rat_selects_by_pgd_20_among_the_checkpoints_of_appendix_b() -> None:
    every = {*range(100, 111), *range(110, 151, 5), *range(150, 161), *range(160, 201, 5)}
    for row in ("rat/svhn-vgg16-l2-at-both", "rat-eta/1st-0.05", "rat-eta/both-0.4"):
        trainer = build_recipe(row).trainer
        assert trainer.validation_steps == 20
        assert sorted(trainer.keep_epochs) == sorted(every)


@pytest.mark.parametrize(
    ("row", "lr", "step"),
    [
        ("rat/cifar100-preact18-linf-trades-both", 0.1, 2 / 255),
        ("rat/svhn-preact18-linf-trades-both", 0.01, 2 / 255),
        ("rat/svhn-preact18-l2-at-0th", 0.01, 15 / 255),
        ("rat-eta/both-0.2", 0.1, 2 / 255),
        ("wci/cifar10-cosine", 0.1, 2 / 255),
        ("wci/cifar100-rule", 0.1, 2 / 255),
        ("wci/svhn-piecewise", 0.1, 1 / 255),
    ],
)
def test_rates_and_steps_of_rat_and_wci(row: str, lr: float, step: float) -> None:
    tree = build_recipe(row).tree
    expected = {"lr": lr, "momentum": 0.9, "weight_decay": 5e-4}
    assert expected.items() <= tree["optimizer"]["init_args"].items()
    attack = tree["attack"]["init_args"]
    numerator, denominator = map(int, str(attack["step_size"]).split("/"))
    assert (attack["steps"], numerator / denominator) == (10, step)
    assert (tree["trainer"]["epochs"], tree["trainer"]["batch_size"]) == (200, 128)


# Tables 5 and 6 of TrH: AWP, SWA and S2O, then lambda and schedule of TrH.
TABLES = {
    "trh-cifar/cifar10-vit_l16-at": (5e-4, 0.995, 0.1, 1e-5, "multistep"),
    "trh-cifar/cifar100-vit_l16-at": (5e-4, 0.995, 0.1, 1e-2, "multistep"),
    "trh-cifar/cifar10-vit_l16-trades": (5e-4, 0.995, 0.3, 1e-4, "multistep"),
    "trh-cifar/cifar100-vit_l16-trades": (1e-4, 0.995, 0.3, 1e-4, "constant"),
    "trh-cifar/cifar10-hybrid_l16-at": (5e-4, 0.995, 0.1, 5e-4, "multistep"),
    "trh-cifar/cifar100-hybrid_l16-at": (5e-4, 0.995, 0.1, 5e-4, "multistep"),
    "trh-cifar/cifar10-hybrid_l16-trades": (5e-4, 0.995, 0.3, 1e-4, "multistep"),
    "trh-cifar/cifar100-hybrid_l16-trades": (5e-4, 0.995, 0.3, 1e-4, "multistep"),
    "trh-imagenet/linf-vit_b16-at": (1e-4, 0.995, 0.1, 1e-4, "multistep"),
    "trh-imagenet/l2-vit_b16-at": (1e-4, 0.995, 0.1, 5e-5, "linear"),
    "trh-imagenet/linf-vit_b16-trades": (1e-4, 0.995, 0.3, 5e-5, "linear"),
    "trh-imagenet/l2-vit_b16-trades": (1e-4, 0.995, 0.3, 5e-5, "linear"),
    "trh-imagenet/linf-vit_l16-at": (1e-4, 0.995, 0.1, 5e-4, "multistep"),
    "trh-imagenet/l2-vit_l16-at": (1e-4, 0.995, 0.1, 5e-4, "linear"),
    "trh-imagenet/linf-vit_l16-trades": (1e-4, 0.995, 0.3, 5e-4, "multistep"),
    "trh-imagenet/l2-vit_l16-trades": (1e-4, 0.995, 0.3, 5e-5, "multistep"),
}


@pytest.mark.parametrize("row", TABLES)
def test_methods_of_trh(row: str) -> None:
    awp, swa, s2o, lambda_, schedule = TABLES[row]
    by_method = {name: build_recipe(f"{row}-{name}") for name in ("base", "swa", "s2o", "awp", "awpt", "trh")}
    assert named(by_method["awp"], "AWP").gamma == awp
    assert named(by_method["awpt"], "AWPT").gamma == awp  # thesis, section 4.5.3: set up like AWP
    assert named(by_method["swa"], "SWA").alpha == swa
    assert named(by_method["s2o"], "S2O").weight == s2o
    trh = named(by_method["trh"], "TrH")
    assert (trh.lambda_, trh.schedule) == (lambda_, schedule)
    cifar = row.startswith("trh-cifar")
    for name, recipe in by_method.items():
        # Tables 3 and 4: the coefficient of the squared norm; on CIFAR only TrH has one.
        penalty = sum(getattr(method, "gamma", 0) for method in recipe.methods if type(method).__name__ == "TrH")
        penalty += recipe.tree["optimizer"]["init_args"]["weight_decay"] / 2
        assert penalty == (0.001 if name == "trh" else 0) if cifar else penalty == 0.0001
        assert recipe.threat.radius == (8 / 255 if cifar else 3 if "/l2-" in row else 4 / 255)
        images = CIFAR if cifar else IMAGENET
        assert round(recipe.schedule.warmup * (images // recipe.trainer.batch_size)) == 500
        assert recipe.trainer.batch_size == (768 if cifar else 64)


@pytest.mark.parametrize(
    ("row", "file"),
    [
        ("trh-cifar/cifar10-vit_b16-at-base", "cifar10-ddpm.npz"),
        ("trh-cifar/cifar100-vit_b16-at-base", "cifar100-ddpm.npz"),
        ("trh-cifar/cifar10-vit_b16-at-trh", "ViT-B_16.npz"),
        ("trh-cifar/cifar10-vit_l16-trades-base", "ViT-L_16.npz"),
        ("trh-cifar/cifar100-hybrid_l16-at-swa", "Hybrid-L_16.npz"),
        ("trh-imagenet/linf-vit_b16-at-base", "ViT-B_16.npz"),
        ("trh-imagenet/l2-vit_l16-at-awpt", "ViT-L_16.npz"),
        ("trh-imagenet/l2-hybrid_l16-trades-s2o", "Hybrid-L_16.npz"),
        ("trh-imagenet-lambda1/l2", "ViT-L_16.npz"),
    ],
)
def test_rows_of_trh_do_not_start_without_their_files(
    row: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where none of them is
    recipe = build_recipe(row, *("model.width=16", "model.depth=1", "model.heads=2"))
    if "ddpm" in file:
        recipe.data._own = MemorySplit(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(2).long())
        with pytest.raises(DataError, match=f"{file}: no such file"):
            len(recipe.data.train)
    else:
        with pytest.raises(CheckpointError, match=file):
            build_model(replace(recipe, data=Noise((3, 32, 32), 2)))


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_rows_at_lambda_t_1_differ_in_nothing_else(norm: str) -> None:
    one = build_recipe(f"trh-imagenet-lambda1/{norm}")
    assert one.loss.terms["kl"][0] == 1
    assert one.tree == build_recipe(f"trh-imagenet/{norm}-vit_l16-trades-trh", "loss.lambda_t=1").tree


@pytest.mark.parametrize(
    ("row", "epochs", "batch_size"),
    [
        ("gloro/tiny-l6w128", 800, 256),
        ("gloro-ablation/cifar100-emma-resnet-l6", 800, 256),
        ("gloro-imagenet", 400, 1024),
    ],
)
def test_gloro_rows_are_trained_as_published(row: str, epochs: int, batch_size: int) -> None:
    recipe = build_recipe(row)
    assert (recipe.trainer.epochs, recipe.trainer.batch_size) == (epochs, batch_size)
    assert (recipe.trainer.clip_norm, recipe.trainer.power_iterations) == (3, 10)
    model = recipe.tree["model"]["init_args"]
    assert (model["initialization"], model["neck_activation"], model["activation"]) == ("published", False, "minmax")


def test_gloro_rows_with_another_initialization_or_activation_differ_in_nothing_else() -> None:
    for row, other, override in (
        ("gloro/cifar10-l18w256", "gloro/cifar10-l18w256_default", "model.initialization=default"),
        ("gloro/tiny-l6w128", "gloro/tiny-l6w128_default", "model.initialization=default"),
        *(
            (
                f"gloro-ablation/cifar10-emma-{block}-l6",
                f"gloro-ablation/cifar10-emma-{block}_relu-l6",
                "model.activation=relu",
            )
            for block in ("liresnet", "convnet")
        ),
    ):
        assert build_recipe(other).tree == build_recipe(row, override).tree != build_recipe(row).tree


@pytest.mark.parametrize(
    ("name", "other"), [("moons-centroid-encoder", "moons-gloro"), ("digits-centroid-encoder", "digits-gloro")]
)
def test_centroid_nets_have_the_encoder_of_a_gloro_net(name: str, other: str) -> None:
    model, gloro = (build_model(build_recipe(recipe)) for recipe in (name, other))
    assert isinstance(model, CentroidNet)
    assert repr(model.body) == repr(gloro.body)
    assert model.head.centroids.shape[2] == gloro.head.in_features


def test_global_and_local_radius_with_an_encoder_on_a_fine_grid(tmp_path: Path) -> None:
    trainer = build_trainer(build_recipe("moons-centroid-encoder", "trainer.epochs=5", "trainer.evaluate_every=9"))
    trainer.fit()
    subject = Subject(trainer.model.eval(), trainer.data, trainer.threat)
    settings = CertifySettings(eta=0.5, attack=False, points=50).resolve(subject)
    fields = MeasureCertify().measure(subject, settings, Context(folder=tmp_path))
    guarantees, lipschitz = fields["centroids"], fields["lipschitz"]
    assert {file.name for file in tmp_path.iterdir()} == {
        *("certificates.safetensors", "curve.png", "prototypes.safetensors")  # points in the plane are no images
    }
    assert 0 < guarantees.global_radius == pytest.approx(0.5 * guarantees.separation / lipschitz, rel=1e-4)
    net = trainer.model.double()
    assert isinstance(net, CentroidNet)
    side = torch.linspace(-1.5, 2.5, 101, dtype=torch.float64)
    assert side[1] - side[0] < guarantees.local_radius  # fine enough
    grid = torch.cartesian_prod(side, side)
    accepted = NearestCentroid.proven(net, eta=0.5).accepts(grid)
    prediction = net(grid).argmax(1)
    zero, one = (grid[accepted & (prediction == label)] for label in (0, 1))
    apart = float(torch.cdist(zero, one).min())
    assert guarantees.global_radius <= apart < 1.5 * guarantees.separation / lipschitz  # the published radius is false
    for label, points in enumerate((zero, one)):
        away = float(torch.cdist(points, grid[prediction != label]).min())
        assert guarantees.local_radius <= away
