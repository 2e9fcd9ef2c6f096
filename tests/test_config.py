"""Plain data to typed objects and back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.config import Builder, from_plain, parameters, to_plain
from atoll.errors import ResultError
from atoll.stats import Accuracy, Estimate


@dataclass(frozen=True)
class Part:
    name: str
    value: float = 1.0


@dataclass(frozen=True)
class Whole:
    kind: Literal["a", "b"]
    count: int
    parts: tuple[Part, ...] = ()
    by_name: dict[str, Estimate] = field(default_factory=dict)
    accuracy: Accuracy | None = None
    path: Path | None = None
    pair: tuple[int, str] = (0, "")
    number: float | None = None
    hidden: int = field(default=0, metadata={"stored": False})


whole_numbers = st.integers(-(2**62), 2**62)
numbers = st.floats(allow_nan=False, allow_infinity=False)
wholes = st.builds(
    Whole,
    kind=st.sampled_from(["a", "b"]),
    count=whole_numbers,
    parts=st.lists(st.builds(Part, name=st.text(), value=numbers)).map(tuple),
    by_name=st.dictionaries(st.text(), st.builds(Estimate, numbers, numbers.map(abs), st.booleans())),
    accuracy=st.none() | st.integers(1, 99).flatmap(lambda n: st.builds(Accuracy, st.integers(0, n), st.just(n))),
    path=st.none() | st.just(Path("a/b")),
    pair=st.tuples(whole_numbers, st.text()),
    number=st.none() | numbers,
)


@given(wholes)
def test_what_is_written_is_read_back(whole):
    assert from_plain(Whole, to_plain(whole)) == whole


def test_missing_fields_get_defaults_and_unknown_ones_are_ignored():
    assert from_plain(Whole, {"kind": "a", "count": 3, "later": [1]}) == Whole("a", 3)


def test_fields_that_are_not_stored_are_neither_written_nor_read():
    tree = to_plain(Whole("a", 1, hidden=7))
    assert "hidden" not in tree
    assert from_plain(Whole, {**tree, "hidden": 9}).hidden == 0


def test_json_has_no_nan_so_null_is_read_as_one():
    assert to_plain(Part("x", math.inf)) == {"name": "x", "value": None}
    assert math.isnan(from_plain(Part, {"name": "x", "value": None}).value)


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ([], "expected"),
        ({}, "kind: missing; count: missing"),
        ({"kind": "c", "count": 1}, "kind: expected one of a, b, got 'c'"),
        ({"kind": "a", "count": True}, "count: expected an integer, got True"),
        ({"kind": "a", "count": 1.5}, "count"),
        ({"kind": "a", "count": "1"}, "count"),
        ({"kind": "a", "count": 1, "parts": {}}, "parts"),
        ({"kind": "a", "count": 1, "parts": [{"name": 3}]}, "parts[0].name"),
        ({"kind": "a", "count": 1, "parts": [{"name": "x", "value": 10**400}]}, "parts[0].value"),
        ({"kind": "a", "count": 1, "accuracy": {"correct": 3, "total": 2}}, "accuracy"),
        ({"kind": "a", "count": 1, "pair": [1]}, "pair"),
        ({"kind": "a", "count": 1, "number": "x"}, "number"),
    ],
)
def test_wrong_data_are_refused_with_where_and_what(tree, reason):
    with pytest.raises(ResultError) as error:
        from_plain(Whole, tree)
    assert reason in str(error.value)


def test_parameters_are_listed_with_type_and_default():
    listing = parameters(Estimate)
    assert listing["value"] == {"type": "a number", "default": "required"}
    assert listing["skewed"] == {"type": "true or false", "default": "False"}


@pytest.mark.parametrize(
    ("hint", "value", "valid"),
    [
        (float | torch.Tensor, 0.1, True),
        (float | torch.Tensor, "planted.Net", False),
        (torch.Tensor, {"class_path": "planted.Net"}, False),
        (dict[str, Any] | None, {"a": {"class_path": "planted.Net"}}, True),
        (dict[str, Any] | None, None, True),
        (dict[str, Any] | None, 3, False),
        (Sequence[Any], [{"class_path": "planted.Net"}], False),
        (tuple[float | torch.Tensor, int], [0.5, 2], True),
        (Literal["a", "b"] | None, "b", True),
    ],
)
def test_untrusted_values_import_nothing(hint, value, valid, tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    builder = Builder(trust=False)
    builder.build(hint, value, "part")
    assert (builder.errors == []) == valid
