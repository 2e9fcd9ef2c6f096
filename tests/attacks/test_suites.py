"""Names of attacks: everything that is listed works on the command line, in recipes and in Python."""

import importlib
import inspect
import json
import pkgutil

import pytest
import torch

import atoll.attacks
from atoll.attacks.base import ATTACKS, Attack
from atoll.attacks.suites import SUITES, get_attack, minimal, parse_attacks, suite
from atoll.cli import main
from atoll.config import parameters
from atoll.errors import InputError, RecipeError
from atoll.runs.recipe import build_recipe
from atoll.runs.train import build_trainer
from atoll.threat import ThreatModel
from support import first_batch

NORMS = ("linf", "l2", "l1")
NAMES = list(ATTACKS.members())
# Attacks for one norm.
ONLY = {"CarliniWagner": "l2", "Carlini-Wagner": "l2", "PDPGD": "l1", "RayS": "linf", "SigmaZero": "l0"}
SHORT = {"steps": 2, "queries": 3, "binary_search_steps": 1}
TINY = ("data.limit=16", "model.widths=[2,2]", "trainer.batch_size=16", "trainer.epochs=1")


def recipe(name, loss="AT", norm="linf", *overrides):
    """A tiny recipe with a short version of an attack."""
    options = {key: value for key, value in SHORT.items() if key in parameters(ATTACKS.resolve(name).cls)}
    attack = json.dumps({"class_path": name, "init_args": options})
    return build_recipe(
        "digits-at", *TINY, f"loss={loss}", f"threat.norm={norm}", "threat.eps=0.1", f"attack={attack}", *overrides
    )


def test_the_names_of_the_field_are_listed(capsys):
    expected = {
        "PGD", "FGSM", "APGD", "APGD-CE", "APGD-DLR", "APGD-T", "FAB", "FAB-T", "Square", "CarliniWagner",
        "Carlini-Wagner", "RayS", "PGD-20", "CW-20", "FMN", "PDPGD", "SigmaZero", "RAT-PGD-20", "RAT-CW-20",
    }  # fmt: skip
    assert main(["ls", "attacks", "--json"]) == 0
    assert expected <= set(json.loads(capsys.readouterr().out)["attacks"]) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_listed_name_is_an_attack_whatever_the_case(name):
    for norm in NORMS:
        threat = ThreatModel(norm, 0.1)
        if ONLY.get(name, norm) == norm:
            for spelling in (name, name.lower(), name.upper()):
                assert get_attack(spelling, threat).threat == threat
                assert list(parse_attacks(f"{spelling}, pgd-3", threat)) == [spelling, "pgd-3"]
        else:
            with pytest.raises(InputError, match=rf"^\w+: expected {ONLY[name]}, got {norm}$"):
                parse_attacks(name, threat)


@pytest.mark.parametrize("loss", ["AT", "TRADES"])  # the objectives ce and kl
@pytest.mark.parametrize("name", NAMES)
def test_a_listed_name_trains_or_is_refused_by_the_dry_run(name, loss):
    """A recipe that is built can be trained: what does not fit is an error of the recipe."""
    if loss == "TRADES" and name in ("APGD", "FGSM"):
        sentence = {
            "APGD": "expected ce, dlr, margin or pm, got 'kl'",
            "FGSM": "kl has zero gradient at the clean point",
        }[name]
        with pytest.raises(RecipeError, match=rf"attack: objective: {sentence}.*\(what TRADES maximizes\)"):
            recipe(name, loss)
        return
    for norm in NORMS if loss == "AT" or ONLY.get(name) == "l0" else [ONLY.get(name, "linf")]:
        if ONLY.get(name, norm) != norm:
            with pytest.raises(RecipeError, match=rf"1 error\(s\):\s+attack: \w+: expected {ONLY[name]}, got {norm}"):
                recipe(name, loss, norm)
            continue
        built = recipe(name, loss, norm)
        trainer = build_trainer(built)
        step = trainer.train_step(first_batch(trainer))
        assert step.x_adv.shape == step.x.shape
        assert (trainer.threat.distance(step.x_adv, step.x) <= 0.1 * (1 + 1e-5)).all()
        assert all(value.isfinite().all() for value in trainer.model.state_dict().values())


def test_the_dry_run_of_the_command_refuses_in_one_sentence(capsys):
    assert main(["train", "digits-at", "attack=CarliniWagner", "--dry-run"]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "attack: CarliniWagner: expected l2, got linf" in error
    assert "Traceback" not in error
    for words in (["digits-at", "attack=SigmaZero"], ["digits-at"], ["digits-standard"]):
        assert main(["train", *words, "threat.norm=l0", "threat.eps=3", "--dry-run"]) == 1
        error = " ".join(capsys.readouterr().err.split())
        assert error.endswith("1 error(s): threat.norm: expected linf, l2 or l1 for training, got l0")
    assert main(["train", "digits-at", "attack.stpes=3", "--dry-run"]) == 1
    assert "did you mean steps" in capsys.readouterr().err
    assert main(["train", "digits-standard", "attack=CarliniWagner", "--dry-run"]) == 0  # no attack in training


def test_attacks_on_class_indices_refuse_probabilities():
    model, x = torch.nn.Linear(4, 3), torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="expected class indices for FAB, got probabilities"):
        get_attack("FAB", ThreatModel())(model, x, torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("magic", "attacks: expected an attack, got 'magic'; expected one of APGD"),
        ("PGD-0", "got 'PGD-0'; did you mean .*PGD"),
        ("APDG-T", "did you mean APGD-T"),
        ("FGSM,squre", "got 'squre'; did you mean Square"),
        ("", "expected an attack, got ''"),
        ("nowhere.py:Mine", "nowhere.py"),
    ],
)
def test_a_wrong_name_gets_the_closest_ones(text, sentence):
    with pytest.raises(InputError, match=sentence):
        parse_attacks(text, ThreatModel())


