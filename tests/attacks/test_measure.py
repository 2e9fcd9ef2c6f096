"""Attack settings and results: their files, their digests, and one path for training, command and Python."""

import dataclasses
import functools
import json
import re
import shutil
import time

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from atoll.attacks import APGD
from atoll.attacks import measure as attack_measure
from atoll.attacks.corruptions import CorruptionAccuracy, Corruptions
from atoll.attacks.curve import Curve, MinimalSummary
from atoll.attacks.diagnostics import EvaluationWarning
from atoll.attacks.evaluate import AttackSummary, Evaluation
from atoll.attacks.examples import Example
from atoll.attacks.measure import AttackResult, AttackSettings, MeasureAttack
from atoll.attacks.power import Power
from atoll.attacks.sampling import Sampling
from atoll.attacks.suites import SUITES
from atoll.cli import main
from atoll.config import from_plain
from atoll.data import MemorySplit, Splits, TwoMoons
from atoll.errors import InputError, RecipeError, ResultError
from atoll.measure import MEASUREMENTS, load_result, measure
from atoll.runs.run import open_run
from atoll.runs.train import train
from atoll.subject import Subject
from atoll.threat import ThreatModel
from attack_cases import template_model
from support import SMALL, TinyData

MINE = '''
import torch
from atoll.attacks import Attack

class Mine(Attack):
    """Moves every pixel by a share of eps."""

    def __init__(self, threat, share: float = 1.0):
        super().__init__(threat)
        self.share = share

    def search(self, model, x, y, streams):
        return self.threat.project(x + self.share * self.threat.radius * streams.rademacher(*x.shape[1:]), x)
'''


@functools.cache
def shared_subject():
    return subject(template_model())  # its graph is captured once


