"""Each fault that spoils an evaluation, as a model that has it."""

import pytest
import torch
from torch import nn

from atoll.attacks import APGD, PGD, Square
from atoll.attacks.diagnostics import diagnose_model, diagnose_results
from atoll.attacks.evaluate import evaluate
from atoll.data import MemorySplit
from atoll.errors import InputError
from atoll.threat import ThreatModel
from attack_cases import images

THREAT = ThreatModel("linf", 0.05)


class Wrapped(nn.Module):
    def __init__(self, forward, training=False):
        super().__init__()
        self.body = images()[0].float()
        self.function = forward
        self.train(training)

    def forward(self, x):
        return self.function(self.body, x)


def quantized(body, x):
    return body((x * 16).round() / 16)


def saturated(body, x):
    return 1e4 * body(x)


def by_batch(body, x):
    logits = body(x)
    return logits - logits.mean(0, keepdim=True)


def randomized(body, x):
    return body(x + 0.1 * torch.randn_like(x))


def shaky(body, x):
    """Differences of the size of rounding, as from atomic additions on GPUs."""
    return body(x) * (1 + 1e-5 * torch.rand(()))


# A new fault joins by one line: its kind and a model that has it.
FAULTS = {
    "softmax": Wrapped(lambda body, x: body(x).softmax(1)),
    "train mode": Wrapped(lambda body, x: body(x), training=True),
    "zero gradients": Wrapped(quantized),
    "randomized": Wrapped(randomized),
    "non-deterministic": Wrapped(shaky),
    "batch-dependent": Wrapped(by_batch),
}


def look(model, x=None, attacks=None):
    x = torch.rand(16, 1, 6, 6, generator=torch.Generator().manual_seed(0)) if x is None else x
    with torch.no_grad():
        y = model(x).argmax(1)
    return {f.kind: f.message for f in diagnose_model(model, x, y, attacks or {"PGD": PGD(THREAT)})}


def test_a_healthy_model_raises_nothing():
    assert look(Wrapped(lambda body, x: body(x))) == {}
    assert look(Wrapped(lambda body, x: body(x) * (1 + 1e-5 * len(x)))) == {}  # kernels depend on the batch size


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_reported_alone_and_the_model_is_restored(kind):
    model = FAULTS[kind]
    modes = [module.training for module in model.modules()]
    assert list(look(model)) == [kind]
    assert [module.training for module in model.modules()] == modes


def test_saturation_differs_from_quantization():
    assert "quantized" in look(Wrapped(quantized))["zero gradients"]
    assert "saturated softmax" in look(Wrapped(saturated))["saturated"]


def test_inputs_and_radii_of_the_wrong_range():
    model = Wrapped(lambda body, x: body(x))
    x = torch.rand(16, 1, 6, 6)
    with pytest.raises(InputError, match="move normalization inside the model"):
        look(model, x * 2 - 1)
    with pytest.raises(InputError, match=r"expected values in \[0, 1\], got \[.*25"):
        look(model, (x * 255).round())
    assert "divided by 255 twice" in look(model, x / 255)["range"]
    assert "8/255" in look(model, x, {"PGD": PGD(ThreatModel("linf", 8))})["eps"]
    free, half, less = (ThreatModel("linf", eps, bounds) for eps, bounds in ((8, None), (0.5, (0, 1)), (0.49, (0, 1))))
    assert list(look(model, x, {"free": PGD(free), "half": PGD(half)})) == ["eps"]
    assert look(model, x, {"free": PGD(free), "less": PGD(less)}) == {}


def test_one_gray_image_is_no_fault():
    model, gray = Wrapped(lambda body, x: body(x)), torch.full((2, 1, 6, 6), 0.5)
    assert look(model, gray[:1]) == {}
    assert list(look(model, gray)) == ["range"]


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("zero gradients", lambda marked: torch.where(marked, 0.0, 1.0)), ("saturated", lambda marked: 1 + 1e4 * marked)],
)
def test_gradients_may_vanish_at_a_tenth_of_the_points(kind, factor):
    def marked(body, x):
        return factor(x[:, 0, 0, :1] == 0) * body(x)

    x = torch.rand(20, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    for count in (2, 3):
        x[:count, 0, 0, 0] = 0
        warnings = look(Wrapped(marked), x)
        assert list(warnings) == ([kind] if count > 2 else [])
    assert "zero at 15 % of the points" in warnings[kind]


def test_more_targets_than_classes():
    model = Wrapped(lambda body, x: body(x))  # five classes
    assert "4 targets per point instead of 9" in look(model, attacks={"APGD-T": APGD(THREAT, targets=9)})["classes"]


def test_no_gradient_at_all_is_an_error_unless_nobody_needs_one():
    for model in (Wrapped(lambda body, x: body(x.detach()).detach()), Wrapped(lambda body, x: body(x.detach()))):
        with pytest.raises(InputError, match="use Square or RayS"):
            look(model)
        assert look(model, attacks={"Square": Square(THREAT)}) == {}


def test_nan_logits_are_an_error():
    with pytest.raises(InputError, match="finite logits"):
        look(Wrapped(lambda body, x: body(x) * float("nan")))


def test_gradient_masking_is_a_warning():
    """Rounding inside hides the gradient; the black-box attack succeeds, and a warning says so."""
    model = Wrapped(lambda body, x: body((x * 32).round() / 32) + 0 * x.sum())
    x = torch.rand(60, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    split = MemorySplit(x, model(x).detach().argmax(1))
    attacks = {"APGD-CE": APGD(THREAT, steps=5), "Square": Square(THREAT, queries=300)}
    result = evaluate(model, split, attacks, cascade=True)
    kinds = [warning.kind for warning in result.warnings]
    assert kinds == ["zero gradients", "gradient masking"]
    healthy = Wrapped(lambda body, x: body(x))
    split = MemorySplit(x, healthy(x).detach().argmax(1))
    attacks = {"APGD-T": APGD(THREAT, targets=4), "Square": Square(THREAT, queries=300)}
    result = evaluate(healthy, split, attacks, cascade=True)
    assert result.warnings == ()


@pytest.mark.parametrize(("total", "few"), [(100, 2), (1000, 2), (5000, 10)])
def test_a_few_points_may_be_chance(total, few):
    white, black = APGD(THREAT), Square(THREAT)

    def kinds(broken, failed):
        attacks = {"white": white, "black": black}
        return [w.kind for w in diagnose_results(attacks, [0, broken], [50, 50], [50 - failed, 50], total)]

    assert kinds(few, few) == []
    assert kinds(few + 1, few) == ["gradient masking"]
    assert kinds(few, few + 1) == ["unconfirmed"]
    blind_first = {"black": black, "white": white}
    assert [*diagnose_results(blind_first, [50, 0], [50, 0], [50, 0], total)] == []
