"""Curvature as a measurement: what its digest covers, what is stored, what is loaded again."""

import dataclasses
import importlib
import inspect
import json
import math
import pkgutil
from itertools import groupby

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import curvature
from atoll.attacks import PGD
from atoll.curvature import EmpiricalRisk
from atoll.curvature.gap import Gap
from atoll.curvature.measure import (
    CurvatureResult,
    CurvatureSettings,
    MeasureCurvature,
    loss_name,
    resolve_loss,
)
from atoll.curvature.pac_bayes import PACBayesBounds, PACBayesProof
from atoll.curvature.wci import Layer, LayerwiseBound
from atoll.data import to_float
from atoll.errors import AtollError, InputError, ResultError
from atoll.losses import AT, TRADES, Standard
from atoll.measure import Environment, load_result, measure
from atoll.modules import PassCounts, count_passes
from subject_cases import OtherPixels, digest_of, estimates, numbers, read_back, records, texts, tiny_subject

QUICK = {"points": 8, "steps": 1, "top": 0, "max_probes": 2}
MY_LOSS = """
from atoll.losses import CrossEntropy, Loss

class Mine(Loss):
    def __init__(self, weight=1.0):
        super().__init__(ce=(weight, CrossEntropy("clean")))
"""


@pytest.fixture
def my_loss(tmp_path):
    path = tmp_path / "my_loss.py"
    path.write_text(MY_LOSS)
    return f"{path}:Mine"


def quick(**options):
    return CurvatureSettings(**QUICK | options)


layers = st.builds(Layer, texts, numbers, estimates, numbers, numbers)
counts = st.integers(-(2**62), 2**62)
fields = {item.name: numbers for item in dataclasses.fields(PACBayesBounds)}
bounds = st.builds(
    PACBayesBounds, **fields | {"posterior": texts, "message": texts, "n": counts, "noisy": estimates,
                                "clipped": estimates}
)  # fmt: skip
proofs = st.builds(PACBayesProof, texts, numbers, counts, counts, *[numbers] * 5, texts)
all_settings = st.builds(
    CurvatureSettings,
    split=st.sampled_from(["train", "test"]),
    points=st.none() | st.integers(1, 10**9),
    loss=st.none() | texts.filter(len),
    relative_error=st.floats(1e-6, 1.0),
    landscape=st.sampled_from([None, "input", "weights"]),
    density=st.booleans(),
    eps=st.none() | texts.filter(len),
)
results = st.builds(
    CurvatureResult,
    subject=records,
    inputs=texts,
    points=st.integers(0, 2**62),
    settings=all_settings,
    environment=st.none() | st.builds(Environment, *[texts] * 5, counts, counts, texts),
    seconds=numbers,
    loss=texts,
    attacked=st.booleans(),
    mean_loss=numbers,
    wci=estimates,
    bound=numbers,
    weight_norm=numbers,
    root_trace=numbers,
    negative=counts,
    unresolved=st.lists(texts, max_size=2).map(tuple),
    layers=st.lists(layers, max_size=2).map(tuple),
    trace=st.none() | estimates,
    estimator=texts,
    reason=texts,
    probes=counts,
    eigenvalues=st.lists(numbers, max_size=3).map(tuple),
    pac_bayes=st.lists(bounds, max_size=2).map(tuple),
    proofs=st.lists(proofs, max_size=2).map(tuple),
    theorem=st.none() | st.builds(LayerwiseBound, numbers, st.dictionaries(texts, numbers), *[numbers] * 3),
    gap=st.none() | st.builds(Gap, estimates, estimates, estimates, estimates),
)