def subject(model=None, data=None):
    if model is None and data is None:
        return shared_subject()
    return Subject(model or template_model(), data or TinyData(validation=1 / 6), ThreatModel("linf", "0.18"))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A result and the folder of results that it is in."""
    results = tmp_path_factory.mktemp("results")
    return measure(subject(), AttackSettings(attacks="PGD-3,APGD-CE", points=24), results), results


def without_times(tree):
    """Plain data without dates, seconds and the checksum of both."""
    if isinstance(tree, dict):
        return {k: without_times(v) for k, v in tree.items() if k not in ("date", "seconds", "checksum")}
    return [without_times(part) for part in tree] if isinstance(tree, list) else tree


def read(result):
    return json.loads((result.folder / "result.json").read_text())


# --- files ------------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    split=st.sampled_from(["train", "validation", "test"]),
    points=st.none() | st.integers(1, 10**6),
    seed=st.integers(0, 2**31),
    attacks=st.sampled_from(["standard", "none", "PGD-20", "FGSM,CW-7", "my_attack.py:Mine"]),
    individual=st.booleans(),
    surrogate=st.none() | st.text(min_size=1),
    adbd=st.booleans(),
    power=st.none() | st.just(0),
    corruptions=st.booleans(),
    norm=st.sampled_from([None, "linf", "l2", "l1", "l0"]),
    eps=st.none() | st.sampled_from(["8/255", "0.1"]),
    batch_size=st.none() | st.integers(1, 512),
)
def test_settings_survive_json_but_for_how_to_compute(**fields):
    original = AttackSettings(**fields)
    again = from_plain(AttackSettings, json.loads(json.dumps(original.to_json())))
    assert again == dataclasses.replace(original, batch_size=None)


def test_results_survive_json(stored):
    result, _ = stored
    assert result.clean.correct > result.robust.correct > 0  # else this shows nothing
    again = AttackResult.from_json(json.loads(json.dumps(result.to_json())))
    assert again == result
    assert load_result(result.folder) == result
    with_extras = dataclasses.replace(
        result, adbd=attack_measure.Estimate(0.125, 0.25), surrogate=result.subject, batch_size=7
    )
    assert AttackResult.from_json(json.loads(json.dumps(with_extras.to_json()))) == with_extras


def test_files_of_older_and_newer_versions(stored):
    tree = stored[0].to_json()
    for name in ("warnings", "batch_size", "adbd", "curve", "corruptions", "surrogate", "environment", "seconds"):
        del tree[name]
    for name in ("individual", "adbd", "curve", "corruptions", "surrogate", "seed"):
        del tree["settings"][name]
    older = AttackResult.from_json(tree | {"a field of the future": 1})
    assert older.robust == stored[0].robust
    assert (older.warnings, older.adbd, older.batch_size, older.settings.seed) == ((), None, 0, 0)
    with pytest.raises(ResultError, match="newer version"):
        AttackResult.from_json(tree | {"version": 99})
    with pytest.raises(ResultError, match="clean"):
        AttackResult.from_json({name: value for name, value in tree.items() if name != "clean"})


@pytest.mark.parametrize(
    "kind",
    [
        AttackResult, AttackSettings, AttackSummary, CorruptionAccuracy, Corruptions, Curve, Evaluation,
        EvaluationWarning, Example, MinimalSummary, Power, Sampling,
    ],
)  # fmt: skip
def test_results_cannot_be_changed(kind):
    assert kind.__dataclass_params__.frozen


def test_the_measurement_has_one_name():
    names = [name for name, member in MEASUREMENTS.members().items() if member.cls is MeasureAttack]
    assert names == ["attack"]


@pytest.mark.parametrize("damage", ["digit", "truncated", "empty"])
def test_a_damaged_result_is_measured_again(tmp_path, damage):
    asked = AttackSettings(attacks="PGD-2", points=12)
    first = measure(subject(), asked, tmp_path)
    file = first.folder / "result.json"
    text = file.read_text()
    flipped = re.sub(r'"correct": (\d)', lambda match: f'"correct": {(int(match[1]) + 1) % 10}', text, count=1)
    assert flipped != text
    file.write_text({"digit": flipped, "truncated": text[: len(text) // 2], "empty": ""}[damage])
    with pytest.raises(ResultError):
        load_result(first.folder)
    again = measure(subject(), asked, tmp_path)
    assert again.folder == first.folder
    assert without_times(json.loads(file.read_text())) == without_times(json.loads(text))


# --- digests ----------------------------------------------------------------------------------------------------------


class Shifted(TinyData):
    """One pixel of one test point differs."""

    def load(self):
        whole = super().load()
        images = whole.test.images.clone()
        images[3, 0, 0, 0] += 1
        return Splits(whole.train, MemorySplit(images, whole.test.labels))


def changed_weights():
    model = template_model()
    model[1].bias.data[0] += 1e-4
    return model


ASKED = AttackSettings(attacks="FGSM", points=12)
OTHERS = {
    "weights": (lambda: subject(changed_weights()), ASKED),
    "inputs": (lambda: subject(data=Shifted(validation=1 / 6)), ASKED),
    **{
        f"{name}={value}": (subject, dataclasses.replace(ASKED, **{name: value}))
        for name, value in {
            "split": "train", "points": 11, "seed": 1, "attacks": "PGD-2", "individual": True, "norm": "l2",
            "eps": "0.05", "adbd": True, "corruptions": True,
        }.items()
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    results = tmp_path_factory.mktemp("asked")
    return measure(subject(), ASKED, results), results


@pytest.mark.parametrize("change", OTHERS)
def test_another_question_is_another_result(asked, change, monkeypatch):
    monkeypatch.setattr(attack_measure, "evaluate_corruptions", lambda *args, **options: None)
    monkeypatch.setattr(attack_measure, "boundary_distance", lambda model, x, y, bounds: torch.ones(len(x)))
    first, results = asked
    make, other = OTHERS[change]
    assert measure(make(), other, results).folder != first.folder


@pytest.mark.parametrize("same", [{"batch_size": 5}, {"norm": "linf"}, {"eps": "0.18"}])
def test_the_same_question_is_loaded(asked, same, monkeypatch):
    """Also if it spells out what the subject decides, or asks for another batch size."""
    first, results = asked
    monkeypatch.setattr(attack_measure, "evaluate", None)  # must not be called
    assert measure(subject(), dataclasses.replace(ASKED, **same), results) == first


# --- resuming ---------------------------------------------------------------------------------------------------------


class Killed(Exception):
    pass


@pytest.mark.parametrize("batch_size", [8, 5])
def test_an_interrupted_measurement_resumes_bit_identically(trained, tmp_path, monkeypatch, batch_size):
    """Through ``Run.measure``; the batch size is that of the first attempt."""
    for name in ("whole", "killed"):
        shutil.copytree(trained, tmp_path / name / "run", ignore=shutil.ignore_patterns("results"))
    asked = AttackSettings(attacks="PGD-2,APGD-CE", points=40, eps="0.05", batch_size=8)
    whole = open_run(tmp_path / "whole" / "run").measure(asked)

    evaluate, step, fuse = attack_measure.evaluate, APGD.step, [60]
    monkeypatch.setattr(attack_measure, "evaluate", lambda *a, **k: evaluate(*a, **k, save_every=0.0))

    def fused(self, model, rows):
        fuse[0] -= 1
        if fuse[0] == 0:
            raise Killed
        step(self, model, rows)

    monkeypatch.setattr(APGD, "step", fused)
    run = open_run(tmp_path / "killed" / "run")
    with pytest.raises(Killed):
        run.measure(asked)
    assert run.results() == []
    fuse[0] = -1
    again = run.measure(dataclasses.replace(asked, batch_size=batch_size))
    assert fuse[0] < -1  # something was left to do
    files = [load_file(result.folder / "adversarial.safetensors") for result in (whole, again)]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    assert without_times(read(whole)) == without_times(read(again))


# --- one path ---------------------------------------------------------------------------------------------------------


def test_training_command_and_python_share_the_stored_result(trained, capsys):
    """The test at the end of training is ``atoll attack --attacks PGD-n`` and ``Run.attack("PGD-n")``."""
    run = open_run(trained)
    name = run.test_settings.attacks
    assert name == "PGD-2"  # test_steps of this run; 20 by default
    row = next(row for row in run.tests() if row.checkpoint == "best")
    file = row.attacked.folder / "result.json"
    before = file.read_bytes(), file.stat().st_mtime_ns, len(list((trained / "results").rglob("result.json")))
    assert run.attack(name) == row.attacked
    assert main(["attack", str(trained), "--attacks", name, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["results"][str(trained)]
    assert printed["folder"] == str(row.attacked.folder)
    assert printed["robust"]["correct"] == row.robust.correct
    after = file.read_bytes(), file.stat().st_mtime_ns, len(list((trained / "results").rglob("result.json")))
    assert after == before


def test_the_default_test_is_pgd_20(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("results", "checkpoints"))
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    del recipe["trainer"]["test_steps"]
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert open_run(tmp_path / "run").test_settings == AttackSettings(attacks="PGD-20")


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--attacks", "FGSM,CW-2", "--points", "20"], {"attacks": "FGSM,CW-2", "points": 20}),
        (
            ["--attacks", "PGD-2", "--points", "9", "--split", "train", "--seed", "3", "--norm", "l2", "--eps", "1/4",
             "--checkpoint", "last", "--batch-size", "4"],
            {"attacks": "PGD-2", "points": 9, "split": "train", "seed": 3, "norm": "l2", "eps": "1/4",
             "checkpoint": "last", "batch_size": 4},
        ),
    ],
)  # fmt: skip
def test_command_and_python_write_the_same_file(trained, tmp_path, capsys, words, options):
    folders = [tmp_path / name / "run" for name in ("command", "python")]
    for folder in folders:
        shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("results"))
    assert main(["attack", str(folders[0]), *words]) == 0
    result = open_run(folders[1]).attack(**options)
    (path,) = (folders[0] / "results").rglob("result.json")
    assert path.relative_to(folders[0]) == (result.folder / "result.json").relative_to(folders[1])
    assert json.dumps(without_times(json.loads(path.read_text()))) == json.dumps(without_times(read(result)))
    files = [folder / result.folder.relative_to(folders[1]) / "adversarial.safetensors" for folder in folders]
    assert files[0].read_bytes() == files[1].read_bytes()


# --- an attack from a file --------------------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "my_attack.py"
    file.write_text(MINE)
    return file


def test_an_attack_of_my_own_in_recipe_command_and_python(trained, tmp_path, mine, capsys):
    shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("results"))
    name = f"{mine}:Mine"
    run = open_run(tmp_path / "run")
    result = run.attack(name, points=30)
    assert [attack.name for attack in result.attacks] == [name]
    assert main(["attack", str(tmp_path / "run"), "--attacks", f"FGSM,{name}", "--points", "30", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["results"][str(tmp_path / "run")]
    assert printed["attacks"][1]["accuracy"]["correct"] == result.attacks[0].accuracy.correct

    words = [*SMALL[1:], "trainer.epochs=1", "trainer.test_steps=0"]
    words = [word for word in words if not word.startswith("attack.")]
    attack = json.dumps({"class_path": name, "init_args": {"share": 0.5}})
    mine_trained = train("digits-at", *words, f"attack={attack}", out=tmp_path / "mine")
    assert mine_trained.recipe["attack"] == {"class_path": name, "init_args": {"share": 0.5}}
    with pytest.raises(RecipeError, match="--trust"):
        train(None, out=tmp_path / "mine", resume=True)
    assert train(None, out=tmp_path / "mine", resume=True, trust=True).is_finished
    assert open_run(tmp_path / "mine").attack("FGSM", points=5).points == 5  # the recipe's attack is not imported
    with pytest.raises(InputError, match=r"cannot import.*Mien"):
        run.attack(f"{mine}:Mien")


def test_an_edited_attack_is_measured_again(tmp_path, mine):
    asked = AttackSettings(attacks=f"{mine}:Mine", points=24)
    first = measure(subject(), asked, tmp_path)
    stamp = (first.folder / "result.json").stat().st_mtime_ns
    assert measure(subject(), asked, tmp_path) == first
    assert (first.folder / "result.json").stat().st_mtime_ns == stamp
    time.sleep(0.01)
    mine.write_text(MINE.replace("streams.rademacher(*x.shape[1:])", "(torch.arange(3)[y] - 1).view(-1, 1, 1, 1)"))
    edited = measure(subject(), asked, tmp_path)  # in the same process
    assert edited.folder != first.folder
    stored = [load_file(result.folder / "adversarial.safetensors")["broken_by"] for result in (first, edited)]
    assert stored[0].shape == stored[1].shape
    mine.write_text(MINE)
    assert measure(subject(), asked, tmp_path) == first


def test_an_attack_of_my_own_resumes(tmp_path, mine, monkeypatch):
    asked = AttackSettings(attacks=f"PGD-2,{mine}:Mine", points=24, batch_size=8)
    whole = measure(subject(), asked, tmp_path / "whole")

    def interrupt(what, done, total):
        if what.endswith(":Mine"):
            raise Killed

    with pytest.raises(Killed):
        measure(subject(), asked, tmp_path / "killed", on_progress=interrupt)
    again = measure(subject(), asked, tmp_path / "killed")
    assert without_times(read(again)) == without_times(read(whole))


def test_a_surrogate_counts(trained, tmp_path):
    """A result crafted on another model depends on that model's weights."""
    model = template_model()
    opened = {"a": lambda: subject(template_model(2.0)), "b": lambda: subject(changed_weights())}
    results = [
        measure(
            subject(model), AttackSettings(attacks="FGSM", points=12, surrogate="run"), tmp_path,
            open_subject=lambda path, make=make: make(),
        )
        for make in opened.values()
    ]  # fmt: skip
    assert results[0].folder != results[1].folder
    assert results[0].attacks[0].name == "FGSM (transfer)"
    assert results[0].surrogate != results[1].surrogate
    with pytest.raises(InputError, match="surrogate: expected a run"):
        measure(subject(model), AttackSettings(attacks="FGSM", surrogate="run"), tmp_path)


