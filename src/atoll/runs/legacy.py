"""Read results of version 0.1 as results of this version.

Version 0.1 wrote one file per command (``evaluations/*/evaluation.json``, ``certificates/certification.json``,
``smoothing/certification.json``, ``curvature/curvature.json``, ``explain/explain.json``), and the final test of the
training to ``result.json``.  These files identify a checkpoint, but neither inputs nor weights, so their results have
no digest.  Loss landscapes are not read, because their files do not say for which loss they were computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from atoll.attacks.measure import AttackResult
from atoll.attacks.suites import SUITES
from atoll.certify.measure import CertifyResult
from atoll.curvature.measure import CurvatureResult
from atoll.errors import AtollError
from atoll.explain.measure import ExplainResult
from atoll.files import parse_json, read_file
from atoll.measure import Result
from atoll.runs.recipe import read_recipe_file


def read_results(folder: Path) -> tuple[list[Result], list[str]]:
    """Read results in the layout of version 0.1, and return the reasons why some cannot be read."""
    results: list[Result] = []
    errors: list[str] = []
    readers: dict[str, Callable[[Any], Iterator[Result]]] = {
        "evaluations/*/evaluation.json": _attack,
        "certificates/certification.json": _certify,
        "smoothing/certification.json": _certify,
        "curvature/curvature.json": _curvature,
        "explain/explain.json": _explain,
        "explain/images/explain.json": _explain,
        "result.json": functools.partial(_tests, folder),
    }
    for pattern, read in readers.items():
        for path in sorted(folder.glob(pattern)):
            try:
                results += read(_load(path, folder))
            except (AtollError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                reason = f"missing {error}" if isinstance(error, KeyError) else error
                errors.append(f"{path.relative_to(folder)} cannot be read: {reason}")
    if any((folder / "curvature").glob("landscape-*.npz")):
        errors.append("the loss landscapes of version 0.1 do not say for which loss they are; compute them again")
    return results, errors


def _load(path: Path, run: Path) -> Any:
    return parse_json(read_file(path, inside=run))


def _common(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that every result has."""
    origin = {"run": str(tree["run"]), "step": int(tree["checkpoint"]), "weights": tree["weights"]}
    environment = {"atoll": "0.1", "torch": str(tree.get("torch", "")), "python": "", "machine": "", "device": ""}
    return {
        "subject": {"digest": "", "method": "unknown", "origin": origin},
        "inputs": "",
        "points": tree["points"],
        "environment": environment | {"threads": 0, "processes": 0, "date": ""},
    }


def _settings(tree: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"split": tree["split"], "points": tree["points"], "seed": tree["seed"], **more}


def _accuracy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {"correct": tree["correct"], "total": tree["total"]}


def _attack(tree: Mapping[str, Any]) -> Iterator[Result]:
    suite, threat = tree["suite"], tree["threat"]
    individual = suite in SUITES and not tree["cascade"]
    settings = _settings(tree, attacks=suite, individual=individual, norm=threat["norm"], eps=threat["eps"])
    attacks = [{**attack, "accuracy": _accuracy(attack["accuracy"])} for attack in tree["attacks"]]
    distance = tree.get("adbd")
    yield AttackResult.from_json(
        _common(tree)
        | {
            "settings": settings | {"surrogate": tree.get("surrogate"), "adbd": distance is not None},
            "clean": _accuracy(tree["clean"]),
            "robust": _accuracy(tree["robust"]),
            "attacks": attacks,
            "warnings": tree["findings"],
            "batch_size": tree["batch_size"],
            "adbd": distance and {"value": distance["mean"], "standard_error": distance["standard_error"]},
        }
    )


def _certify(tree: Mapping[str, Any]) -> Iterator[Result]:
    smoothing = tree.get("smoothing")
    settings = _settings(
        tree,
        eps=",".join(repr(float(row["eps"])) for row in tree["verified"]),
        precision=tree["precision"],
        attack="check" in tree,
        eta=tree.get("eta", 0.0),
    )
    if smoothing:
        settings |= {"smooth": smoothing["sigma"], "samples": smoothing["n"], "alpha": smoothing["alpha"]}
    layers = [{**layer, "method": layer["how"]} for layer in tree.get("layers", [])]
    yield CertifyResult.from_json(
        _common(tree)
        | {
            "settings": settings,
            "clean": _accuracy(tree["clean"]),
            "verified": [{"eps": row["eps"], "accuracy": _accuracy(row)} for row in tree["verified"]],
            "median_radius": tree["median_radius"],
            "curve": tree["curve"],
            "lipschitz": tree.get("lipschitz"),
            "layers": layers,
            "relative_cost": tree.get("relative_cost"),
            "check": tree.get("check"),
            "empirical": [{**row, "accuracy": _accuracy(row)} for row in tree.get("empirical", [])],
            "rejected": [{**row, "share": _accuracy(row)} for row in tree.get("rejected", [])],
        }
    )


