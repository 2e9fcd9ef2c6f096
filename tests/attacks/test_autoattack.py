"""AutoAttack by the calls of existing scripts, and the sets of attacks behind its versions."""

import pytest
import torch
from torch import nn

from atoll.attacks import APGD, AutoAttack, Square
from atoll.attacks.suites import SUITES, suite
from atoll.errors import CheckpointError, InputError
from atoll.threat import ThreatModel
from attack_cases import linear, plane


def square_points(count=40):
    """Points of the unit square as 1x1x2 images, which Square takes too."""
    model, x, y = plane()
    return nn.Sequential(nn.Flatten(), model), x[:count].view(-1, 1, 1, 2), y[:count]


QUICK = {"version": "custom", "attacks_to_run": ["APGD-CE", "APGD-T"], "verbose": False}


def run(version="standard", *, norm="Linf", eps=0.08, **options):
    model, x, y = square_points()
    adversary = AutoAttack(model, norm=norm, eps=eps, version=version, **{"verbose": False, **options})
    return adversary, model, x, y


@pytest.mark.parametrize("norm", ["Linf", "L2", "L1"])
def test_standard_finds_the_truth_of_a_linear_model(norm):
    model, x, _, _ = linear(norm.lower())
    x = (x / 8 + 0.5).clamp(0, 1)  # into the bounds, where distances are others
    y = model(x).argmax(1)
    gap = (model.weight[1] - model.weight[0]).detach()
    eps = {"Linf": 0.05, "L2": 0.15, "L1": 0.3}[norm]
    # The largest change of the margin within ball and box is a linear programme (a quadratic one for l2).
    threat = ThreatModel(norm.lower(), eps)
    logits = model(x).detach()
    rise = (logits[:, 0] - logits[:, 1]) * 1.0
    change = threat.to_hyperplane(x, gap.expand_as(x), rise)
    reachable = (change @ gap - rise).abs() < 1e-5
    truth = reachable & (threat.distance(x + change, x) <= eps)
    adversary = AutoAttack(model, norm=norm, eps=eps, verbose=False)
    adversary.attacks["Square"] = Square(threat, queries=300)  # the others have broken all there is
    x_adv = adversary.run_standard_evaluation(x[:60], y[:60], bs=30)
    broken = model(x_adv).argmax(1) != y[:60]
    close = (threat.distance(x + change, x) - eps).abs()[:60] < 0.01 * eps
    assert torch.equal(broken[~close], truth[:60][~close])
    assert adversary.evaluation.robust.correct == int((~broken).sum())


def test_what_the_versions_are_made_of():
    threat = ThreatModel("linf", 0.3)
    assert list(suite("standard", threat)) == ["APGD-CE", "APGD-T", "FAB-T", "Square"]
    assert list(suite("plus", threat)) == ["APGD-CE", "APGD-DLR", "FAB", "Square", "APGD-T", "FAB-T"]
    assert {member.eot for member in suite("rand", threat).values()} == {20}
    l1 = suite("standard", ThreatModel("l1", 5.0))
    assert (l1["APGD-CE"].restarts, l1["APGD-T"].targets) == (5, 5)


def test_the_calls_of_existing_scripts():
    adversary, model, x, y = run(**QUICK)
    x_adv, labels = adversary.run_standard_evaluation(x, y, bs=16, return_labels=True)
    assert x_adv.shape == x.shape
    assert (x_adv - x).abs().max() <= 0.08 * (1 + 1e-5)
    assert torch.equal(labels, model(x_adv).argmax(1))
    assert adversary.clean_accuracy(x, y) == 1.0
    alone = adversary.run_standard_evaluation_individual(x, y, bs=16)
    assert list(alone) == list(adversary.attacks)
    worst = torch.stack([model(part).argmax(1) != y for part in alone.values()]).any(0)
    assert torch.equal(worst, labels != y)


def test_custom_attacks_and_what_is_printed(capsys, tmp_path):
    model, x, y = square_points()
    adversary = AutoAttack(
        model, eps=0.08, version="custom", attacks_to_run=["apgd-ce", "apgd-dlr"], log_path=tmp_path / "log"
    )
    adversary.run_standard_evaluation(x, y)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "initial accuracy: 100.00%"
    assert lines[1].startswith("robust accuracy after apgd-ce: ")
    assert lines[-1] == f"robust accuracy: {100 * adversary.evaluation.robust.value:.2f}%"
    assert (tmp_path / "log").read_text().splitlines() == lines