def test_a_surrogate_has_the_inputs_and_classes_of_the_model():
    images, points = subject(), Subject(torch.nn.Linear(2, 2), TwoMoons(), ThreatModel("linf", "0.1"))
    texts = {images: "1x8x8 in 3 classes", points: "2 in 2 classes"}
    for model, other in ((images, points), (points, images)):
        sentence = f"surrogate: expected inputs of {texts[model]}, got {texts[other]} from elsewhere"
        asked = AttackSettings(attacks="FGSM", points=2, surrogate="elsewhere")
        with pytest.raises(InputError, match=f"^{sentence}$"):
            measure(model, asked, open_subject=lambda path, other=other: other)


def test_all_attacks_of_fast_transfer(monkeypatch, short):
    monkeypatch.setitem(SUITES, "fast", lambda threat: {"quick": APGD(threat, steps=1)})
    model = template_model()
    asked = AttackSettings(attacks="fast", points=24, surrogate="run")
    result = measure(subject(model), asked, open_subject=lambda path: subject(template_model(2.0)))
    names = [attack.name for attack in result.attacks]
    assert names == [f"{name} (transfer)" for name in ("quick", "APGD-CE", "FAB-T", "Square")]
    assert result.estimate.remaining == result.attacks[0].accuracy.correct < 24


class Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = template_model()

    def forward(self, x):
        return self.model(x + 0.05 * torch.randn_like(x))


@pytest.mark.parametrize("noisy", [False, True])
def test_fast_checks_a_randomized_model_with_rand(monkeypatch, short, noisy):
    monkeypatch.setitem(SUITES, "fast", lambda threat: {"quick": APGD(threat, steps=1)})
    monkeypatch.setitem(SUITES, "rand", lambda threat: {"mean": APGD(threat, steps=2, eot=2)})
    asked = AttackSettings(attacks="fast", points=12, power=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        result = measure(subject(Noisy() if noisy else None), asked)
    others = ["mean"] if noisy else ["APGD-CE", "FAB-T", "Square"]
    assert [attack.name for attack in result.attacks] == ["quick", *others]


# --- power ------------------------------------------------------------------------------------------------------------


def test_suites_measure_their_power_at_points_that_they_did_not_break(short):
    result = measure(subject(), AttackSettings(attacks="fast", points=24, power=5))
    assert result.power.random.total + result.power.failed == min(5, result.robust.correct)
    assert result.power.share.correct == result.power.share.total > 0  # the model is linear
    assert "low power" not in [warning.kind for warning in result.warnings]
    assert f"power: {result.power}" in str(result)
    assert AttackResult.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_low_power_is_a_warning(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    settings = AttackSettings(attacks=f"{path}:Mine", points=24, power=20)  # random corners
    result = measure(subject(), settings)
    assert result.power.share.value < 0.5
    assert [warning.kind for warning in result.warnings] == ["low power"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"attacks": "standard"}, 50),
        ({"attacks": "fast"}, 50),
        ({"attacks": "fast", "power": 0}, 0),
        ({"attacks": "PGD-20"}, 0),
        ({"attacks": "PGD-20", "power": 7}, 7),
        ({"attacks": "standard", "surrogate": "other"}, 0),
    ],
)
def test_power_is_measured_for_suites_and_on_request(settings, expected):
    resolved = AttackSettings(**settings).resolve(subject())
    assert resolved.power_points == expected
    assert resolved == AttackSettings(**settings | {"power": expected}).resolve(subject())  # the same question