def _curvature(tree: Mapping[str, Any]) -> Iterator[Result]:
    threat, traces = tree["threat"], tree["traces"]
    settings = _settings(tree, loss=tree["loss"], steps=tree["steps"], norm=threat["norm"], eps=threat["eps"])
    settings |= {"top": len(tree.get("eigenvalues", [])), "gap": "gap" in tree}
    names = ("mean_loss", "wci", "bound", "weight_norm", "root_trace", "negative", "layers")
    bounds = [{**bound, "message": bound["words"]} for bound in tree["pac_bayes"]]
    yield CurvatureResult.from_json(
        _common(tree)
        | {name: tree[name] for name in names}
        | {
            "settings": settings,
            "loss": tree["loss"],
            "attacked": tree["loss"] != "Standard",
            "trace": traces["total"],
            **{name: traces[name] for name in ("estimator", "reason", "probes")},
            "eigenvalues": tree.get("eigenvalues", []),
            "pac_bayes": bounds,
            "gap": tree.get("gap"),
        }
    )


def _explain(tree: Mapping[str, Any]) -> Iterator[Result]:
    boundary, images = tree["boundary"], tree.get("images") or []
    settings = {"split": tree["split"] or "test", "points": tree["points"], "seed": tree["seed"], "images": images}
    settings |= {name: tree[name] for name in ("sigma", "radius", "checks")}
    settings |= {"methods": list(tree["methods"]), "norm": boundary["norm"]}
    yield ExplainResult.from_json(
        _common(tree)
        | {
            "settings": settings,
            "predictions": tree["predictions"],
            "titles": images or ["" for _ in tree["predictions"]],
            "distance": {"value": boundary["mean_distance"], "standard_error": boundary["standard_error"]},
            "success": boundary["success"],
            "distances": boundary["distance"],
            "others": tree["other"],
            "searches": boundary["methods"],
            "calls": (boundary["forward"] + boundary["backward"]) / boundary["points"],
            "methods": {name: _method(method) for name, method in tree["methods"].items()},
            "pairs": tree["distances"],
            "notes": tree["words"],
        }
    )


def _method(tree: Mapping[str, Any]) -> dict[str, Any]:
    sanity, locality = tree.get("sanity"), tree.get("locality") or {}
    return {
        "undefined": tree["undefined"],
        "infidelity": tree["infidelity"]["value"],
        "scaled_infidelity": tree["infidelity"]["scaled"],
        "completeness_gap": tree.get("completeness_gap"),
        "sanity_passed": sanity and sanity["passed"],
        "sanity_layers": [[layer["layer"], layer["correlation"]] for layer in sanity["layers"]] if sanity else [],
        "sensitivity": tree.get("lipschitz_at_least"),
        **{name: locality.get(name) for name in ("precision", "recall", "f1")},
    }


def _tests(folder: Path, tree: Any) -> Iterator[Result]:
    """Read the final test; its PGD has its own name, because its step size was 2.5 eps / steps."""
    index = _load(folder / "index.json", folder)
    threat = read_recipe_file(folder / "recipe.yaml", inside=folder)["threat"]
    if "last" not in tree:
        raise ValueError("expected the test of the last checkpoint")
    averages = {name: part for name, part in tree.items() if isinstance(part, dict) and "last" in part}
    for weights, part in {"raw": tree, **averages}.items():
        steps = {"best": index["best"][weights], "last": index["last"]}
        for which in ("best", "last"):
            if which not in part or (which == "best" and steps["best"] == steps["last"]):
                continue
            row = part[which]
            points = row["clean"]["total"]
            common = _common({"run": folder.name, "checkpoint": steps[which], "weights": weights, "points": points})
            common["subject"]["origin"]["epoch"] = row["epoch"]
            attack = f"{tree['attack']} (version 0.1)" if tree["attack"] else "none"
            settings = {"split": "test", "attacks": attack, "norm": threat["norm"], "eps": str(threat["eps"])}
            robust = _accuracy(row.get("robust", row["clean"]))
            broken = {"attacked": row["clean"]["correct"], "broken": row["clean"]["correct"] - robust["correct"]}
            summary = {"name": attack, "accuracy": robust, **broken, "forward": 0, "backward": 0, "seconds": 0.0}
            attacks = [summary] if "robust" in row else []
            rest: dict[str, Any] = {"clean": _accuracy(row["clean"]), "robust": robust, "attacks": attacks}
            yield AttackResult.from_json({**common, "settings": settings, **rest})
            if "vra" in row:
                settings = {"split": "test", "eps": str(threat["eps"]), "attack": False, "precision": "float64"}
                verified = [{"eps": float(threat["eps"]), "accuracy": _accuracy(row["vra"])}]
                rest = {"clean": _accuracy(row["clean"]), "verified": verified, "median_radius": None, "curve": {}}
                yield CertifyResult.from_json({**common, "settings": settings, **rest})
