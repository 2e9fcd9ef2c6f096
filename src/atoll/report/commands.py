"""The commands that make a part of a run, or make it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from atoll.attacks.suites import SUITES
from atoll.report.values import entries, get, number, plain, step, whole


def resume(run: Path) -> str:
    return shlex.join(["atoll", "train", "--resume", "--out", str(run)])


def attack(run: Path) -> str:
    return shlex.join(["atoll", "attack", str(run)])


def certify(run: Path, *, proven: bool) -> str:
    """Proofs where the network was trained for them, and otherwise smoothing, which any model takes."""
    return shlex.join(["atoll", "certify", str(run), *([] if proven else ["--smooth", "0.25", "--eps", "0.25"])])


def curvature(run: Path) -> str:
    return shlex.join(["atoll", "curvature", str(run)])


def explain(run: Path) -> str:
    return shlex.join(["atoll", "explain", str(run)])


def threat(tree: Mapping[str, Any]) -> str:
    """``linf 8/255`` from a result's JSON."""
    return f"{plain(get(tree, 'threat', 'norm'))} {plain(get(tree, 'threat', 'eps'))}"


def train_again(run: Path, environment: Mapping[str, Any]) -> list[str]:
    """What was typed, if it was this command, and the resolved recipe, which gives the same bits whatever was typed."""
    typed = environment.get("command")
    lines = []
    if isinstance(typed, list) and typed[1:2] == ["train"] and all(isinstance(word, str) for word in typed):
        lines.append(shlex.join(["atoll", *typed[1:]]))
    return [*lines, shlex.join(["atoll", "train", str(run / "recipe.yaml"), "--out", f"{run}-again"])]


def attack_again(run: Path, tree: Mapping[str, Any]) -> str | None:
    """None if an older version did not keep the name of the suite."""
    suite = get(tree, "suite")
    if not isinstance(suite, str):
        return None
    words = ["atoll", "attack", str(run), "--attacks", suite, *_words(tree)]
    if suite in SUITES and get(tree, "cascade") is False:
        words.append("--individual")
    if isinstance(surrogate := get(tree, "surrogate"), str):
        words += ["--surrogate", surrogate]
    return shlex.join(words)


def certify_again(run: Path, tree: Mapping[str, Any]) -> str:
    radii = [repr(eps) for verified in entries(tree, "verified") if (eps := number(get(verified, "eps"))) is not None]
    words = ["atoll", "certify", str(run), *(["--eps", ",".join(radii)] if radii else [])]
    for option, name in (("--smooth", "sigma"), ("--samples", "n"), ("--alpha", "alpha")):
        if (value := number(get(tree, "smoothing", name))) is not None:
            words += [option, plain(get(tree, "smoothing", name) if name == "n" else value)]
    return shlex.join([*words, *_words(tree)])


def curvature_again(run: Path, tree: Mapping[str, Any], *, landscapes: Iterable[str], density: bool) -> list[str]:
    """One command for each landscape that was kept."""
    words = ["atoll", "curvature", str(run), *_words(tree), *(["--gap"] if "gap" in tree else [])]
    words += ["--density"] if density else []
    return [shlex.join([*words, *more]) for more in ([["--landscape", over] for over in landscapes] or [[]])]


def explain_again(run: Path, tree: Mapping[str, Any]) -> str | None:
    """None for image files, whose paths are not kept."""
    if get(tree, "images") is not None:
        return None
    methods = get(tree, "methods")
    words = ["--methods", ",".join(map(plain, methods))] if isinstance(methods, Mapping) and methods else []
    return shlex.join(["atoll", "explain", str(run), *words, *_words(tree)])


def _words(tree: Mapping[str, Any]) -> list[str]:
    """The options that the commands share, where their JSON has them."""
    words: list[str] = []
    if get(tree, "threat", "norm") is not None:
        words += ["--norm", plain(get(tree, "threat", "norm")), "--eps", plain(get(tree, "threat", "eps"))]
    for name in ("points", "split", "weights"):
        if (value := get(tree, name)) is not None:
            words += [f"--{name}", plain(value)]
    if (at := step(tree)) is not None:
        words += ["--checkpoint", str(at)]
    return [*words, *(["--seed", str(seed)] if (seed := whole(get(tree, "seed"))) is not None else [])]
