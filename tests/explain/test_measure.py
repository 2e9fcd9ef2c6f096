"""Explanations as a measurement: what the digest covers, what is stored, what is loaded again."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from atoll.errors import AtollError, ResultError
from atoll.explain import explanation
from atoll.explain.explanation import explain
from atoll.explain.measure import ExplainResult, ExplainSettings, MethodResult, read_images
from atoll.measure import load_result, measure
from atoll.modules import PassCounts, count_passes
from subject_cases import OtherPixels, digest_of, estimates, numbers, read_back, records, texts, tiny_subject
from support import TinyData

QUICK = {"points": 3, "methods": ("SM", "BSM"), "pool": 20, "budget": 40, "checks": 0}
MY_MAP = """
from atoll.explain.attributions import PointAttribution

class Twice(PointAttribution):
    def explain(self, x, start, target, batch_size):
        return 2 * x
"""


@pytest.fixture
def my_map(tmp_path):
    path = tmp_path / "my_map.py"
    path.write_text(MY_MAP)
    return f"{path}:Twice"


def quick(**options):
    return ExplainSettings(**QUICK | options)


optional = st.none() | estimates
methods = st.builds(
    MethodResult,
    undefined=st.integers(-(2**62), 2**62),
    infidelity=estimates,
    scaled_infidelity=estimates,
    scale=optional,
    completeness_gap=optional,
    sanity_passed=st.none() | st.booleans(),
    sanity_layers=st.lists(st.tuples(texts, estimates), max_size=2).map(tuple),
    sensitivity=optional,
    precision=optional,
    boxes=st.integers(-(2**62), 2**62),
)
all_settings = st.builds(
    ExplainSettings,
    points=st.none() | st.integers(1, 10**9),
    methods=st.lists(texts, min_size=1, max_size=3).map(tuple),
    norm=st.sampled_from(["linf", "l2", "l1"]),
    budget=st.none() | st.integers(1, 10**9),
    images=st.lists(texts, max_size=2).map(tuple),
)
results = st.builds(
    ExplainResult,
    subject=records,
    inputs=texts,
    points=st.integers(0, 2**62),
    settings=all_settings,
    predictions=st.lists(texts, max_size=2).map(tuple),
    titles=st.lists(texts, max_size=2).map(tuple),
    distance=estimates,
    success=numbers,
    distances=st.lists(st.none() | numbers, max_size=3).map(tuple),
    others=st.lists(texts, max_size=2).map(tuple),
    searches=st.dictionaries(texts, st.integers(-(2**62), 2**62), max_size=2),
    calls=numbers,
    methods=st.dictionaries(texts, methods, max_size=2),
    pairs=st.dictionaries(texts, estimates, max_size=2),
    notes=st.lists(texts, max_size=2).map(tuple),
)


@settings(max_examples=30)
@given(results)
def test_results_survive_json(result):
    assert read_back(result) == result


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    options = {"methods": ("SM", "IG", "BSM", "BIG"), "checks": 1}
    return measure(tiny_subject(), quick(**options), tmp_path_factory.mktemp("results"))


def test_a_stored_result_loads_with_its_tensors(stored):
    again, model = load_result(stored.folder), tiny_subject().model
    assert again == stored
    tensors = again.tensors()
    names = {"x", "x_inside", "x_outside", "distance", "prediction", "label"}
    assert tensors.keys() == names | {f"attributions/{name}" for name in stored.methods}
    assert stored.success == 1
    assert torch.equal(model(tensors["x_inside"]).argmax(1), tensors["prediction"])
    assert (model(tensors["x_outside"]).argmax(1) != tensors["prediction"]).all()
    classes = tiny_subject().data.classes
    assert stored.predictions == tuple(classes[label] for label in tensors["prediction"])
    assert stored.titles == tuple(classes[label] for label in tensors["label"])
    assert stored.distances == tuple(tensors["distance"].tolist())
    assert stored.distance.value == pytest.approx(float(tensors["distance"].double().mean()))
    apart = (tensors["attributions/SM"] - tensors["attributions/BSM"]).flatten(1).norm(dim=1).mean()
    assert stored.pairs["SM-BSM"].value == pytest.approx(float(apart), rel=1e-5)
    assert sum(stored.searches.values()) == 3
    assert 0 < stored.calls <= 40
    assert (stored.folder / "attributions.png").read_bytes()[:4] == b"\x89PNG"
    for method in stored.methods.values():
        assert method.sensitivity is not None
        assert method.sanity_layers[0][0] == "head"


STORED = [item for item in dataclasses.fields(ExplainResult) if item.metadata.get("stored", True)]


@pytest.mark.parametrize("item", STORED, ids=lambda item: item.name)
def test_a_result_without_a_field_loads_if_the_field_has_a_default(stored, item):
    tree = json.loads(json.dumps(stored.to_json()))
    del tree[item.name]
    if item.default is item.default_factory is dataclasses.MISSING:
        with pytest.raises(ResultError, match=f"{item.name}: missing"):
            ExplainResult.from_json(tree)
    else:
        assert ExplainResult.from_json(tree).methods == stored.methods


def test_a_method_without_optional_numbers_loads(stored):
    tree = json.loads(json.dumps(stored.to_json()))
    for name, method in tree["methods"].items():
        tree["methods"][name] = {key: method[key] for key in ("undefined", "infidelity", "scaled_infidelity")}
    assert ExplainResult.from_json(tree).methods["SM"].sensitivity is None


def test_tensors_that_are_gone_or_damaged_are_one_sentence(stored, tmp_path):
    for folder in (None, tmp_path):
        with pytest.raises(ResultError, match=r"not stored|cannot be read"):
            dataclasses.replace(stored, folder=folder).tensors()
    content = (stored.folder / "attributions.safetensors").read_bytes()
    (tmp_path / "attributions.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ResultError, match="cannot be read: damaged: the checksum does not match"):
        dataclasses.replace(stored, folder=tmp_path).tensors()


CHANGES = [
    {"split": "train"}, {"points": 2}, {"seed": 1}, {"methods": ("SM",)}, {"methods": ("BSM", "SM")}, {"norm": "linf"},
    {"budget": 50}, {"pool": 10}, {"pool": 0}, {"sigma": 0.2}, {"radius": 0.2}, {"checks": 1},
]  # fmt: skip


def test_every_setting_counts_but_the_batch_size():
    subject = tiny_subject()
    digests = [digest_of(subject, quick(**change)) for change in [{}, *CHANGES]]
    assert len(set(digests)) == len(digests)
    names = {f.name for f in dataclasses.fields(ExplainSettings)} - {"images", "batch_size"}
    assert {name for change in CHANGES for name in change} == names
    same = [{"batch_size": 2}, {"methods": ("Saliency", "bsm", "SM")}]
    assert {digest_of(subject, quick(**change)) for change in same} == {digests[0]}
    assert quick(methods=("BoundaryNormal", "bnm", "IG")).resolve(subject).methods == ("BNM", "IG")


class Boxes(TinyData):
    """The same images with a box each."""

    side = 3

    def load(self):
        splits = super().load()
        boxes = torch.tensor([[1, 1, self.side, self.side]]).expand(len(splits.test), 4)
        return dataclasses.replace(splits, test=dataclasses.replace(splits.test, boxes=boxes))


class LargerBoxes(Boxes):
    side = 4


@pytest.mark.parametrize(("shape", "checks"), [((2,), 16), ((1, 64, 64), 16), ((3, 64, 65), 2)])
def test_large_images_have_few_checks_by_default(shape, checks):
    subject = SimpleNamespace(data=SimpleNamespace(shape=shape))
    assert ExplainSettings().resolve(subject).checks == checks
    assert ExplainSettings(checks=0).resolve(subject).checks == 0


def test_points_examples_and_boxes_count():
    before = digest_of(tiny_subject(), quick())
    train, test = (tiny_subject(data=OtherPixels(split, validation=1 / 6)) for split in ("train", "test"))
    assert digest_of(test, quick()) != before
    assert digest_of(train, quick()) != before  # the search starts from training examples
    assert digest_of(train, quick(pool=0)) == digest_of(tiny_subject(), quick(pool=0))
    small, large = (tiny_subject(data=data(validation=1 / 6)) for data in (Boxes, LargerBoxes))
    assert len({before, digest_of(small, quick()), digest_of(large, quick())}) == 3


def test_boxes_give_locality():
    result = measure(tiny_subject(data=Boxes(validation=1 / 6)), quick(methods=("SM",), pool=0))
    method = result.methods["SM"]
    assert method.boxes == 3
    assert 0 < method.precision.value < 1
    assert 0 < method.f1.value < 1


def test_images_are_known_by_their_pixels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    subject, asked = tiny_subject(), quick(images=("a.png",), methods=("SM",))
    digests = []
    for brightness in (40, 41, 40):
        Image.new("L", (8, 8), brightness).save("a.png")
        digests.append(digest_of(subject, asked))
    assert digests[0] == digests[2] != digests[1]
    result = measure(subject, asked, tmp_path / "results")
    assert (result.titles, result.points) == (("a.png",), 1)
    torch.testing.assert_close(result.tensors()["x"], read_images(["a.png"], subject.data)[0])
    assert "label" not in result.tensors()
    assert math.isnan(result.methods["SM"].infidelity.standard_error)  # one point has no spread
    assert load_result(result.folder).settings == asked


def test_a_second_call_loads_without_model_passes(tmp_path):
    subject = tiny_subject()
    passes = []
    for restart in (False, False, True):
        counts = PassCounts()
        with count_passes(subject.model, counts):
            result = measure(subject, quick(), tmp_path, restart=restart)
        passes.append((counts.forward > 0, result.distances))
    assert [counted for counted, _ in passes] == [True, False, True]
    assert len({distances for _, distances in passes}) == 1
    assert len(list(tmp_path.glob("explain/*/result.json"))) == 1


def test_an_attribution_from_a_file(my_map, tmp_path):
    subject, asked = tiny_subject(), quick(methods=("SM", my_map), checks=1)
    result = measure(subject, asked, tmp_path)
    tensors = result.tensors()
    torch.testing.assert_close(tensors[f"attributions/{my_map}"], 2 * tensors["x"])
    assert result.methods[my_map].sanity_passed is False  # it does not look at the model
    assert load_result(result.folder).methods.keys() == {"SM", my_map}
    before = digest_of(subject, asked)
    (tmp_path / "my_map.py").write_text(MY_MAP + "\n# changed\n")
    assert digest_of(subject, asked) != before


def test_batches_fit_memory_unless_a_size_is_given(monkeypatch):
    subject, sizes = tiny_subject(), []
    x = subject.data.tensors("test", 5)[0]
    subject.model.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    monkeypatch.setattr(explanation, "automatic_batch_size", lambda model, x, largest: 2)
    options = {"methods": ["SM", "IG", "BSM"], "budget": 40, "check_points": 0}
    automatic = explain(subject.model, x, **options)
    assert max(sizes) == 2
    sizes.clear()
    given = explain(subject.model, x, **options, batch_size=4)
    assert max(sizes) == 4
    for name in options["methods"]:
        torch.testing.assert_close(
            automatic.methods[name].attributions, given.methods[name].attributions, rtol=1e-4, atol=1e-5
        )


def test_a_constant_model_is_explained_as_far_as_possible():
    subject = tiny_subject()
    subject.model.head.weight.data.zero_()
    result = measure(subject, quick(methods=("SM", "BSM", "BIG"), checks=1))
    assert "no other prediction was found for 3 of 3 inputs" in result.notes[0]
    assert (result.success, result.distances) == (0, (None,) * 3)
    assert {name: method.undefined for name, method in result.methods.items()} == {"SM": 0, "BSM": 3, "BIG": 3}
    assert math.isnan(result.pairs["SM-BSM"].value)
    assert json.loads(json.dumps(result.to_json()))["pairs"]["SM-BSM"]["value"] is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"points": 0}, "points: expected at least 1, got 0"),
        ({"pool": -1}, "pool: expected at least 0, got -1"),
        ({"sigma": 0.0}, "sigma: expected a number > 0, got 0.0"),
        ({"radius": math.nan}, "radius: expected a finite number, got nan"),
        ({"methods": ()}, "methods: expected at least one attribution, got none"),
        ({"methods": ("SM", "XX")}, "expected an attribution, got 'XX'"),
        ({"budget": 3}, "budget: expected at least 17 calls"),
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
    ],
)
def test_nonsense_is_one_sentence(options, sentence):
    with pytest.raises(AtollError, match=sentence):
        measure(tiny_subject(), quick(**options))
