"""Pages as a parser sees them, and runs whose files are hostile, for tests of the report."""

import dataclasses
import json
import math
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import yaml

from atoll.files import read_records, record_line
from atoll.measure import Result, load_result, save_result
from atoll.report import read_runs, render
from support import renew_digests, rewrite

HOSTILE = '</script><img src=x onerror="hacked=1"><b>\'&amp;'


class Page(HTMLParser):
    """The page as a browser's parser sees it: tags, text, scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.texts, self.scripts, self.inside = [], [], [], {}, None
        self.after, self.joins = "", False  # what came before; whether the next text continues the one before it
        self.feed(page)
        self.text = " ".join(" ".join(self.texts).split()).replace(" : ", ": ").replace(" , ", ", ")

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.inside = (tag, dict(attrs)) if tag in ("script", "style") else None
        # A term of the glossary is a part of its sentence.
        self.joins = self.after == "text" and ("class", "term") in attrs
        self.after = "term" if ("class", "term") in attrs else ""

    def handle_endtag(self, tag):
        self.inside = None
        self.joins, self.after = self.after == "term", ""

    def handle_data(self, data):
        if self.inside is None:
            self.texts.append((self.texts.pop() if self.joins else "") + data)
            self.joins, self.after = False, self.after or "text"
        elif self.inside[0] == "script":
            name = self.inside[1].get("id") or f"script {len(self.scripts)}"
            self.scripts[name] = self.scripts.get(name, "") + data


def page_of(*folders: Path) -> Page:
    return Page(render(read_runs(folders)))


def result_file(run: Path, kind: str) -> Path:
    """The file of the result of a kind; of the attack on 40 points, which is not the test of the training."""
    files = sorted((run / "results" / kind).glob("*/result.json"))
    (path,) = [file for file in files if kind != "attack" or json.loads(file.read_text())["points"] == 40]
    return path


def copy_result(path: Path, name: str, settings: dict | None = None, origin: dict | None = None, **changes) -> Result:
    """Store a variation of a result beside it, under another digest."""
    result = load_result(path.parent)
    if settings:
        changes["settings"] = dataclasses.replace(result.settings, **settings)
    if origin:
        record = dataclasses.replace(result.subject, origin=dataclasses.replace(result.subject.origin, **origin))
        changes["subject"] = record
    varied = dataclasses.replace(result, **changes)
    save_result(varied, path.parent.with_name(name))
    return varied


def poison(value):
    """Every text and every key of a tree made hostile; every third number NaN, infinite or enormous."""
    numbers = iter([math.nan, 1.5, 10**400, 2.5, -math.inf, 3.5] * 10**4)

    def walk(tree):
        if isinstance(tree, dict):
            # Epochs stay, so that there are curves to draw.
            return {key: value if key == "epoch" else walk(value) for key, value in tree.items()} | {HOSTILE: HOSTILE}
        if isinstance(tree, list):
            return [walk(value) for value in tree] + [HOSTILE]
        if isinstance(tree, str):
            return f"{HOSTILE}$x${chr(0x202E)}{tree}"
        return next(numbers) if isinstance(tree, float) else tree

    return walk(value)


# Texts of a result that the page shows; other types would not be read at all.
SHOWN = ("name", "message", "loss", "estimator", "reason", "posterior", "attacks", "weights", "notes", "words", "eps")


def poison_texts(tree, key=""):
    """Every text of a result that the page shows made hostile, in a result that can still be read."""
    if isinstance(tree, dict):
        return {name: poison_texts(value, name) for name, value in tree.items()}
    if isinstance(tree, list):
        return [poison_texts(value, key) for value in tree]
    return f"{HOSTILE}$x${chr(0x202E)}{tree}" if isinstance(tree, str) and key in SHOWN else tree


def poisoned(folder: Path) -> Path:
    """Make every text in a run's folder hostile."""
    rewrite(folder / "environment.json", poison(json.loads((folder / "environment.json").read_text())))
    records, _ = read_records(folder / "metrics.jsonl")
    lines = [record_line(poison(record) | {"kind": "epoch"}) for record in records]
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    for path in folder.glob("results/*/*/result.json"):
        rewrite(path, poison_texts(json.loads(path.read_text())))
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    (folder / "recipe.yaml").write_text(yaml.safe_dump(poison(recipe)))
    path = result_file(folder, "curvature")
    np.savez(
        path.with_name("landscape-weights.npz"),
        a=np.array([0.0, 1.0]), b=np.array([0.0, 1e300]), loss=np.array([[0.0, 1.0], [np.nan, np.inf]]),
        axes=[HOSTILE, "$x$"],
    )  # fmt: skip
    renew_digests(path)
    target = folder.with_name(HOSTILE.replace("/", "∕"))
    folder.rename(target)
    return target