def test_a_state_folder_belongs_to_one_question(tmp_path):
    """It resumes the same evaluation; with other inputs, weights, radius, seed or attacks it is refused."""
    adversary, model, x, y = run(**QUICK)
    x, y = x[:8], y[:8]
    state = tmp_path / "state"
    first = adversary.run_standard_evaluation(x, y, bs=16, state_path=state)
    for bs in (16, 7, None):
        assert torch.equal(adversary.run_standard_evaluation(x, y, bs=bs, state_path=state), first)

    other_model, _, _ = square_points()
    other_model[1][2].bias.data[0] += 1e-3
    x2 = (x + 0.01).clamp(0, 1)
    flipped = torch.where(torch.arange(len(y)) == 3, (y + 1) % 4, y)
    cases = {
        "inputs": (adversary, x2, y),  # with equal labels
        "labels": (adversary, x, flipped),
        "weights": (AutoAttack(other_model, eps=0.08, **QUICK), x, y),
        "eps": (AutoAttack(model, eps=0.07, **QUICK), x, y),
        "norm": (AutoAttack(model, norm="L2", eps=0.08, **QUICK), x, y),
        "seed": (AutoAttack(model, eps=0.08, seed=1, **QUICK), x, y),
        "attacks": (AutoAttack(model, eps=0.08, version="custom", attacks_to_run=["FGSM"], verbose=False), x, y),
    }
    for what, (other, points, labels) in cases.items():
        with pytest.raises(CheckpointError, match=r"progress of another evaluation.*choose another folder"):
            other.run_standard_evaluation(points, labels, state_path=state)
        fresh = other.run_standard_evaluation(points, labels, state_path=tmp_path / what)
        assert (other.threat.distance(fresh, points) <= other.threat.radius * (1 + 1e-5)).all()
    assert torch.equal(adversary.run_standard_evaluation(x, y, state_path=state), first)  # still intact


def test_fast_is_an_estimate_that_covers_standard(capsys, monkeypatch):
    def short(threat):
        return {"APGD-T": APGD(threat, targets=3), "Square": Square(threat, queries=100)}

    monkeypatch.setitem(SUITES, "standard", short)
    model, x, y = square_points()
    fast = AutoAttack(model, eps=0.08, version="fast")
    fast.run_standard_evaluation(x, y)
    standard = AutoAttack(model, eps=0.08, verbose=False)
    standard.run_standard_evaluation(x, y)
    low, high = fast.evaluation.estimate.interval
    assert low <= standard.evaluation.robust.value <= high == fast.evaluation.robust.value
    assert capsys.readouterr().out.splitlines()[-1] == f"estimate: {fast.evaluation.estimate}"


def test_a_randomized_model_is_attacked_on_average():
    """Noise on the inputs: `rand` breaks the points that are broken on average, and few others."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.draw = square_points()[0], torch.Generator().manual_seed(0)

        def forward(self, x):
            return self.inner(x + 0.01 * torch.randn(x.shape, generator=self.draw))

    _, x, y = square_points()
    noisy = AutoAttack(Noisy(), eps=0.08, version="rand", verbose=False)
    noisy.run_standard_evaluation(x, y)
    plain = AutoAttack(Noisy().inner, eps=0.08, **QUICK)
    plain.run_standard_evaluation(x, y)
    assert "randomized" in [warning.kind for warning in noisy.evaluation.warnings]
    assert noisy.evaluation.robust.correct == pytest.approx(plain.evaluation.robust.correct, abs=4)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"norm": "L7"}, "norm: expected Linf, L2 or L1, got 'L7'"),
        ({"version": "best"}, "version: got 'best'; expected one of fast, plus, rand, standard"),
        ({"version": "custom"}, "attacks_to_run: expected at least one"),
        ({"attacks_to_run": ["apgd-ce"]}, "attacks_to_run: expected version='custom', got version='standard'"),
        ({"version": "custom", "attacks_to_run": ["magic"]}, "attacks: expected an attack, got 'magic'"),
        ({"eps": -1}, "eps: expected a finite number"),
    ],
)
def test_wrong_arguments_are_refused(options, sentence):
    with pytest.raises(InputError, match=sentence):
        AutoAttack(nn.Identity(), **options)
