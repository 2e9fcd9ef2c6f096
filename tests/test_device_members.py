"""Models, attributions, curvature estimates, certifiers and augmentations on the pretend accelerator.

A family of tasks runs over the same table as the tests of the family, so that a new member joins by one line.
"""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F

from atoll.attacks.evaluate import evaluate
from atoll.certify import GloRo, LipschitzEstimator, NearestCentroid, Smoothed
from atoll.curvature import (
    EmpiricalRisk,
    density,
    gibbs_risk,
    input_landscape,
    top_eigenvalues,
    traces,
    wci,
    weight_landscape,
)
from atoll.data import MemorySplit, batches
from atoll.data.base import in_order
from atoll.errors import Interrupted
from atoll.explain import attribution, boundary_search
from atoll.explain.attributions import NAMES
from atoll.explain.faithfulness import attribution_lipschitz, completeness_gap, infidelity
from atoll.explain.sanity import sanity_check
from atoll.training.checkpoint import Checkpoints
from atoll.training.observers import Observer
from attack_cases import quick
from curvature.cases import CASES as RISKS
from curvature.cases import make_risk
from explain_cases import net as trained_net
from models.cases import MODELS
from pretend import DEVICE, PretendTensor, accelerator
from support import TinyData, assert_identical, first_batch, tiny_centroid_net, tiny_model, tiny_trainer, weights

SEARCH = {"budget": 60}
OPTIONS = {"BSM": SEARCH, "BIG": SEARCH, "BNM": SEARCH, "SG": {"samples": 4}}


def check(task, *, exact=True):
    """A task gives the same on both devices; it gets the device and returns results of any kind."""
    expected = plain(task("cpu"))
    with accelerator():
        result = plain(task(DEVICE))
    assert repr(result.keys()) == repr(expected.keys())
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            tolerance = {"rtol": 0, "atol": 0} if exact else {}
            torch.testing.assert_close(
                result[name], value, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}", **tolerance
            )
        else:
            assert repr(result[name]) == repr(value) or result[name] == pytest.approx(value, rel=0 if exact else 1e-5)


def plain(value, name=""):
    """The tensors (on the CPU) and other values of a nested result, by their place."""
    if isinstance(value, torch.Tensor):
        return {name: value.detach().cpu()}
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        return {place: part for key, v in value.items() for place, part in plain(v, f"{name}.{key}").items()}
    return {name: value}


def points(device, count=6):
    x, y = TinyData().tensors("test", count)
    return x.to(device), y.to(device)


def net(device):
    return tiny_model(batch_norm=True).eval().to(device)


# --- models


def forward_and_backward(case, device):
    model = case.build().to(device)
    x = case.images(4).to(device).requires_grad_()
    torch.manual_seed(0)  # dropout
    F.cross_entropy(model.train()(x), torch.arange(4, device=device) % 3).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return model.eval()(x), x.grad, gradients, dict(model.named_buffers())


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS, ids=str)
def test_models(case):
    check(lambda device: forward_and_backward(case, device), exact="vit" not in str(case) and "hybrid" not in str(case))


# --- explanations


def explained(device):
    model, x = trained_net(3)
    return model.to(device), x.to(device)


def explain(name, device):
    model, x = explained(device)
    return attribution(name, model, **OPTIONS.get(name, {})).attribute(x)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ("IG", "BSM") else pytest.mark.slow) for n in NAMES])
def test_attributions(name):
    check(lambda device: explain(name, device))


def faithfulness(device):
    model, x = explained(device)
    method = attribution("IG", model)
    maps = method.attribute(x)
    return (
        infidelity(model, x, maps),
        completeness_gap(model, x, maps, torch.zeros_like(x)),
        attribution_lipschitz(method, x[:2], eps=0.1),
        sanity_check(lambda m: attribution("SM", m), model, x),
        boundary_search(model, x, budget=60),
    )


@pytest.mark.slow
def test_measures_of_attributions():
    check(faithfulness)


# --- curvature


def risk(model, loss, device):
    p = make_risk(model, loss)
    x_adv = None if p.x_adv is None else p.x_adv.to(device)
    return EmpiricalRisk(p.model.to(device), p.loss, p.x.to(device), p.y.to(device), x_adv, nonlinear=p.nonlinear)