def test_numbered_names_are_the_attacks_of_the_tables():
    pgd = get_attack("pgd-20", ThreatModel("l2", "128/255"))
    assert (pgd.steps, pgd.step_size) == (20, pytest.approx(15 / 255))
    assert get_attack("CW-20", ThreatModel("linf", "8/255")).step_size == pytest.approx(2 / 255)
    assert get_attack("CW-7", ThreatModel()).objective == "margin"


@pytest.mark.parametrize("version", SUITES)
@pytest.mark.parametrize("norm", NORMS)
def test_all_versions_are_there_for_all_norms(version, norm):
    threat = ThreatModel(norm, 0.3)
    if (version, norm) == ("plus", "l1"):
        with pytest.raises(InputError, match="expected linf or l2 for plus, got l1"):
            suite(version, threat)
        return
    assert all(member.threat == threat for member in suite(version, threat).values())


# The attacks of each version, without their threat model.
VERSIONS = {
    "standard": {
        "APGD-CE": "APGD()", "APGD-T": "APGD(targets=9)", "FAB-T": "FAB(targets=9)", "Square": "Square()",
    },
    "plus": {
        "APGD-CE": "APGD(restarts=5)", "APGD-DLR": "APGD(objective='dlr', restarts=5)", "FAB": "FAB(restarts=5)",
        "Square": "Square()", "APGD-T": "APGD(targets=9)", "FAB-T": "FAB(targets=9)",
    },
    "rand": {"APGD-CE": "APGD(eot=20)", "APGD-DLR": "APGD(objective='dlr', eot=20)"},
    "fast": {
        "quick APGD-CE": "APGD(steps=15)", "quick APGD-margin": "APGD(objective='margin', steps=15)",
        "quick APGD-PM": "APGD(objective='pm', steps=15)",
        "quick APGD-T": "APGD(steps=30, targets=9, patience=0.25)",
    },
}  # fmt: skip
VERSIONS_L1 = {
    "standard": {**VERSIONS["standard"], "APGD-CE": "APGD(restarts=5)", "APGD-T": "APGD(targets=5)"},
    "rand": VERSIONS["rand"],
    "fast": {"quick APGD-CE": "APGD(steps=40)", "quick APGD-T": "APGD(steps=40, targets=2)"},
}
MINIMAL = {
    "linf": {"FMN": "FMN()", "FAB-T": "FAB(targets=9)"},
    "l2": {"FMN": "FMN()", "FAB-T": "FAB(targets=9)"},
    "l1": {"FMN": "FMN()", "PDPGD": "PDPGD()", "FAB-T": "FAB(targets=9)"},
    "l0": {"SigmaZero": "SigmaZero()"},
}


def shown(attacks, *left_out):
    texts = {name: repr(attack) for name, attack in attacks.items()}
    for part in left_out:
        assert all(part in text for text in texts.values())
        texts = {name: text.replace(part, "").replace("(, ", "(") for name, text in texts.items()}
    return {name: text.replace(", )", ")") for name, text in texts.items()}


def test_what_the_versions_are():
    for norm in NORMS:
        threat = ThreatModel(norm, 0.3)
        for version, attacks in (VERSIONS_L1 if norm == "l1" else VERSIONS).items():
            assert shown(suite(version, threat), f"threat={threat!r}") == attacks
            assert list(suite(version, threat)) == list(attacks)


def test_what_measures_the_smallest_perturbations():
    """No attack stops as soon as it is inside the ball."""
    for norm, attacks in MINIMAL.items():
        threat = ThreatModel(norm, 1)
        assert shown(minimal(threat), f"threat={threat!r}", "minimum_norm=True") == attacks


def test_every_class_of_the_package_registers_itself():
    """A new attack is one file: no table names it elsewhere."""
    classes = {member.cls for member in ATTACKS.members().values()}
    bases = {"Attack", "IterativeAttack", "MinimumNormAttack", "OneShot", "Transfer"}
    attacks = set()
    for info in pkgutil.iter_modules(atoll.attacks.__path__, "atoll.attacks."):
        members = vars(importlib.import_module(info.name)).values()
        attacks |= {cls for cls in members if inspect.isclass(cls) and issubclass(cls, Attack)}
    names = {cls.__name__ for cls in attacks if not cls.__name__.startswith("_")}
    assert names - bases == {cls.__name__ for cls in classes}
