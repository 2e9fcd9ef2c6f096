"""AutoAttack by the calls of existing scripts, and the sets of attacks behind its versions."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from atoll.attacks import APGD, FAB, AutoAttack, Square, evaluate
from atoll.attacks.autoattack import CascadeLog
from atoll.attacks.suites import SUITES, suite
from atoll.data import MemorySplit
from atoll.errors import CheckpointError, InputError
from atoll.threat import ThreatModel
from attack_cases import linear, plane, run_script


def square_points(count=40):
    """Points of the unit square as 1x1x2 images, which Square takes too."""
    model, x, y = plane()
    return nn.Sequential(nn.Flatten(), model), x[:count].view(-1, 1, 1, 2), y[:count]


QUICK = {"version": "custom", "attacks_to_run": ["APGD-CE", "APGD-T"], "verbose": False}


def quick(model, **options):
    """A custom version without restarts and with fewer steps."""
    adversary = AutoAttack(model, **{"eps": 0.08, **QUICK, **options})
    adversary.apgd.n_restarts, adversary.apgd.n_iter, adversary.apgd_targeted.n_iter = 1, 50, 50
    return adversary


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
    adversary.square.n_queries = 300  # the others have broken all there is
    x_adv = adversary.run_standard_evaluation(x[:40], y[:40], bs=30)
    broken = model(x_adv).argmax(1) != y[:40]
    close = (threat.distance(x + change, x) - eps).abs()[:40] < 0.01 * eps
    assert torch.equal(broken[~close], truth[:40][~close])
    assert adversary.evaluation.robust.correct == int((~broken).sum())


def test_what_the_versions_are_made_of():
    threat = ThreatModel("linf", 0.3)
    assert list(suite("standard", threat)) == ["APGD-CE", "APGD-T", "FAB-T", "Square"]
    assert list(suite("plus", threat)) == ["APGD-CE", "APGD-DLR", "FAB", "Square", "APGD-T", "FAB-T"]
    assert {member.eot for member in suite("rand", threat).values()} == {20}
    l1 = suite("standard", ThreatModel("l1", 5.0))
    assert (l1["APGD-CE"].restarts, l1["APGD-T"].targets) == (5, 5)


# Arguments of the original, in order, with their defaults; there, a GPU is the default device.
ARGUMENTS = {
    AutoAttack: {
        "norm": "Linf", "eps": 0.3, "seed": None, "verbose": True, "attacks_to_run": (), "version": "standard",
        "is_tf_model": False, "device": None, "log_path": None,
    },
    AutoAttack.run_standard_evaluation: {"bs": 250, "return_labels": False, "state_path": None},
    AutoAttack.run_standard_evaluation_individual: {"bs": 250, "return_labels": False},
    AutoAttack.clean_accuracy: {"bs": 250},
    AutoAttack.set_version: {"version": "standard"},
}  # fmt: skip


def test_arguments_are_those_of_the_original():
    for function, expected in ARGUMENTS.items():
        parameters = inspect.signature(function).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        assert list(defaults.items()) == list(expected.items())
        assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def test_what_scripts_read_after_the_construction(capsys):
    model = nn.Identity()
    for verbose in (False, True):
        adversary = AutoAttack(model, "L2", "1/4", 3, verbose, version="plus", device="cpu")
        assert capsys.readouterr().out == verbose * "setting parameters for plus version\n"
        names = ("model", "norm", "epsilon", "seed", "verbose", "version", "is_tf_model", "device")
        values = (model, "L2", "1/4", 3, verbose, "plus", False, torch.device("cpu"))
        assert tuple(getattr(adversary, name) for name in names) == values


def test_the_calls_of_existing_scripts():
    model, x, y = square_points()
    adversary = quick(model)
    x_adv, labels = adversary.run_standard_evaluation(x, y, bs=16, return_labels=True)
    assert x_adv.shape == x.shape
    assert (x_adv - x).abs().max() <= 0.08 * (1 + 1e-5)
    assert torch.equal(labels, model(x_adv).argmax(1))
    assert adversary.clean_accuracy(x, y) == 1.0
    alone = adversary.run_standard_evaluation_individual(x, y, bs=16)
    assert list(alone) == adversary.attacks_to_run
    worst = torch.stack([model(part).argmax(1) != y for part in alone.values()]).any(0)
    assert torch.equal(worst, labels != y)


def test_a_state_folder_belongs_to_one_question(tmp_path):
    """It resumes the same evaluation; with other inputs, weights, radius, seed or attacks it is refused."""
    model, x, y = square_points()
    adversary = quick(model)
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
        "weights": (quick(other_model), x, y),
        "eps": (quick(model, eps=0.07), x, y),
        "norm": (quick(model, norm="L2"), x, y),
        "seed": (quick(model, seed=1), x, y),
        "attacks": (quick(model, attacks_to_run=["FGSM"]), x, y),
        "settings": (AutoAttack(model, eps=0.08, **{**QUICK, "attacks_to_run": ["APGD-CE"]}), x, y),
    }
    for what, (other, points, labels) in cases.items():
        with pytest.raises(CheckpointError, match=r"progress of another evaluation.*choose another folder"):
            other.run_standard_evaluation(points, labels, state_path=state)
        fresh = other.run_standard_evaluation(points, labels, state_path=tmp_path / what)
        assert (other.threat.distance(fresh, points) <= other.threat.radius * (1 + 1e-5)).all()
    assert torch.equal(adversary.run_standard_evaluation(x, y, state_path=state), first)  # still intact


def test_with_a_state_folder_the_seed_is_0_unless_given(tmp_path):
    model, x, y = square_points(20)

    def run(seed, folder=None):
        adversary = quick(model, seed=seed, attacks_to_run=["apgd-ce"])
        return adversary.run_standard_evaluation(x, y, state_path=None if folder is None else tmp_path / folder)

    assert torch.equal(run(None, "none"), run(0))
    assert torch.equal(run(3, "three"), run(3))
    assert not torch.equal(run(3), run(0))


def test_fast_is_an_estimate_that_covers_standard(capsys, monkeypatch):
    def short(threat):
        return {"APGD-T": APGD(threat, targets=3), "Square": Square(threat, queries=100)}

    monkeypatch.setitem(SUITES, "standard", short)
    model, x, y = square_points()
    fast = AutoAttack(model, eps=0.08, version="fast")
    fast.run_standard_evaluation(x, y)
    standard = AutoAttack(model, eps=0.08, verbose=False)
    standard.run_standard_evaluation(x, y)
    assert [attack.name for attack in fast.evaluation.attacks][-2:] == list(short(fast.threat))
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
    plain = quick(Noisy().inner)
    plain.run_standard_evaluation(x, y)
    assert "randomized" in [warning.kind for warning in noisy.evaluation.warnings]
    assert noisy.evaluation.robust.correct == pytest.approx(plain.evaluation.robust.correct, abs=4)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"norm": "L7"}, "norm: expected Linf, L2 or L1, got 'L7'"),
        ({"version": "best"}, "version: got 'best'; expected one of custom, fast, plus, rand, standard"),
        ({"version": "costum"}, "version: got 'costum'; did you mean custom"),
        ({"version": "custom", "attacks_to_run": "apgd-ce"}, "attacks_to_run: expected a list of names, got 'apgd-ce'"),
        (
            {"version": "custom", "attacks_to_run": ["apgd-ce", "APGD-CE"]},
            "expected each attack once, got APGD-CE twice",
        ),
        ({"is_tf_model": True}, "TensorFlow models are not supported"),
        ({"model": "resnet"}, "model: expected a module or a function, got str"),
        ({"device": "gpu"}, "device: expected auto, cpu, cuda, cuda:N or mps, got 'gpu'"),
        ({"version": "plus", "norm": "L1"}, "norm: expected linf or l2 for plus, got l1"),
        ({"attacks_to_run": ["apgd-ce"]}, "attacks_to_run: expected version='custom', got version='standard'"),
        ({"version": "custom", "attacks_to_run": ["magic"]}, "attacks: expected an attack, got 'magic'"),
        ({"eps": -1}, "eps: expected a finite number"),
    ],
)
def test_wrong_arguments_are_refused(options, sentence):
    with pytest.raises(InputError, match=sentence):
        AutoAttack(**{"model": nn.Identity(), "verbose": False, **options})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda a: setattr(a, "attack_to_run", ["apgd-ce"]),
            "AutoAttack has no such attribute; did you mean attacks_to_r",
        ),
        (lambda a: setattr(a, "epsilon", 0.1), "epsilon: cannot be set after construction; create another AutoAttack"),
        (
            lambda a: setattr(a, "version", "rand"),
            "version: cannot be set after construction; call set_version instead",
        ),
        (lambda a: setattr(a, "attacks_to_run", ["apgd-c"]), "got 'apgd-c'; did you mean APGD-CE"),
        (lambda a: setattr(a, "device", "cuda:99"), "device: cuda:99 is not available"),
        (lambda a: a.set_version("standrad"), "version: got 'standrad'; did you mean standard"),
    ],
)
def test_wrong_changes_are_refused(change, sentence):
    adversary = run()[0]
    with pytest.raises(InputError, match=sentence):
        change(adversary)
    assert adversary.version == "standard"
    assert adversary.attacks_to_run == ["apgd-ce", "apgd-t", "fab-t", "square"]


def test_nothing_to_run_is_an_error():
    adversary, _, x, y = run("custom")
    with pytest.raises(InputError, match="attacks_to_run: expected at least one attack, got none"):
        adversary.run_standard_evaluation(x, y)
    adversary.attacks_to_run = ["apgd-ce"]
    adversary.attacks_to_run.append("apgd-ce")
    with pytest.raises(InputError, match="expected each attack once"):
        adversary.run_standard_evaluation(x, y)


def test_the_settings_of_fast_are_fixed():
    adversary = run("fast")[0]
    adversary.apgd.n_iter = adversary.apgd.n_iter  # the present value is fine
    for change in (
        lambda: setattr(adversary.apgd, "n_iter", 7),
        lambda: setattr(adversary.apgd, "n_iter", 7000),
        lambda: setattr(adversary, "attacks_to_run", ["fab"]),
    ):
        with pytest.raises(InputError, match="of version='fast' are fixed; use version='custom'"):
            change()
    adversary.set_version("standard")
    adversary.apgd.n_iter = 7
    assert adversary.attacks["APGD-CE"].steps == 7


def test_versions_are_the_suites():
    """The settings of a version give the attacks of the suite, also after another version."""
    for norm in ("Linf", "L2", "L1"):
        adversary = run(norm=norm)[0]
        for version in ("rand", "standard", "plus", "rand", "standard")[: 5 if norm != "L1" else 2]:
            adversary.set_version(version)
            own, theirs = adversary.attacks, suite(version, adversary.threat)
            assert list(own) == list(theirs)
            for name in own:
                settings = [(key, value) for key, value in vars(own[name]).items() if key not in ("rule", "objective")]
                assert settings == [(key, vars(theirs[name])[key]) for key, _ in settings]


def test_results_are_those_of_evaluate():
    adversary, model, x, y = run(seed=3)
    adversary.fab.n_iter, adversary.square.n_queries = 10, 20
    x_adv = adversary.run_standard_evaluation(x, y)
    threat = adversary.threat
    short = {"FAB-T": FAB(threat, steps=10, targets=9), "Square": Square(threat, queries=20)}
    attacks = suite("standard", threat) | short
    result = evaluate(model, MemorySplit(x, y), attacks, cascade=True, seed=3, keep=True)
    assert torch.equal(x_adv, result.adversarial)
    assert torch.equal(adversary.evaluation.broken_by, result.broken_by)


def test_without_a_seed_every_run_is_different_unless_pytorch_is_seeded():
    model, x, y = square_points()
    adversary = quick(model)
    adversary.attacks_to_run, adversary.apgd.n_restarts = ["apgd-ce"], 1
    torch.manual_seed(5)
    first, second = (adversary.run_standard_evaluation(x, y) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(adversary.run_standard_evaluation(x, y), first)
    assert not torch.equal(first, second)
    adversary.seed = 1
    third, fourth = (adversary.run_standard_evaluation(x, y) for _ in range(2))
    assert torch.equal(third, fourth)


def test_devices_types_and_modes_are_respected():
    model, x, y = square_points(8)
    model.train()
    adversary = quick(model.double().forward)  # a method, so its weights are known
    assert adversary.device == torch.device("cpu")
    before = torch.random.get_rng_state()
    adversary.seed = 0
    with torch.inference_mode(False), torch.no_grad():
        x_adv, labels = adversary.run_standard_evaluation(x.double(), y.to(torch.int16), return_labels=True)
    assert (x_adv.dtype, labels.dtype) == (torch.float64, torch.int16)
    assert torch.equal(labels.long(), model(x_adv).argmax(1))
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), before)
    assert "train mode" in [warning.kind for warning in adversary.evaluation.warnings]


def test_an_attack_is_logged_as_soon_as_the_next_one_starts():
    lines = []
    log = CascadeLog(lines.append, 10)
    for progress in (("clean", 10, 10), ("APGD-CE", 0.5, 8), ("APGD-CE", 8, 8), ("APGD-T", 0.1, 5), ("APGD-T", 0.2, 5)):
        log.on_progress(*progress)
    assert timeless(lines) == [
        "initial accuracy: 80.00%",
        "apgd-ce - 1/1 - 3 out of 8 successfully perturbed",
        "robust accuracy after APGD-CE: 50.00% (total time s)",
    ]
    resumed = CascadeLog(lines.append, 10)
    resumed.on_progress("APGD-T", 0.2, 5)  # says nothing of the clean accuracy, and comes at the end
    assert len(lines) == 3


def test_the_log_of_a_resumed_evaluation_is_complete(tmp_path):
    model, x, y = square_points(20)
    log, state = tmp_path / "log.txt", tmp_path / "state"
    adversary = quick(model, log_path=log)
    logs = []
    for _ in range(2):
        adversary.run_standard_evaluation(x, y, state_path=state)
        logs.append(timeless(log.read_text().splitlines()))
        log.unlink()
    assert logs[0][0] == f"Created state in {state}"
    assert logs[1][0] == f"Restored state from {state}"
    assert logs[0][1:] == logs[1][1:]


def timeless(lines):
    return [re.sub(r"[\d.]+ s\)", "s)", line) for line in lines]


def test_the_last_lines_if_nothing_is_broken(tmp_path):
    model, x, y = square_points(5)
    quick(model, eps=0.0, attacks_to_run=["apgd-ce"], log_path=tmp_path / "log.txt").run_standard_evaluation(x, y)
    last, robust = (tmp_path / "log.txt").read_text().splitlines()[-2:]
    assert last.startswith("max Linf perturbation: 0.00000, nan in tensor: 0, max: 0.")
    assert robust == "robust accuracy: 100.00%"


def test_a_state_of_the_original_is_refused(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    model, x, y = square_points()
    adversary = quick(model)
    with pytest.raises(InputError, match=r"state_path: expected a folder, got the file .*; choose another path"):
        adversary.run_standard_evaluation(x, y, state_path=tmp_path / "state.json")


def test_subclasses_may_add_attributes():
    class Mine(AutoAttack):
        def __init__(self, model):
            super().__init__(model, verbose=False)
            self.extra = 1

    assert Mine(nn.Identity()).extra == 1


# Scripts as people write them for the original; `model`, `x_test` and `y_test` exist.
SCRIPTS = {
    "a function, the standard version": """
        from autoattack import AutoAttack

        forward_pass = lambda images: model(images)
        adversary = AutoAttack(forward_pass, norm='Linf', eps=8/100, version='standard')
        adversary.fab.n_iter = 10
        adversary.square.n_queries = 20
        x_adv = adversary.run_standard_evaluation(x_test, y_test, bs=8)
    """,
    "a custom list in the constructor": """
        from autoattack import AutoAttack

        adversary = AutoAttack(model, norm='Linf', eps=0.08, version='custom', attacks_to_run=['apgd-ce', 'apgd-dlr'])
        adversary.apgd.n_restarts = 1
        x_adv = adversary.run_standard_evaluation(x_test, y_test)
    """,
    "a custom list afterwards, log and saved file": """
        from argparse import Namespace
        from autoattack import AutoAttack

        args = Namespace(norm='Linf', epsilon=0.08, version='custom', log_path='log_file.txt', n_ex=10, batch_size=4)
        adversary = AutoAttack(model, norm=args.norm, eps=args.epsilon, log_path=args.log_path, version=args.version)
        if args.version == 'custom':
            adversary.attacks_to_run = ['apgd-ce', 'fab']
            adversary.apgd.n_restarts = 2
            adversary.fab.n_restarts = 2
            adversary.fab.n_iter = 10
        with torch.no_grad():
            x_adv = adversary.run_standard_evaluation(x_test[:args.n_ex], y_test[:args.n_ex], bs=args.batch_size)
        torch.save({'adv_complete': x_adv}, 'aa_{}_{}_eps_{:.5f}.pth'.format(args.version, len(x_adv), args.epsilon))
    """,
    "every attack on all points": """
        from autoattack import AutoAttack

        adversary = AutoAttack(model, norm='L2', eps=0.08, version='standard', verbose=False, device='cpu')
        adversary.apgd_targeted.n_iter = adversary.fab.n_iter = adversary.square.n_queries = 20
        individual = adversary.run_standard_evaluation_individual(x_test, y_test, bs=x_test.size(0))
        x_adv = x_test.clone()
        for key in ['apgd-ce', 'apgd-t', 'fab-t', 'square']:
            wrong = model(individual[key]).argmax(1) != y_test
            x_adv[wrong] = individual[key][wrong]
    """,
    "a cheap version with few steps": """
        from autoattack import AutoAttack

        adversary = AutoAttack(model, norm='Linf', eps=0.08, seed=0, version='standard', device=torch.device('cpu'))
        adversary.attacks_to_run = ['apgd-ce', 'apgd-t', 'fab-t', 'square']
        adversary.apgd.n_iter = adversary.apgd_targeted.n_iter = adversary.fab.n_iter = 5
        adversary.apgd_targeted.n_target_classes = adversary.fab.n_target_classes = 2
        adversary.square.n_queries = 2
        x_adv = adversary.run_standard_evaluation(x_test, y_test, bs=100)
    """,
    "only Square": """
        from autoattack import AutoAttack

        adversary = AutoAttack(model, norm='Linf', eps=0.08, version='standard')
        adversary.seed = 42
        adversary.attacks_to_run = ['square']
        adversary.verbose = True
        adversary.square.n_queries = 25
        adversary.square.n_restarts = 2
        adversary.square.p_init = .3
        adversary.square.verbose = False
        x_adv, y_adv = adversary.run_standard_evaluation(x_test, y_test, return_labels=True)
        assert (model(x_adv).argmax(1) == y_adv).all()
    """,
    "the settings of l1 by hand": """
        from autoattack import AutoAttack

        num_classes = model(x_test).shape[1]
        adversary = AutoAttack(model, norm='L1', eps=0.1, version='custom', seed=1)
        adversary.attacks_to_run = ['apgd-ce', 'apgd-t', 'fab-t']
        if adversary.norm in ['Linf', 'L2']:
            adversary.apgd.n_restarts = 1
        elif adversary.norm in ['L1']:
            adversary.apgd.use_largereps = True
            adversary.apgd_targeted.use_largereps = True
            adversary.apgd.n_restarts = 2
            adversary.apgd_targeted.n_target_classes = num_classes - 1
        adversary.fab.n_target_classes = min(9, num_classes - 1)
        adversary.fab.n_iter = adversary.apgd_targeted.n_iter = 20
        x_adv = adversary.run_standard_evaluation(x_test[:10], y_test[:10])
    """,
    "a randomized model with fewer passes": """
        from autoattack import AutoAttack

        adversary = AutoAttack(model, norm='Linf', eps=0.08, version='rand', log_path='rand.txt')
        adversary.apgd.eot_iter = 2
        adversary.apgd.n_iter = 20
        x_adv = adversary.run_standard_evaluation(x_test, y_test, bs=16)
    """,
    "a state file": """
        from pathlib import Path
        from autoattack import AutoAttack

        state_path = Path('aa_state.json')
        for attempt in range(2):
            adversary = AutoAttack(model, eps=0.08, version='custom', attacks_to_run=['apgd-ce'], log_path='log.txt')
            adversary.apgd.n_restarts = 1
            x_adv = adversary.run_standard_evaluation(x_test, y_test, state_path=state_path)
    """,
    "settings only if they exist": """
        from autoattack import AutoAttack

        adversary = AutoAttack(model, norm='Linf', eps=0.08, version='custom', attacks_to_run=['apgd-t'], verbose=False)
        for name, steps in [('apgd', 10), ('apgd_targeted', 10), ('fab', 10), ('moeva', 10)]:
            if hasattr(adversary, name) and hasattr(getattr(adversary, name), 'n_iter'):
                getattr(adversary, name).n_iter = steps
        if hasattr(adversary.square, 'n_steps'):
            adversary.square.n_steps = 3
        x_adv = adversary.run_standard_evaluation(x_test, y_test)
    """,
    "positional arguments and batches": """
        from autoattack import AutoAttack

        adversary = AutoAttack(model, 'Linf', 0.08, 0, False, ['apgd-ce'], 'custom', False, 'cpu', None)
        adversary.apgd.n_restarts = 1
        x_adv = torch.cat([
            adversary.run_standard_evaluation(x, y, bs=len(y)) for x, y in zip(x_test.split(8), y_test.split(8))
        ])
        robust = adversary.clean_accuracy(x_adv, y_test, bs=8)
        assert round(robust, 6) == round((model(x_adv).argmax(1) == y_test).float().mean().item(), 6)
    """,
    "several radii": """
        from autoattack import AutoAttack

        accuracies = []
        for eps in [0.02, 0.04, 0.08]:
            adversary = AutoAttack(model, norm='Linf', eps=eps, version='custom', attacks_to_run=['apgd-ce'], seed=0)
            adversary.verbose = False
            adversary.apgd.n_restarts = 1
            x_adv = adversary.run_standard_evaluation(x_test, y_test)
            accuracies.append((adversary.get_logits(x_adv).argmax(1) == y_test).float().mean().item())
        assert accuracies == sorted(accuracies, reverse=True)
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_for_the_original_run(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model, x, y = square_points(20)
    names = run_script(SCRIPTS[name], model=model.eval(), x_test=x, y_test=y)
    adversary, x_adv = names["adversary"], names["x_adv"]
    x, y = x[: len(x_adv)], y[: len(x_adv)]
    distance = {"Linf": lambda d: d.abs().amax(1), "L2": lambda d: d.norm(dim=1), "L1": lambda d: d.abs().sum(1)}
    assert float(distance[adversary.norm]((x_adv - x).flatten(1)).max()) <= adversary.epsilon * (1 + 1e-5)
    assert x_adv.min() >= 0
    assert x_adv.max() <= 1
    robust = (model(x_adv).argmax(1) == y).float().mean().item()
    assert 0.2 < robust < 0.95

    lines = capsys.readouterr().out.splitlines()
    if adversary.verbose and "individual" not in names:
        including = ", ".join(adversary.attacks_to_run)
        assert f"using {adversary.version} version including {including}." in lines
        assert lines[-1] == f"robust accuracy: {robust:.2%}"
        assert re.fullmatch(
            rf"max {adversary.norm} perturbation: 0\.\d{{5}}, nan in tensor: 0, max: [01]\.\d{{5}}, min: 0\.\d{{5}}",
            lines[-2],
        )
        start = len(lines) - lines[::-1].index("initial accuracy: 100.00%")
        rest = [line for line in lines[start:-2] if not line.startswith("Warning: ")]
        left = len(x)
        for attack, count, accuracy in zip(adversary.attacks_to_run, rest[::2], rest[1::2], strict=True):
            broken, attacked = map(
                int, re.fullmatch(rf"{attack} - 1/1 - (\d+) out of (\d+) successfully perturbed", count).groups()
            )
            assert attacked == left
            left -= broken
            pattern = rf"robust accuracy after {attack.upper()}: {left / len(x):.2%} \(total time \d+\.\d s\)"
            assert re.fullmatch(pattern, accuracy)
    if (log := adversary.logger.log_path) is not None:
        written = [line for line in lines if not line.startswith("setting parameters")]
        assert Path(log).read_text().splitlines() == written
    if "args" in names:
        assert torch.equal(torch.load("aa_custom_10_eps_0.08000.pth", weights_only=True)["adv_complete"], x_adv)
    if "state_path" in names:
        assert [line for line in lines if " state " in line] == [
            "Created state in aa_state.json",
            "Restored state from aa_state.json",
        ]
        assert lines.count(f"robust accuracy: {robust:.2%}") == 2


def test_individual_lines(capsys):
    adversary, _, x, y = run("custom", attacks_to_run=["apgd-ce", "fab"], verbose=True)
    adversary.apgd.n_iter = adversary.fab.n_iter = 10
    results = adversary.run_standard_evaluation_individual(x[:10], y[:10], return_labels=True)
    accuracies = [(labels == y[:10]).float().mean().item() for _, labels in results.values()]
    lines = timeless(capsys.readouterr().out.splitlines())
    assert lines == [
        "using custom version including apgd-ce, fab",
        f"robust accuracy by APGD-CE \t {accuracies[0]:.2%} \t (time attack: s)",
        f"robust accuracy by FAB \t \t {accuracies[1]:.2%} \t (time attack: s)",
    ]
