"""Runs whose files are hostile, for tests of the report."""

import json
import math

import numpy as np
import yaml

HOSTILE = '</script><img src=x onerror="hacked=1"><b>\'&amp;'


def poison(value):
    """Every text, and every key, of a tree made hostile; every third number NaN, infinite or enormous."""
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


def poisoned(folder):
    """Make everything that is text in a run's folder hostile."""
    for path in [*folder.rglob("*.json"), folder / "metrics.jsonl"]:
        if "checkpoints" in path.parts:
            continue
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        keep = {"kind": "epoch"} if path.suffix == ".jsonl" else {}
        path.write_text("\n".join(json.dumps(poison(json.loads(line)) | keep) for line in lines))
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    (folder / "recipe.yaml").write_text(yaml.safe_dump(poison(recipe)))
    np.savez(
        folder / "curvature/landscape-weights.npz",
        a=np.array([0.0, 1.0]), b=np.array([0.0, 1e300]), loss=np.array([[0.0, 1.0], [np.nan, np.inf]]),
        axes=[HOSTILE, "$x$"],
    )  # fmt: skip
    target = folder.with_name(HOSTILE.replace("/", "∕"))
    folder.rename(target)
    return target
