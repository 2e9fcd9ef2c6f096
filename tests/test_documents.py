"""The code, commands and paths in the documentation work."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import markdown
import pytest

import atoll
from atoll.attacks.suites import parse_attacks
from atoll.cli import main, parse
from atoll.cli.measure import settings_from
from atoll.measure import MEASUREMENTS, measurement
from atoll.plots import plot_curves
from atoll.registry import REGISTRIES, registry
from atoll.runs.run import open_run
from atoll.studies import STUDIES
from atoll.threat import ThreatModel

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Files in CONTRIBUTING.md: the registry and the class of each.
SAMPLES = {
    "label_smoothing.py": ("loss", "LabelSmoothing"),
    "random_corner.py": ("attack", "RandomCorner"),
    "weight_clipping.py": ("method", "WeightClipping"),
    "two_layer_net.py": ("model", "TwoLayerNet"),
    "stripes.py": ("data", "Stripes"),
    "darker.py": ("corruption", "Darker"),
    "gradient_magnitude.py": ("attribution", "GradientMagnitude"),
    "confidence.py": ("measurement", "MeasureConfidence"),
    "steps_study.py": ("study", "StepsStudy"),
}


def code_blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def file_name(block):
    """The name in the first line of a block that is a file."""
    match = re.match(r"# (\S+\.(py|yaml))\n", block)
    return match and match[1]


def run_examples(text, name):
    names: dict[str, object] = {"__name__": name}
    for example in code_blocks(text, "python"):
        if not file_name(example):
            exec(compile(example, name, "exec"), names)  # each block continues the one before, as for a reader


def commands(text):
    """The arguments of all ``atoll`` commands in a text."""
    for line in text.replace("\\\n", " ").splitlines():
        if re.match(r"\s*(torchrun .* -m )?atoll (?!.*\.\.\.$)", line):
            words = shlex.split(line, comments=True)
            yield words[words.index("atoll") + 1 :]


def all_commands():
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for words in commands(page.read_text()):
            yield pytest.param(words, id=f"{page.stem}: {' '.join(words)}")


@pytest.mark.pictures
def test_the_python_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert max(len(re.findall(r"\S.*", block)) for block in code_blocks(README, "python")) <= 10
    run_examples(README.replace('"trainer.epochs=5"', '"trainer.epochs=1"'), "README.md")  # as written, but shorter
    printed = capsys.readouterr().out
    assert "robust accuracy" in printed
    assert (tmp_path / "runs/readme/adversarial.png").stat().st_size > 1000
    figure = plot_curves(open_run(tmp_path / "runs/readme"))
    assert [len(axis.lines) for axis in figure.axes] == [1, 2]  # AT has no clean pass on training data


@pytest.mark.parametrize(
    "guide", [guide for guide in GUIDES if "```python" in guide.read_text()], ids=lambda guide: guide.stem
)
def test_the_python_of_guides_runs(guide, tmp_path, monkeypatch, short):
    monkeypatch.chdir(tmp_path)
    run_examples(re.sub(r'"trainer.epochs=\d+"', '"trainer.epochs=1"', guide.read_text()), guide.name)


@pytest.fixture
def samples(tmp_path, monkeypatch):
    """The files of CONTRIBUTING.md in the current folder; registries and modules are restored afterwards."""
    blocks = code_blocks(CONTRIBUTING, "python") + code_blocks(CONTRIBUTING, "yaml")
    for block in blocks:
        if name := file_name(block):
            (tmp_path / name).write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    modules = set(sys.modules)
    members = {kind: registry(kind).members() for kind in REGISTRIES}
    yield tmp_path
    for kind, before in members.items():
        registry(kind)._members.clear()
        registry(kind)._members.update(before)
    for name in set(sys.modules) - modules:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == tmp_path:
            del sys.modules[name]


def test_contributing_has_a_sample_of_every_kind(samples):
    assert {path.name for path in samples.glob("*.py")} == SAMPLES.keys()
    for name, (kind, cls) in SAMPLES.items():
        assert registry(kind).resolve(f"{name}:{cls}").cls.__name__ == cls
        assert cls in registry(kind).members()  # the decorator worked


def test_the_samples_of_contributing_work(samples, capsys):
    for words in commands(CONTRIBUTING):
        assert main(words) == 0, (words, capsys.readouterr().err)
    capsys.readouterr()
    run_examples(CONTRIBUTING, "CONTRIBUTING.md")
    assert len(capsys.readouterr().out.splitlines()) == 2
    run = open_run(samples / "runs/stripes", trust=True)
    assert {result.kind for result in run.results()} == {"attack", "curvature", "explain", "confidence"}
    assert all(parameter.abs().max() <= 1 for parameter in run.model("last").parameters())
    assert set(run.results("explain")[0].methods) == {"SM", "gradient_magnitude.py:GradientMagnitude"}
    assert "More steps help" in (samples / "runs/steps/README.md").read_text()
    assert "LabelSmoothing" in (samples / "stripes.html").read_text()


@pytest.mark.parametrize("words", list(all_commands()))
def test_commands_are_valid(words):
    options = parse(words)
    if options.verb == "train" and not options.resume:
        assert main([*words, "--dry-run"]) == 0
    if options.verb == "study" and ".py:" not in (options.name or ""):
        assert options.name in {None, *STUDIES.members()}
    if options.verb in MEASUREMENTS.members():
        settings = settings_from(options, measurement(options.verb).settings)
        attacks = getattr(settings, "attacks", "none")
        norm = "l2" if options.verb == "certify" else getattr(settings, "norm", None) or "linf"
        for eps in (getattr(settings, "eps", None) or "0.1").split(","):  # `certify` takes several radii
            assert ".py:" in attacks or parse_attacks(attacks, ThreatModel(norm, eps)) is not None


def test_the_table_names_only_what_exists():
    known = {name for kind in REGISTRIES for name in registry(kind).members()} | set(dir(atoll)) | {"Timm", "Transfer"}
    table = README + (ROOT / "docs/components.md").read_text()
    names = {n for row in table.splitlines() if row.startswith("|") for n in re.findall(r"`([A-Z]\w+)`", row)}
    assert names <= known, names - known


def test_every_page_of_results_has_a_date_and_a_version():
    pages = [
        path for path in (ROOT / "docs/results").glob("*.md") if path.name != "claims.md"
    ]  # which lists the others
    assert len(pages) > 20
    for page in pages:
        assert re.search(r"20\d\d-\d\d-\d\d.*\batoll \d", page.read_text()), page.name


def test_every_study_has_a_claim_in_the_results():
    text = (ROOT / "docs" / "results" / "claims.md").read_text()
    assert set(re.findall(r"\[([a-z-]+)\]\(", text)) >= STUDIES.members().keys()


def test_everything_in_all_can_be_imported():
    assert all(getattr(atoll, name) is not None for name in atoll.__all__)
    with pytest.raises(AttributeError):
        _ = atoll.nothing


def rows(heading):
    """The first and the last column of the table below a heading of the architecture page."""
    section = ARCHITECTURE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [(line[0], line[-1]) for line in lines[2:]]


def test_the_map_has_the_layers_that_lint_checks():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [sorted(layer.split(" | ")) for layer in contracts[0]["layers"]]
    names = [name for layer in layers for name in layer]
    in_map = [re.findall(r"`(\w+)`", first) for first, _ in rows("Package map")]
    assert [name for row in in_map for name in sorted(row)] == names


def test_tests_named_by_the_promises_exist():
    table = rows("Promises and the tests that keep them")
    paths = [path for _, tests in table for path in re.findall(r"`((?:papers/)?tests/.*?)`", tests)]
    assert all("tests/" in tests for _, tests in table)
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_files_named_in_the_documentation_exist():
    paths = {path for page in PAGES for path in re.findall(r"`((?:src|tests|papers|docs)/[\w./-]+)`", page.read_text())}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_links_lead_to_files():
    """`make docs` checks the other links as well: those to headings and to the pages that it generates."""
    texts = {page: re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE) for page in PAGES}
    links = [(page, link) for page, text in texts.items() for link in re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", text)]
    assert len(links) > 100
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_render_as_they_are_written(page):
    """A blank line ends a table, and a cell too many is dropped, both without a warning."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    tables = [block.splitlines() for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)]
    for lines in tables:
        assert re.fullmatch(r"[|:\- ]+", lines[1]), lines[0]
        assert len({re.sub(r"`[^`]*`|\\\|", "", line).count("|") for line in lines}) == 1, lines[0]
    html = markdown.markdown(text, extensions=["tables"])
    assert html.count("<table>") == len(tables)
    assert html.count("<tr>") == sum(len(lines) - 1 for lines in tables)


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_decisions_are_short_and_linked(page):
    assert len(page.read_text().split()) <= 150
    assert f"(decisions/{page.name})" in ARCHITECTURE
