"""What is missing, damaged or doubtful in a run is named on its page; no file breaks the page."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from atoll.cli import main
from atoll.errors import AtollError
from atoll.report import read_runs
from report_cases import HOSTILE, copy_result, page_of, result_file
from support import change, renew_digests, rewrite


def unfinished(folder):
    change(folder / "index.json", finished=False)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(lines[0] + lines[1][:30])


def just_begun(folder):
    for path in folder.iterdir():
        if path.name not in ("recipe.yaml", "environment.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def without(*kinds):
    return lambda folder: [shutil.rmtree(folder / "results" / kind) for kind in kinds]


def replaced(kind, name, write):
    """Replace a file of a result and its digest."""

    def happen(folder):
        path = result_file(folder, kind)
        write(path.with_name(name))
        renew_digests(path)

    return happen


def array(name, **arrays):
    return replaced("curvature", name, lambda path: np.savez(path, **arrays))


def images(kind, name, **tensors):
    """Replace the images of a result."""
    return replaced(kind, name, lambda path: save_file(tensors, path))


def result(kind, content):
    """Replace the file of a result."""
    return lambda folder: result_file(folder, kind).write_text(content)


def damaged(kind, /, **values):
    """Change a result without its checksum."""

    def happen(folder):
        path = result_file(folder, kind)
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return happen


def altered(kind, /, **values):
    """Change a result and its checksum."""
    return lambda folder: change(result_file(folder, kind), **values)


def link(kind, target):
    """Make a result a symbolic link to a copy of it outside the run."""

    def happen(folder):
        path = result_file(folder, kind)
        outside = folder.parent / "outside"
        shutil.move(path.parent, outside)
        if target == "folder":
            path.parent.symlink_to(outside)
        else:
            path.parent.mkdir()
            path.symlink_to(outside / "result.json")

    return happen


def pipe(name):
    def happen(folder):
        path = result_file(folder, "attack") if name == "result.json" else folder / name
        path.unlink()
        os.mkfifo(path)

    return happen


FLAT = {"a": np.zeros(2), "b": np.zeros(2), "axes": ["a", "b"]}
WARNING = {"warnings": [{"kind": "gradient masking", "message": "gradients mislead"}]}
# What happened to a run, and what the page says about it.
CASES = {
    "killed": (
        unfinished,
        ["not finished: 1 of 3 epochs", "atoll train --resume --out", "metrics.jsonl: 2 of 3 epochs are missing"],
    ),
    "just begun": (just_begun, ["Checkpoint: none is saved yet", "No epoch is recorded yet", "Robust accuracy: not"]),
    "no attack": (without("attack"), ["Robust accuracy: not measured", "atoll attack"]),
    "attack under way": (lambda f: result_file(f, "attack").unlink(), ["was started but not finished"]),
    "no certificates": (without("certify"), ["Certificates: not measured", "--smooth 0.25"]),
    "no curvature": (without("curvature"), ["Curvature: not measured", "WCI during training"]),
    "no explanation": (without("explain"), ["Explanation: not measured", "atoll explain"]),
    "no checkpoints": (lambda f: shutil.rmtree(f / "checkpoints"), ["whose checkpoint was deleted", "Stale results"]),
    "half a file": (result("curvature", '{"kind": '), ["result.json cannot be read: Expecting value"]),
    "not a mapping": (result("curvature", "[1]"), ["cannot be read: expected a mapping"]),
    "deep": (result("curvature", "[" * 10**5), ["result.json cannot be read"]),
    "deep inside": (result("explain", '{"kind":' * 900 + "1" + "}" * 900), ["result.json cannot be read"]),
    "not text": (lambda f: (f / "environment.json").write_bytes(b"\xff\xfe"), ["environment.json: cannot be read"]),
    "wrong checksum": (damaged("attack", points=41), ["damaged: the checksum does not match"]),
    "newer version": (altered("attack", version=99), ["written by a newer version of Atoll (99)"]),
    "unknown kind": (altered("attack", kind="telepathy"), ["expected a measurement, got 'telepathy'"]),
    "foreign code": (altered("attack", kind="evil.py:Evil"), ["runs code from outside Atoll"]),
    "wrong type": (altered("attack", points="many"), ["points: expected an integer, got 'many'"]),
    "huge integer": (altered("attack", points=10**400), ["points: expected an integer, got 1000"]),
    "huge number": (altered("curvature", bound=10**400), ["bound: expected a number, got 1000"]),
    "impossible": (altered("attack", clean={"correct": 3, "total": 2}), ["expected 0 <= correct <= total"]),
    "no points": (altered("attack", clean={"correct": 0, "total": 0}), ["no points"]),
    "not a number": (altered("curvature", wci={"value": None, "standard_error": None}), ["WCI not measured"]),
    "link to a file": (link("attack", "file"), ["a link to a file outside the run folder"]),
    "link to a folder": (link("attack", "folder"), ["a link to a file outside the run folder"]),
    "pipe for metrics": (
        pipe("metrics.jsonl"),
        ["metrics.jsonl: cannot be read: not a regular file", "No epoch is recorded"],
    ),
    "pipe for a result": (pipe("result.json"), ["not a regular file"]),
    "not a landscape": (
        replaced("curvature", "landscape-weights.npz", lambda path: path.write_bytes(b"PK")),
        ["landscape-weights.npz: cannot be read: File is not a zip file"],
    ),
    "damaged landscape": (
        lambda f: result_file(f, "curvature").with_name("landscape-weights.npz").write_bytes(b"PK"),
        ["landscape-weights.npz: cannot be read: damaged: the checksum does not match"],
    ),
    "lost landscape": (
        lambda f: result_file(f, "curvature").with_name("landscape-weights.npz").unlink(),
        ["landscape-weights.npz: cannot be read: the file is missing"],
    ),
    "another landscape": (
        array("landscape-weights.npz", a=np.zeros(2), b=np.zeros(3), loss=np.zeros(4)),
        ["landscape-weights.npz: cannot be read", "expected arrays a, b, loss and axes"],
    ),
    "landscape of infinities": (
        array("landscape-weights.npz", loss=np.full((2, 2), np.inf), **FLAT),
        ["landscape-weights.npz: cannot be read: expected finite numbers"],
    ),
    "empty landscape": (
        array("landscape-weights.npz", a=np.zeros(0), b=np.zeros(0), loss=np.zeros((0, 0)), axes=["a", "b"]),
        ["landscape-weights.npz: cannot be read: expected finite numbers"],
    ),
    "large landscape": (
        array("landscape-weights.npz", a=np.zeros(300), b=np.zeros(300), loss=np.zeros((300, 300)), axes=["a", "b"]),
        ["90,000 numbers are too many to draw"],
    ),
    "large density": (
        array("density.npz", eigenvalues=np.zeros((1, 10**5)), weights=np.ones((1, 10**5))),
        ["100,000 numbers are too many to draw"],
    ),
    "pickled": (
        array("density.npz", eigenvalues=np.array([print]), weights=np.zeros(1)),
        ["density.npz: cannot be read"],
    ),
    "bomb": (
        replaced("curvature", "density.npz", lambda path: np.savez_compressed(path, eigenvalues=np.zeros(2**24))),
        ["density.npz: cannot be read: larger than 64 MB"],
    ),
    "broken attributions": (
        replaced("explain", "attributions.safetensors", lambda path: path.write_bytes(b"no tensors")),
        ["attributions.safetensors: cannot be read"],
    ),
    "attributions of another shape": (
        images("explain", "attributions.safetensors", x=torch.zeros(4, 1, 8, 8), more=torch.zeros(4, 1, 7, 8)),
        ["attributions.safetensors: cannot be read: expected images and attributions of the same shape"],
    ),
    "huge examples": (
        images("attack", "examples.safetensors", x=torch.zeros(1, 1, 1, 2000), x_adv=torch.zeros(1, 1, 1, 2000)),
        ["examples.safetensors: cannot be read: x: expected images of at most 1024 x 1024 pixels"],
    ),
    "no examples": (
        images("attack", "examples.safetensors", x=torch.zeros(1, 1, 8, 8)),
        ["examples.safetensors: cannot be read: File does not contain tensor x_adv"],
    ),
    "examples of integers": (
        images("attack", "examples.safetensors", x=torch.zeros(1, 1, 8, 8).long(), x_adv=torch.zeros(1, 1, 8, 8)),
        ["examples.safetensors: cannot be read: x: expected floating-point numbers, got torch.int64"],
    ),
    "warning": (altered("attack", **WARNING), ["gradient masking", "gradients mislead (linf 0.15)", "see the warning"]),
    "broken certificate": (
        lambda f: result_file(f, "certify").with_name("broken.safetensors").write_bytes(b""),
        ["A certificate was broken"],
    ),
    "selected on test": (lambda f: change(f / "index.json", selected_on="test"), ["Selected on the test set"]),
    "no landscape": (
        lambda f: (
            copy_result(result_file(f, "curvature"), "plain", {"landscape": None}),
            shutil.rmtree(next(p.parent for p in f.glob("results/curvature/*/density.npz"))),
        ),
        ["Loss landscape: not measured", "--landscape weights"],
    ),
}


@pytest.fixture(scope="module")
def complete(measured):
    return page_of(measured / "robust").text


@pytest.mark.parametrize("case", CASES)
def test_what_is_missing_damaged_or_doubtful_is_named(robust, complete, case):
    happen, sentences = CASES[case]
    happen(robust)
    text = page_of(robust).text
    for sentence in sentences:
        assert sentence in text
    assert sentences[0] not in complete


def test_a_picture_that_is_a_link_is_not_shown(robust, tmp_path):
    """Whoever sends a run must not get a picture of the reader's into the reader's page."""
    before = page_of(robust).tags.count("img")
    path = result_file(robust, "explain").with_name("attributions.safetensors")
    shutil.move(path, tmp_path / "private.safetensors")
    path.symlink_to(tmp_path / "private.safetensors")
    assert page_of(robust).tags.count("img") < before


def test_an_incomplete_run_does_not_spoil_a_comparison(robust, measured):
    just_begun(robust)
    text = page_of(robust, measured / "certified").text
    assert "robust, Checkpoint: none is saved yet" in text
    assert "5 of" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{empty}"], "is not a run"),
        (["{empty}/none"], "is not a run; expected a folder"),
        (["{robust}", "-o", "{empty}"], "expected a file, got the folder"),
        (["{robust}", "-o", "{robust}/recipe.yaml/report.html"], "cannot write"),
    ],
)
def test_wrong_arguments_are_one_sentence(measured, tmp_path, capsys, arguments, sentence):
    places = {"empty": tmp_path, "robust": measured / "robust"}
    assert main(["report", *(argument.format(**places) for argument in arguments)]) == 1
    assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "happen", [lambda f: (f / "recipe.yaml").write_text("[" * 10**4), pipe("recipe.yaml"), pipe("index.json")]
)
def test_a_folder_without_a_readable_run_is_one_sentence(robust, happen):
    happen(robust)
    with pytest.raises(AtollError, match=r"(is not|does not hold) a run"):
        read_runs([robust])


@pytest.mark.parametrize("text", ["[1]", "[" * 10**5, "\udcff", "{}", '{"last": 12, "best": {"raw": "x"}}'])
def test_a_damaged_index_is_one_sentence(robust, text):
    (robust / "index.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(AtollError, match=r"index\.json cannot be read: .*; resume the training to write it again"):
        read_runs([robust])


def test_a_long_recipe_is_cut(robust):
    lines = ["a0: &a0 {x: 1, y: 2, z: 3}", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 5))]
    (robust / "recipe.yaml").write_text("\n".join(lines))
    page = page_of(robust)
    assert page.tags.count("tr") < 1000
    assert "more was left out" in page.text


TEXTS = st.sampled_from([HOSTILE, "raw", "", "\udc80", "\u2028", "-->", "]]>", "\u202e", "../.."]) | st.text(max_size=8)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
TREES = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(TEXTS, LEAVES, max_size=3)


def leaves(tree, path=()):
    """The paths of all values of a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(leaf for key, value in items for leaf in leaves(value, (*path, key)))]


