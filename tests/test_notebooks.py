"""The tutorial notebooks run from top to bottom."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
SMALLER = "EPOCHS, IMAGES, POINTS = 1, 128, 10"  # instead of the parameters that readers see


def read(path):
    notebook = nbformat.read(path, as_version=4)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    return notebook, parameters


@pytest.mark.slow  # most of the time goes to starting a kernel and importing PyTorch
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path):
    notebook, parameters = read(path)
    parameters.source += f"\n{SMALLER}"
    client = NotebookClient(notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []  # no warnings
    shown = [output.data for output in outputs if "data" in output]
    assert any("image/png" in data for data in shown)
    assert any("<table>" in data.get("text/html", "") for data in shown)
    bars = [data["text/html"] for data in shown if "━" in data.get("text/html", "")]
    assert any("2/2" in bar for bar in bars)  # 128 images are two steps


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path):
    notebook, parameters = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert set(re.findall(r"^([A-Z]+) = ", parameters.source, re.M)) == set(re.findall(r"[A-Z]+", SMALLER))
    assert len(notebook.cells) <= 30
    assert notebook.cells[0].source.startswith("# ")


def test_links_lead_to_files():
    links = [
        (path, target)
        for path in NOTEBOOKS
        for cell in read(path)[0].cells
        if cell.cell_type == "markdown"
        for target in re.findall(r"\]\(([^)#]+)", cell.source)
    ]
    assert len(links) > 5
    assert [target for path, target in links if not (path.parent / target).exists()] == []


def test_every_notebook_is_in_the_menu_and_the_readme():
    for path in NOTEBOOKS:
        assert f"notebooks/{path.stem}.md" in (ROOT / "mkdocs.yml").read_text()
        assert f"docs/notebooks/{path.name}" in (ROOT / "README.md").read_text()
