"""The index: what it answers is what the classes themselves say, and nothing in it is out of date."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import atoll
import atoll_papers
from atoll.cli import VERBS, index, main
from atoll.cli.index import RECORD, SETTINGS, fingerprint, look_up
from atoll.files import read_record
from atoll.measure import measurement
from atoll.registry import REGISTRIES, registry
from support import change, script_environment

SLOW = ("torch", "matplotlib", "sklearn", "jinja2", "scipy", "numpy", "jsonargparse")
QUICK = [
    *([verb, "--help"] for verb in VERBS),
    ["ls"],
    ["ls", "--json"],
    ["ls", "recipes", "--rows", "--json"],
    *(["ls", registry(kind).title] for kind in REGISTRIES),
    *(["ls", kind] for kind in ("recipes", "suites", *REGISTRIES)),
    *(["ls", kind, sorted(registry(kind).members())[-1]] for kind in ("loss", "attack", "model", "data", "optimizer")),
    ["ls", "attack", "pgd-20", "--json"],
    ["ls", "modles"],
    ["ls", "model", "VitT"],
    ["ls", "data", "Mnits"],
    ["attack", "x", "--split", "tset"],
    ["attack", "x", "--points", "ten"],
    ["attack", "x", "--chekpoint", "last"],
    ["curvature", "x", "--estimator", "hutchison"],
    ["audit", "x", "--only", "helth"],
    ["audit", "x", "--fail-under", "robsut=50"],
    ["study"],
    ["study", "--scale", "smok"],
    ["train", "digits-at", "--resmue"],
    ["completion", "bash"],
    *(["completion", "zsh", f"atoll {line}"] for line in ("", "train d", "attack x --attacks P", "ls model ")),
    ["completion", "fish", "atoll train digits-trades loss"],
]  # fmt: skip
ANSWER = """
import contextlib, importlib, io, json, sys
for name in {first!r}:
    importlib.import_module(name)
from atoll.cli import main
answers = []
for words in {words!r}:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            code = main(words)
        except SystemExit as stop:
            code = stop.code
    answers.append([code, out.getvalue(), error.getvalue()])
