"""Hostile values for every key of a recipe: each is accepted and works, or is an error of one sentence."""

from __future__ import annotations

import math
import random
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import yaml

from atoll.config import argument_keys
from atoll.errors import AtollError, RecipeError
from atoll.registry import registry
from atoll.runs.recipe import Recipe, build_recipe
from atoll.runs.train import build_trainer

HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 0.5, 1.5, -0.5, 1e-300, 1e300, 10**6, 10**9, 10**12, 2**63, 10**30, -(10**30),
    math.nan, math.inf, -math.inf, "", " ", "x", "nan", "1e400", "1e999999999", "8/255", "1/0", "é" * 50, "\x00",
    "x" * 5000, "..", "../x", "os.system", "x.py:X", "atoll.losses.AT", "best", [], [[]], [1], [0], [-1], [0.5, 2],
    ["x"], [None], [math.nan], [1] * 1000, list(range(5)), {}, {"a": 1}, {"class_path": "AT"}, {"class_path": None},
    {"class_path": "PGD", "init_args": {"steps": 0}}, {"class_path": ["AT"]}, {"init_args": {}},
    {"class_path": "SGD", "init_args": []}, {1: 2}, {None: None}, [{}], [{"class_path": "AWP"}] * 2,
]  # fmt: skip

BASE = {
    "data": "Digits",
    "model": {"class_path": "SmallConvNet", "init_args": {"widths": [4, 4]}},
    "threat": {"norm": "linf", "eps": 0.1},
}
SECTIONS = {
    "data": "data", "model": "model", "loss": "loss", "attack": "attack", "methods": "method", "optimizer": "optimizer",
    "schedule": "schedule",
}  # fmt: skip


def recipes(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Recipes with hostile values of one or two keys, each argument of each component in turn."""
    draw, hints = random.Random(seed), typing.get_type_hints(Recipe)
    places: list[tuple[str, str | None, str | None]] = [(name, None, None) for name in [*hints, "unknown"]]
    for name in ("threat", "trainer"):
        places += [(name, None, key.split(".")[-1]) for key in argument_keys(hints[name], {}, name, trust=True)]
    for section, kind in SECTIONS.items():
        for name in registry(kind).members():
            hint = typing.get_args(hints["methods"])[0] if section == "methods" else hints[section]
            keys = argument_keys(hint, name, section, trust=True)
            places += [(section, name, key.split(".")[-1]) for key in keys]
    draw.shuffle(places)
    for number in range(count):
        tree: dict[str, Any] = {**BASE}
        section, name, key = places[number % len(places)]
        value = draw.choice(HOSTILE)
        if key is None:
            tree[section] = value
        elif name is None:
            tree[section] = {**BASE.get(section, {}), key: value}
        else:
            part = {"class_path": name, "init_args": {key: value}}
            tree[section] = [part] if section == "methods" else part
        yield tree


def numbers_in(tree: Any) -> Iterator[float]:
    if isinstance(tree, dict | list):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from numbers_in(part)
    elif isinstance(tree, int | float):
        yield tree


def check(tree: dict[str, Any]) -> str:
    """What is wrong with the answer to a recipe; empty if nothing is."""
    try:
        recipe = build_recipe(tree)
    except RecipeError as error:
        return "" if len(str(error)) < 10_000 and "Traceback" not in str(error) else f"printed {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if not all(math.isfinite(n) and (isinstance(n, float) or abs(n) < 2**63) for n in numbers_in(recipe.tree)):
        return "accepted a number that is not finite or has more than 64 bits"
    if build_recipe(yaml.safe_load(yaml.safe_dump(dict(recipe.tree)))).tree != recipe.tree:
        return "the resolved recipe is another one"
    try:
        with torch.device("meta"):  # takes no memory
            recipe.model((1, 8, 8), 10)
    except AtollError:
        return ""
    except Exception as error:
        return f"the model: {type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(("seed", "count"), [(0, 200), pytest.param(1, 3000, marks=pytest.mark.slow)])
def test_hostile_recipes_are_accepted_or_refused(seed, count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problems = [f"{str(tree)[:300]}: {problem}" for tree in recipes(seed, count) if (problem := check(tree))]
    assert not problems, "\n".join(problems)
    assert not list(tmp_path.iterdir())


TRAINING = {"epochs": 1, "batch_size": 16, "validation_steps": 1, "test_steps": 1}


def train_briefly(tree: dict[str, Any]) -> str:
    """Train a recipe for an epoch of four steps if it is accepted; what is wrong, or nothing."""
    settings = tree.get("trainer", {})
    if not isinstance(settings, dict) or any(abs(number) > 100 for number in numbers_in(tree)):  # takes too long
        return ""
    data = {"class_path": "Digits", "init_args": {"limit": 64}} if tree["data"] == "Digits" else tree["data"]
    try:
        recipe = build_recipe({**tree, "data": data, "trainer": {**TRAINING, **settings, "epochs": 1}})
        build_trainer(recipe, None, []).fit()
    except AtollError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_accepted_recipes_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trees = [tree for tree in recipes(2, 3000) if all(tree[name] == BASE[name] for name in ("data", "model"))]
    problems = [f"{str(tree)[:300]}: {problem}" for tree in trees if (problem := train_briefly(tree))]
    assert not problems, "\n".join(problems)
