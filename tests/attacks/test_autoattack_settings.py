"""Settings of attacks under the names of the original AutoAttack."""

import copy
import pickle

import pytest

from atoll.attacks import APGD, FAB, AutoAttack, Square
from atoll.attacks.autoattack_settings import DEFAULTS, OriginalSettings, SettingError
from atoll.errors import InputError
from atoll.threat import ThreatModel
from attack_cases import plane


def adversary(norm="Linf", **options):
    return AutoAttack(plane()[0], norm=norm, eps=0.1, version="custom", verbose=False, **options)


@pytest.mark.parametrize(
    ("name", "group", "settings", "expected"),
    [
        ("apgd-ce", "apgd", {}, {"restarts": 5}),
        (
            "apgd-ce",
            "apgd",
            {"n_iter": 7, "n_restarts": 2, "eot_iter": 3},
            {"steps": 7, "restarts": 2, "eot": 3},
        ),
        ("apgd-dlr", "apgd", {"n_iter": 7}, {"objective": "dlr", "steps": 7, "restarts": 5}),
        ("apgd-t", "apgd", {"n_iter": 7}, {"objective": "dlr", "targets": 9}),
        (
            "apgd-t",
            "apgd_targeted",
            {"n_iter": 7, "n_restarts": 2, "n_target_classes": 3, "eot_iter": 4},
            {"objective": "dlr", "steps": 7, "restarts": 2, "targets": 3, "eot": 4},
        ),
        ("fab", "fab", {"n_target_classes": 3}, {"restarts": 5}),
        ("fab", "fab", {"n_iter": 7, "n_restarts": 2}, {"steps": 7, "restarts": 2}),
        ("fab-t", "fab", {"n_iter": 7, "n_restarts": 2, "n_target_classes": 3}, {"steps": 7, "targets": 3}),
        ("square", "square", {}, {}),
        (
            "square",
            "square",
            {"n_queries": 7, "n_restarts": 2, "p_init": 0.3, "rescale_schedule": True},
            {"queries": 7, "restarts": 2, "p_init": 0.3, "horizon": None},
        ),
    ],
)
def test_every_setting_reaches_its_attack(name, group, settings, expected):
    own = adversary(attacks_to_run=[name])
    for setting, value in settings.items():
        setattr(getattr(own, group), setting, value)
        assert getattr(getattr(own, group), setting) == value
    (attack,) = own.attacks.values()
    kind = {"apgd": APGD, "fab": FAB, "square": Square}[name.partition("-")[0]]
    assert repr(attack) == repr(kind(ThreatModel("linf", 0.1), **expected))


def test_each_attack_has_its_own_eps():
    own = adversary(attacks_to_run=["apgd-ce", "fab"])
    own.apgd.eps = 0.05
    assert [attack.threat.radius for attack in own.attacks.values()] == [0.05, 0.1]


@pytest.mark.parametrize("group", DEFAULTS)
def test_unknown_settings_are_refused_with_a_suggestion(group):
    settings = OriginalSettings(group, ThreatModel())
    for name, sentence in (("n_restart", "did you mean n_restarts?"), ("xyz", "expected one of ")):
        assert not hasattr(settings, name)
        with pytest.raises(SettingError, match=rf"{group}\.{name}: no such setting; ") as error:
            setattr(settings, name, 1)
        assert sentence in str(error.value)
        assert not hasattr(settings, name)


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        ("apgd.n_iter", 2.5, "apgd.n_iter: expected an integer >= 1, got 2.5"),
        ("fab.n_restarts", 0, "fab.n_restarts: expected at least 1, got 0"),
        ("apgd.eot_iter", "2", "apgd.eot_iter: expected an integer >= 1, got '2'"),
        ("square.p_init", 0, r"square.p_init: expected a number in \(0, 1\], got 0"),
        ("fab.eps", "x", "fab.eps: expected a number or a fraction like 8/255, got 'x'"),
        ("apgd.thr_decr", 0.5, "apgd.thr_decr: expected 0.75, the only value that Atoll supports, got 0.5"),
        ("apgd.loss", "dlr", "apgd.loss: expected 'ce', the only value"),
        ("apgd.use_largereps", True, "apgd.use_largereps: expected False, the only value"),
        ("fab.alpha_max", 0.2, "fab.alpha_max: expected 0.1, the only value"),
        ("square.loss", "ce", "square.loss: expected 'margin', the only value"),
    ],
)
def test_values_that_cannot_be_used_are_refused(place, value, sentence):
    group, name = place.split(".")
    settings = OriginalSettings(group, ThreatModel())
    before = getattr(settings, name)
    with pytest.raises(InputError, match=sentence):
        setattr(settings, name, value)
    assert getattr(settings, name) == before
    setattr(settings, name, before)  # the present value is fine


# What the original sets itself, for linf.
ORIGINAL = {
    "apgd": {
        "n_iter": 100, "n_restarts": 5, "eot_iter": 1, "loss": "ce", "thr_decr": 0.75, "topk": None, "use_rs": True,
        "use_largereps": False, "eps": 0.1, "seed": None, "device": None, "verbose": None,
    },
    "apgd_targeted": {
        "n_iter": 100, "n_restarts": 1, "eot_iter": 1, "n_target_classes": 9, "loss": "dlr-targeted", "thr_decr": 0.75,
        "topk": None, "use_rs": True, "use_largereps": False, "eps": 0.1,
    },
    "fab": {
        "n_iter": 100, "n_restarts": 5, "n_target_classes": 9, "alpha_max": 0.1, "eta": 1.05, "beta": 0.9,
        "targeted": False, "eps": 0.1,
    },
    "square": {
        "n_queries": 5000, "n_restarts": 1, "p_init": 0.8, "rescale_schedule": False, "loss": "margin",
        "targeted": False, "return_all": False, "eps": 0.1,
    },
}  # fmt: skip


@pytest.mark.parametrize("group", ORIGINAL)
def test_values_of_the_original_are_there_and_can_be_set(group):
    settings = getattr(adversary(), group)
    for name, value in ORIGINAL[group].items():
        assert getattr(settings, name) == value
        setattr(settings, name, value)


def test_large_radii_come_first_for_l1_alone():
    for norm in ("Linf", "L2", "L1"):
        own = adversary(norm)
        own.apgd.use_largereps = own.apgd_targeted.use_largereps = norm == "L1"
        with pytest.raises(InputError, match="use_largereps: expected"):
            own.apgd.use_largereps = norm != "L1"


@pytest.mark.parametrize(("name", "value"), [("seed", 3), ("device", "cuda"), ("verbose", True)])
def test_settings_without_effect_warn(name, value):
    own = adversary(attacks_to_run=["apgd-ce"])
    before = repr(own.attacks)
    with pytest.warns(UserWarning, match=rf"^apgd\.{name} has no effect; set adversary\.{name} instead$"):
        setattr(own.apgd, name, value)
    assert getattr(own.apgd, name) == value
    assert repr(own.attacks) == before


def test_settings_can_be_copied_and_shown():
    settings = OriginalSettings("square", ThreatModel())
    settings.n_queries = 10
    assert repr(settings) == "square: n_queries=10, n_restarts=1, p_init=0.8, rescale_schedule=False"
    for again in (copy.deepcopy(settings), pickle.loads(pickle.dumps(settings))):
        assert repr(again) == repr(settings)
        again.n_queries = 20
        assert settings.n_queries == 10