@settings(max_examples=30)
@given(results)
def test_results_survive_json(result):
    assert read_back(result) == result


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A measurement with everything in it."""
    subject = tiny_subject()
    options = {"top": 1, "density": True, "gap": True, "landscape": "weights"}
    return measure(subject, quick(**options), tmp_path_factory.mktemp("results"))


def test_a_stored_result_loads_with_its_files(stored):
    again = load_result(stored.folder)
    assert again == stored
    assert again.density().weights.shape == stored.density().weights.shape
    center = again.landscape().loss[10, 10]
    assert float(center) == pytest.approx(stored.mean_loss, rel=1e-5)
    assert (stored.loss, stored.attacked, stored.points) == ("AT()", True, 8)
    assert len(stored.eigenvalues) == 1
    assert [bound.posterior for bound in stored.pac_bayes] == ["spherical", "diagonal"]
    assert stored.gap.error.value == pytest.approx(stored.gap.test_error.value - stored.gap.train_error.value)
    for name in ("layers.png", "density.png", "landscape-weights.png"):
        assert (stored.folder / name).read_bytes()[:4] == b"\x89PNG"


STORED = [item for item in dataclasses.fields(CurvatureResult) if item.metadata.get("stored", True)]


@pytest.mark.parametrize("item", STORED, ids=lambda item: item.name)
def test_a_result_without_a_field_loads_if_the_field_has_a_default(stored, item):
    tree = json.loads(json.dumps(stored.to_json()))
    del tree[item.name]
    required = item.default is item.default_factory is dataclasses.MISSING
    if required:
        with pytest.raises(ResultError, match=f"{item.name}: missing"):
            CurvatureResult.from_json(tree)
    else:
        assert CurvatureResult.from_json(tree).wci == stored.wci


def test_unknown_fields_are_ignored(stored):
    tree = json.loads(json.dumps(stored.to_json() | {"new": 1}))
    assert CurvatureResult.from_json(tree) == stored


CHANGES = [
    {"split": "test"}, {"points": 7}, {"seed": 1}, {"loss": "Standard"}, {"loss": "TRADES"}, {"steps": 2},
    {"estimator": "exact"}, {"relative_error": 0.1}, {"max_probes": 3}, {"top": 1}, {"density": True}, {"gap": True},
    {"proof": 2},    {"landscape": "input"}, {"landscape": "weights"}, {"norm": "l2"}, {"eps": "0.2"},
]  # fmt: skip


def test_every_setting_counts():
    subject = tiny_subject()
    digests = [digest_of(subject, quick(**change)) for change in [{}, *CHANGES]]
    assert len(set(digests)) == len(digests)
    assert {name for change in CHANGES for name in change} == {f.name for f in dataclasses.fields(CurvatureSettings)}


def test_equal_questions_have_one_digest():
    subject = tiny_subject(TRADES(lambda_t=3))
    same = [{}, {"loss": "TRADES(lambda_t=3)"}, {"norm": "linf"}, {"eps": "0.1", "norm": "linf"}]
    assert len({digest_of(subject, quick(**change)) for change in same}) == 1
    # The default of TRADES is another loss than that of the subject.
    losses = ["TRADES", "TRADES()", "trades", "TRADES(lambda_t=6.0)", "atoll.losses.TRADES"]
    (default,) = {digest_of(subject, quick(loss=name)) for name in losses}
    assert default != digest_of(subject, quick())


def test_weights_and_points_count():
    subject = tiny_subject()
    before = digest_of(subject, quick())
    assert before == digest_of(tiny_subject(), quick())
    train, test = (tiny_subject(data=OtherPixels(split, validation=1 / 6)) for split in ("train", "test"))
    assert digest_of(train, quick()) != before
    assert digest_of(test, quick()) == before  # measured at training points
    assert digest_of(test, quick(gap=True)) != digest_of(subject, quick(gap=True))
    subject.model.head.bias.data[0] += 1e-3
    del subject.digest
    assert digest_of(subject, quick()) != before


def test_defaults():
    """Results that were measured without an option are stored under them, so another default is another question."""
    expected = {
        "split": "train", "points": 512, "seed": 0, "loss": None, "norm": None, "eps": None, "steps": 10,
        "estimator": "auto", "relative_error": 0.05, "max_probes": 1000, "top": 3, "density": False, "gap": False,
        "proof": 0, "landscape": None,
    }  # fmt: skip
    assert dataclasses.asdict(CurvatureSettings()) == expected
    shared = ("estimator", "relative_error", "max_probes", "seed")
    functions = [getattr(curvature, name) for name in curvature.__all__]
    for function in filter(inspect.isfunction, functions):
        parameters = inspect.signature(function).parameters
        own = {name: parameters[name].default for name in shared if name in parameters}
        assert own == {name: expected[name] for name in own}, function.__name__


def test_results_do_not_change():
    modules = [importlib.import_module(f"atoll.curvature.{m.name}") for m in pkgutil.iter_modules(curvature.__path__)]
    classes = [cls for module in modules for cls in vars(module).values() if dataclasses.is_dataclass(cls)]
    assert CurvatureResult in classes
    for cls in {cls for cls in classes if cls.__module__.startswith("atoll.curvature")}:
        instance, name = object.__new__(cls), dataclasses.fields(cls)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(instance, name, None)


def test_an_input_landscape_reaches_twice_the_radius_and_progress_has_stages(tmp_path):
    subject, events = tiny_subject(), []
    options = quick(points=12, top=1, estimator="hutchinson", landscape="input")
    result = measure(subject, options, tmp_path, on_progress=lambda *event: events.append(event))
    landscape = result.landscape()
    assert landscape.a.tolist() == pytest.approx([0.02 * k for k in range(-10, 11)])  # eps is 0.1
    split = MeasureCurvature().inputs(subject, options.resolve(subject))
    x, y = to_float(split.fetch(torch.arange(8))), split.labels[:8]
    with torch.no_grad():
        assert float(landscape.loss[10, 10]) == pytest.approx(float(F.cross_entropy(subject.model(x), y)), rel=1e-5)
    # Hutchinson gives no diagonal, so there is only one posterior.
    assert [bound.posterior for bound in result.pac_bayes] == ["spherical"]
    stages = {name: list(group) for name, group in groupby(events, key=lambda event: event[0])}
    assert list(stages) == ["attack", "traces", "eigenvalues", "bounds", "landscape"]
    assert all(steps[0] == (name, 0, 1) for name, steps in stages.items())
    assert stages["landscape"][-1] == ("landscape", 21, 21)


def test_adversarial_inputs_maximize_what_the_loss_asks_for():
    subject = tiny_subject(TRADES())
    options = quick(steps=2).resolve(subject)
    split = MeasureCurvature().inputs(subject, options)
    x, y = to_float(split.fetch(torch.arange(len(split)))), split.labels
    values = [
        EmpiricalRisk.attacked(
            subject.model, TRADES(), x, y, PGD(subject.threat, objective, steps=2), seed=options.seed
        ).value()
        for objective in ("kl", "ce")
    ]
    assert measure(subject, options).mean_loss == pytest.approx(values[0], rel=1e-6)
    assert abs(values[0] - values[1]) > 1e-3 * values[0]


def test_a_second_call_loads_without_model_passes(tmp_path):
    subject = tiny_subject()
    _ = subject.digest
    seconds = []
    for restart in (False, False, True):
        counts = PassCounts()
        with count_passes(subject.model, counts):
            result = measure(subject, quick(), tmp_path, restart=restart)
        seconds.append((counts.forward > 0, result.wci))
    assert [counted for counted, _ in seconds] == [True, False, True]
    assert len({index for _, index in seconds}) == 1
    assert len(list(tmp_path.glob("curvature/*/result.json"))) == 1


def test_each_result_has_its_own_landscape(stored):
    subject, folder, attacked = tiny_subject(), stored.folder.parents[1], stored
    clean = measure(subject, quick(loss="Standard"), folder)
    both = measure(subject, quick(loss="Standard", landscape="weights"), folder)
    assert len({result.folder for result in (attacked, clean, both)}) == 3
    assert clean.landscape() is None
    for result in (attacked, both):
        assert float(result.landscape().loss[10, 10]) == pytest.approx(result.mean_loss, rel=1e-5)
    assert attacked.mean_loss > both.mean_loss
    assert (attacked.loss, both.loss) == ("AT()", "Standard()")
    assert (attacked.attacked, both.attacked) == (True, False)


def test_a_loss_from_a_file(my_loss, tmp_path):
    subject = tiny_subject()
    mine = measure(subject, quick(loss=f"{my_loss}(weight=2.0)"), tmp_path)
    plain = measure(subject, quick(loss="Standard"), tmp_path)
    assert mine.loss == f"{my_loss}(weight=2.0)"
    assert mine.mean_loss == pytest.approx(2 * plain.mean_loss)
    assert mine.wci.value == pytest.approx(math.sqrt(2) * plain.wci.value, rel=1e-6)
    # The same, as the loss of a recipe; its name resolves again.
    trained = tiny_subject(resolve_loss(subject, f"{my_loss}(weight=2.0)"))
    assert digest_of(trained, quick()) == digest_of(subject, quick(loss=mine.loss))
    before = digest_of(trained, quick())
    path = tmp_path / "my_loss.py"
    path.write_text(MY_LOSS + "\n# changed\n")
    assert digest_of(trained, quick()) != before


@pytest.mark.parametrize("loss", [AT(), Standard(), TRADES(lambda_t=2.5)], ids=repr)
def test_names_of_losses_resolve_again(loss):
    again = resolve_loss(tiny_subject(), loss_name(loss))
    assert repr(again) == repr(loss) == loss_name(loss)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"points": 0}, "points: expected at least 1, got 0"),
        ({"max_probes": 1}, "max_probes: expected at least 2, got 1"),
        ({"relative_error": 0.0}, "relative_error: expected a number > 0, got 0.0"),
        ({"relative_error": math.nan}, "relative_error: expected a finite number, got nan"),
        ({"loss": "Magic"}, "expected a loss, got 'Magic'; expected one of ALP, AT"),
        ({"loss": "TRDAES"}, "did you mean TRADES"),
        ({"loss": "TRADES(6)"}, "loss: expected a name or a call such as TRADES"),
        ({"loss": "TRADES(lambda_t=open('x'))"}, "loss: expected a name or a call such as TRADES"),
        ({"loss": "TRADES(weight=1)"}, "loss.weight: TRADES has no such argument"),
        ({"loss": "TRADES(lambda_t=-1)"}, "lambda_t: expected at least 0"),
        ({"loss": "GloRoCE"}, "requires Lipschitz constants"),
        ({"eps": "much"}, "expected"),
    ],
)
def test_nonsense_is_one_sentence(options, sentence):
    with pytest.raises(AtollError, match=sentence):
        measure(tiny_subject(), quick(**options))


def test_a_proof_that_does_not_exist_is_refused_before_any_work(monkeypatch):
    def work(*arguments, **options):
        raise AssertionError("nothing to compute")

    for name in ("EmpiricalRisk", "wci", "_tensors"):
        monkeypatch.setattr(f"atoll.curvature.measure.{name}", work)
    with pytest.raises(InputError, match="a PAC-Bayes proof requires a loss without an attack, got AT"):
        measure(tiny_subject(), quick(proof=2))


def test_a_subject_without_a_loss_needs_the_name_of_one():
    subject = dataclasses.replace(tiny_subject(), loss=None)
    with pytest.raises(AtollError, match="the training loss of the model is not known"):
        measure(subject, quick())
    assert measure(subject, quick(loss="Standard")).wci.value > 0
    assert torch.is_grad_enabled()