def test_transfer_attacks_have_no_power():
    with pytest.raises(InputError, match="power: cannot be measured for transfer attacks"):
        AttackSettings(attacks="PGD-3", surrogate="other", power=5)
    result = measure(subject(), AttackSettings(attacks="none", points=4, power=5))
    assert result.power is None  # no attack


# --- more numbers -----------------------------------------------------------------------------------------------------


def test_the_distance_to_the_boundary_is_the_mean_over_correctly_classified_points(monkeypatch):
    asked = AttackSettings(attacks="none", points=20, batch_size=16)
    assert measure(subject(), asked).adbd is None
    reports = []

    def brightness(model, x, y, bounds):
        assert bounds == (0.0, 1.0)
        assert (model(x).argmax(1) == y).all()
        return x.mean((1, 2, 3))

    monkeypatch.setattr(attack_measure, "boundary_distance", brightness)
    noisy = template_model()
    noisy[1].weight.data += 0.2 * torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    asked = dataclasses.replace(asked, adbd=True)
    result = measure(subject(noisy), asked, on_progress=lambda *call: reports.append(call))
    x, y = TinyData(validation=1 / 6).tensors("test", 20)
    distance = x[noisy(x).argmax(1) == y].mean((1, 2, 3)).double()
    assert 16 < len(distance) == result.clean.correct < 20
    assert result.adbd.value == pytest.approx(float(distance.mean()))
    assert result.adbd.standard_error == pytest.approx(float(distance.std()) / len(distance) ** 0.5)
    done = [(done, total) for name, done, total in reports if name == "RayS"]
    assert done == [(16, len(distance)), (len(distance), len(distance))]


def test_l0_without_eps_is_for_curves_alone():
    curve = AttackSettings(norm="l0", curve=True)
    assert curve.attacks == "standard"
    assert (curve.resolve(subject()).attacks, curve.resolve(subject()).eps) == ("none", "0")
    assert dataclasses.replace(curve, attacks="SigmaZero", eps="3").resolve(subject()).eps == "3"
    assert dataclasses.replace(curve, attacks="none", eps="3").resolve(subject()).eps == "3"
    with pytest.raises(InputError, match="norm: expected linf, l2 or l1 for standard, got l0; use SigmaZero"):
        AttackSettings(norm="l0", eps="3").resolve(subject())
    assert AttackSettings(attacks="none").resolve(subject()).eps == "0.18"


def test_suites_are_cascades_unless_every_attack_runs_alone():
    assert AttackSettings(attacks="standard").cascade
    assert AttackSettings(attacks="fast").cascade
    assert not AttackSettings(attacks="plus", individual=True).cascade
    assert not AttackSettings(attacks="PGD-20,FGSM").cascade


@pytest.mark.parametrize("attacks", ["standard", "fast", "PGD-20", "none"])
def test_only_attacks_have_a_radius(attacks):
    settings = AttackSettings(attacks=attacks, norm="linf", eps="8/255")
    assert settings.threat == ("linf" if attacks == "none" else "linf 8/255")


def test_options_of_fast_do_not_belong_to_other_questions():
    options = {"width": 2.0, "budget": 0.3, "escalate": True}
    fast, other = (AttackSettings(attacks=name, **options).resolve(subject()) for name in ("fast", "FGSM"))
    assert fast.sampling_options == options
    assert other == AttackSettings(attacks="FGSM").resolve(subject())
    assert other.sampling_options == {"width": None, "budget": 0.1, "escalate": False}