def put(tree, path, value):
    """The same tree with another value at a path."""
    if not path:
        return value
    copy = tree.copy()
    copy[path[0]] = put(tree[path[0]], path[1:], value)
    return copy


KINDS = ("attack", "certify", "curvature", "explain")


@pytest.fixture(scope="module")
def scratch(measured, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any") / "robust"
    shutil.copytree(
        measured / "robust", folder, ignore=shutil.ignore_patterns("*.png", "*.safetensors")
    )  # which take time to encode
    files = {kind: result_file(folder, kind) for kind in KINDS}
    return folder, files, {kind: json.loads(path.read_text()) for kind, path in files.items()}


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_result_can_be_shown_or_is_named_as_unreadable(scratch, data):
    """Whatever value is changed to whatever else, with a checksum that matches, there is a page."""
    folder, files, trees = scratch
    kind = data.draw(st.sampled_from(KINDS))
    tree = trees[kind]
    for path in data.draw(st.lists(st.sampled_from(leaves(tree)[1:]), min_size=1, max_size=3)):
        if path in leaves(tree):
            like = tree
            for key in path:
                like = like[key]
            same = {float: st.floats(), int: st.integers(), str: TEXTS}.get(type(like), TREES)
            tree = put(tree, path, data.draw(same | TREES))
    rewrite(files[kind], tree)
    page = page_of(folder)
    json.loads(page.scripts["figures"], parse_constant=pytest.fail)
    assert not {chr(code) for code in (0x202E, 0x2066, 0x200F, 0)} & set(page.text)
    rewrite(files[kind], trees[kind])