ESTIMATES = {
    "gauss_newton": lambda p: traces(p, "gauss_newton", group=2, max_probes=4),
    "hutchinson": lambda p: traces(p, "hutchinson", group=2, max_probes=4),
    "exact": lambda p: traces(p, "exact"),
    "wci": lambda p: wci(p, "hutchinson", group=2, max_probes=4),
    "eigenvalues": lambda p: top_eigenvalues(p, 2, tolerance=1e-3),
    "density": lambda p: density(p, vectors=2, steps=4),
    "weights": lambda p: weight_landscape(p, steps=3),
    "gibbs": lambda p: gibbs_risk(p, [torch.full_like(w, 0.01) for w in p.parameters], pairs=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATES)
@pytest.mark.parametrize(("model", "loss"), RISKS)
def test_curvature(model, loss, name):
    if name == "gauss_newton" and model == "vit":
        pytest.skip("the estimator requires a ReLU network")
    check(lambda device: ESTIMATES[name](risk(model, loss, device)), exact=False)


@pytest.mark.parametrize("name", ["gauss_newton", "hutchinson"])
def test_curvature_of_a_small_net(name):
    check(lambda device: ESTIMATES[name](risk("mlp", "trades", device)), exact=False)


@pytest.mark.slow
def test_landscape_of_the_input():
    check(lambda device: input_landscape(net(device), *(value[:1] for value in points(device)), radius=0.1, steps=3))


# --- certificates


def proven(certifier, model, device):
    """In float64, which proofs require on a GPU."""
    return certifier(model.double().eval().to(device))(points(device)[0].double())


CERTIFIERS = {
    "gloro": lambda device: proven(GloRo.proven, tiny_model(), device),
    "centroid": lambda device: proven(NearestCentroid.proven, tiny_centroid_net(), device),
    "smoothed": lambda device: proven(lambda m: Smoothed(m, 0.25, n0=8, n=32, batch_size=20), tiny_model(), device),
    "estimate": lambda device: LipschitzEstimator(tiny_model().to(device))(),
}


@pytest.mark.parametrize("name", CERTIFIERS)
def test_certifiers(name):
    check(CERTIFIERS[name], exact=name in ("smoothed", "estimate"))


# --- data


def augmented(augmentation, device):
    images = torch.randint(0, 256, (8, 3, 16, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    split = MemorySplit(images, torch.arange(8) % 3)
    return [(b.x, b.y, b.index) for b in batches(split, in_order(8, 4), augment=[augmentation], seed=3, device=device)]


def augmentations():
    from data.test_augment import AUGMENTATIONS

    return AUGMENTATIONS


@pytest.mark.slow
@pytest.mark.parametrize("augmentation", augmentations(), ids=repr)
def test_augmentations(augmentation):
    check(lambda device: augmented(augmentation, device))


# --- evaluation, checkpoints, mixed precision


def test_evaluation():
    split = TinyData().test.take(torch.arange(10))

    def task(device):
        result = evaluate(net(device), split, quick(), cascade=True, batch_size=4, device=device, keep=True)
        return result.clean, result.robust, result.broken_by, result.adversarial, result.distance

    check(task)


class Stop(Observer):
    def progress(self, trainer):
        trainer.stop_requested = trainer.step == 6


@pytest.mark.parametrize("first", ["cpu", DEVICE], ids=["from the CPU", "to the CPU"])
def test_checkpoints_move_between_devices(first, tmp_path):
    """A run that is interrupted and changes the device has the weights of one that stayed on the CPU."""
    arguments = {"methods": ("swa",), "batch_norm": True, "epochs": 2}
    with accelerator():
        stayed = tiny_trainer("trades", **arguments)
        stayed.fit()
        started = tiny_trainer("trades", folder=tmp_path, device=first, observers=[Stop()], **arguments)
        with pytest.raises(Interrupted):
            started.fit()
        newest, _ = Checkpoints(tmp_path / "checkpoints").newest()
        assert not any(isinstance(value, PretendTensor) for value in newest.model.values())
        second = DEVICE if first == "cpu" else "cpu"
        moved = tiny_trainer("trades", folder=tmp_path, device=second, **arguments)
        moved.fit(resume=True)
        assert_identical({name: value.cpu() for name, value in weights(moved.model).items()}, weights(stayed.model))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(precision):
    """Close to full precision, with weights in full precision; a step waits at most once, or twice if it scales."""
    with accelerator() as counts:
        results = []
        for choice in ("float32", precision):
            trainer = tiny_trainer("trades", device=DEVICE, precision=choice, clip_norm=1.0)
            batch = first_batch(trainer, DEVICE)
            for _ in range(3):
                before = counts.waits
                step = trainer.train_step(batch)
                assert counts.waits - before <= (2 if choice == "fp16" else 1)
            results.append({name: value.cpu() for name, value in weights(trainer.model).items()})
            assert step.out.logits.dtype == torch.float32
    for name, value in results[0].items():
        assert results[1][name].dtype == torch.float32
        assert not torch.equal(results[1][name], value)
        torch.testing.assert_close(results[1][name], value, rtol=0.05, atol=0.02)


def test_copies_of_models_stay_on_their_device():
    with accelerator():
        model = copy.deepcopy(net(DEVICE))
        assert {value.device for value in model.state_dict().values()} == {DEVICE}