print(json.dumps([[name for name in {slow!r} if name in sys.modules], answers]))
"""


def answers(cache, *first):
    """The slow modules that a new process has imported, and its answers to all quick commands."""
    code = ANSWER.format(first=first, words=QUICK, slow=SLOW)
    environment = script_environment() | {"XDG_CACHE_HOME": str(cache), "COLUMNS": "100"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stderr.decode()
    modules, texts = json.loads(done.stdout)
    return modules, {" ".join(words): text for words, text in zip(QUICK, texts, strict=True)}


linux = pytest.mark.skipif(sys.platform != "linux", reason="XDG_CACHE_HOME moves the cache only on Linux")


@linux
def test_stored_answers_equal_those_of_the_classes(tmp_path):
    modules, computed = answers(tmp_path)  # nothing is stored yet
    assert "torch" in modules
    modules, stored = answers(tmp_path)
    assert modules == []
    assert stored == computed
    assert [words for words, (_, out, error) in stored.items() if not out + error or "Traceback" in error] == []


@pytest.mark.slow
@linux
def test_answers_are_the_same_if_torch_was_imported_first(tmp_path):
    live = answers(tmp_path / "unused", "torch")[1]
    assert not (tmp_path / "unused" / "atoll").exists()
    assert answers(tmp_path)[1] == live


@pytest.fixture
def without_torch(tmp_path, monkeypatch):
    """As in a process that has not imported PyTorch; counts how often the entries are computed."""
    count = []
    monkeypatch.setattr(index, "_is_live", lambda: False)
    monkeypatch.setattr(index, "build", lambda: count.append(0) or {"tables": {"suites": {"number": len(count)}}})
    monkeypatch.setattr(index, "cache_path", lambda name: tmp_path / "cache" / f"{len(name)}.json")
    monkeypatch.setattr(index, "_stored", index._stored.__wrapped__)
    return count


def test_entries_are_computed_once(without_torch):
    assert [look_up("tables", "suites") for _ in range(3)] == [{"number": 1}] * 3
    assert read_record(index.cache_path("index"), RECORD)["entries"] == {"tables": {"suites": {"number": 1}}}


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-40]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("[1]"),
        lambda path: path.write_text(path.read_text().replace('"number": 1', '"number": 7')),
        lambda path: change(path, sources=None),
        lambda path: change(path, version="0"),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_a_damaged_or_stale_index_is_computed_again(damage, without_torch):
    assert look_up("tables", "suites") == {"number": 1}
    damage(index.cache_path("index"))
    assert look_up("tables", "suites") == {"number": 2}


def test_a_cache_that_cannot_be_written_is_no_error(without_torch, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(index, "cache_path", lambda name: tmp_path / "file" / "index.json")
    assert [look_up("tables", "suites") for _ in range(2)] == [{"number": 1}, {"number": 2}]


def test_a_package_that_fails_to_import_does_not_break_the_help(without_torch, monkeypatch):
    def fail():
        raise ImportError("no module named plugin")

    monkeypatch.setattr(index, "build", fail)
    assert look_up("settings", "attack")[0]["name"] == "split"
    assert not index.cache_path("index").exists()


def test_sources_that_changed_after_the_start_are_not_trusted(without_torch, monkeypatch, tmp_path):
    """They may not be what was imported."""
    source = tmp_path / "new.py"
    source.touch()
    os.utime(source, ns=(2**62, 2**62))
    monkeypatch.setattr(index, "_sources", lambda: [str(source)])
    assert [look_up("tables", "suites") for _ in range(2)] == [{"number": 1}, {"number": 2}]


def test_values_are_computed_again_if_their_state_changes(without_torch):
    calls = []

    def compute(key):
        calls.append(key)
        return [key, len(calls)]

    def ask(**states):
        return index.remember("numbers", states, compute)

    assert ask(a="1", b="1") == ask(b="1", a="1") == {"a": ["a", 1], "b": ["b", 2]}
    assert ask(a="2", b="1", c="1") == {"a": ["a", 3], "b": ["b", 2], "c": ["c", 4]}
    assert ask(c="1") == {"c": ["c", 4]}
    index.cache_path("numbers").write_text("{}")
    assert ask(c="1") == {"c": ["c", 5]}
    assert list(ask(c="1")) == ["c"]
    index._is_live = lambda: True  # restored by the fixture
    assert ask(c="1") == {"c": ["c", 6]}


def edit(path, text="x"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


CHANGES = {
    "a file is edited": lambda site: edit(site / "package" / "loss.py", "another text"),
    "a file is edited, but not its size": lambda site: os.utime(site / "package" / "loss.py", ns=(1, 1)),
    "a file is new": lambda site: edit(site / "package" / "inside" / "new.py"),
    "a recipe is new": lambda site: edit(site / "package" / "recipe.yaml"),
    "a file is removed": lambda site: (site / "package" / "loss.py").unlink(),
    "a distribution is new": lambda site: edit(site / "other-1.0.dist-info" / "METADATA"),
    "a distribution is updated": lambda site: (site / "plugin-1.0.dist-info").rename(site / "plugin-1.1.dist-info"),
    "entry points are edited": lambda site: os.utime(site / "plugin-1.0.dist-info" / "entry_points.txt", ns=(1, 1)),
    "an editable package is new": lambda site: edit(site / "other.pth"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_an_entry_depends_on_changes_the_fingerprint(name, tmp_path, monkeypatch):
    site = tmp_path / "site"
    edit(site / "package" / "loss.py")
    edit(site / "plugin-1.0.dist-info" / "entry_points.txt")
    monkeypatch.syspath_prepend(site)
    before = fingerprint([str(site / "package")])
    edit(site / "package" / "__pycache__" / "loss.cpython-311.pyc")
    edit(site / "package" / "data.bin")
    assert fingerprint([str(site / "package")]) == before
    CHANGES[name](site)
    assert fingerprint([str(site / "package")])[0] != before[0]


def test_all_packages_with_components_are_watched():
    sources = index._sources()
    for package in (atoll, atoll_papers):
        assert str(Path(package.__file__).parent.resolve()) in sources
    assert not any(source.endswith("/torch") for source in sources)


def test_every_command_with_settings_is_in_the_index():
    for kind in SETTINGS:
        names = [flag["name"] for flag in look_up("settings", kind)]
        assert names == [field.name for field in dataclasses.fields(measurement(kind).settings)]


PLUGIN = '''
from atoll.losses import Loss
class Mine(Loss):
    """{text}"""
'''


@pytest.mark.slow
@linux
def test_components_of_another_package_are_listed_as_they_are_now(tmp_path):
    site = tmp_path / "site"
    edit(site / "plugin-1.0.dist-info" / "METADATA", "Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    edit(site / "plugin-1.0.dist-info" / "entry_points.txt", "[atoll.losses]\nMine = my_plugin:Mine\n")
    environment = script_environment() | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(site)}
    for text in ("The first text.", "A second text."):
        edit(site / "my_plugin.py", PLUGIN.format(text=text))
        for _ in range(2):
            command = [sys.executable, "-m", "atoll", "ls", "losses", "--json"]
            done = subprocess.run(command, capture_output=True, env=environment, timeout=240, check=True)
            assert json.loads(done.stdout)["losses"]["Mine"] == text


@pytest.mark.slow
@linux
def test_runs_are_listed_without_torch_unless_they_change(trained, tmp_path, capsys):
    run = shutil.copytree(trained, tmp_path / "runs" / "first")
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "recipe.yaml").write_text("[")
    environment = script_environment() | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    code = "import sys; from atoll.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"

    def ask():
        """What a new process prints, and whether it imported PyTorch."""
        command = [sys.executable, "-c", code, "ls", "runs", "--json"]
        done = subprocess.run(command, capture_output=True, env=environment, cwd=tmp_path, timeout=240, check=False)
        return json.loads(done.stdout)["runs"], bool(done.returncode)

    first, imported = ask()
    assert (list(first), imported) == (["runs/first"], True)
    assert ask() == (first, False)
    assert main(["ls", "runs", str(tmp_path / "runs"), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["runs"].values()) == list(first.values())
    for folder in run.glob("results/*/*"):
        shutil.rmtree(folder)
    second, imported = ask()
    assert imported
    assert second != first
