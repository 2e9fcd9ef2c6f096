"""The glossary: the documentation prints it, the page explains with it, and nothing technical is left out."""

import re
from pathlib import Path

import pytest

from atoll.registry import class_path, registry
from atoll.report import read_runs, render
from atoll.report.blocks import Collapsible, Columns, Gallery, Plot, TableBlock, TableCell, Title
from atoll.report.glossary import GLOSSARY, MEANINGS, UNMARKED, find_terms
from atoll.report.page import summarize
from atoll.report.sections import all_sections
from report_cases import Page

STYLE = (Path(__file__).parents[2] / "docs/style.md").read_text()
# Headings of the page in everyday language: everybody knows what these are, or the text below explains them.
PLAIN = {
    "", "Training", "layer", "weight matrix", "mean loss", "cost relative to a prediction", "norm of the weights",
    "reason for the estimator",
    "Accuracy under attack", "Before and after the attack", "Perturbations", "Curvature by layer",
    "Loss over the weights, along two random directions", "root of the sum of traces",
}  # fmt: skip


def test_the_documentation_prints_the_glossary():
    text = STYLE.partition("## Glossary")[2]
    printed = {}
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        rows = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)
        printed[section.partition("\n")[0]] = dict(rows[2:])  # without the heading and the line below it
    assert printed == GLOSSARY


def test_terms_are_whole_words_the_longest_first():
    assert find_terms("Robust accuracy at l2 (PGD-20)") == [
        ("Robust accuracy", "robust accuracy"), (" at ", ""), ("l2", "l2"), (" (", ""), ("PGD", "PGD"), ("-20)", ""),
    ]  # fmt: skip
    assert find_terms("RATE, SMALL, bigger, a run") == [("RATE, SMALL, bigger, a run", "")]
    assert find_terms("Hessian traces and the Hessian") == [
        ("Hessian traces", "Hessian trace"), (" and the ", ""), ("Hessian", "Hessian")
    ]  # fmt: skip
    for term in MEANINGS.keys() - set(UNMARKED):
        assert find_terms(term) == [(term, term)]


@pytest.mark.parametrize("kind", ["loss", "method"])
def test_everything_that_a_run_can_be_named_after_is_explained(kind):
    names = {member.cls.__name__ for member in registry(kind).members().values() if is_own(member.cls)}
    assert {name for name in names if not name.startswith("Measure")} <= MEANINGS.keys()


def is_own(cls):
    return class_path(cls).startswith("atoll.")


def headings(blocks):
    """Titles, captions, names of rows and of the first columns."""
    for block in blocks:
        if isinstance(block, Title | Plot | Gallery):
            yield block.text if isinstance(block, Title) else block.title
        elif isinstance(block, TableBlock):
            for cell in (block.columns[0], *(row[0] for row in block.rows)):
                yield cell.text if isinstance(cell, TableCell) else cell
        elif isinstance(block, Collapsible | Columns):
            yield from headings(block.blocks)


def test_every_technical_heading_of_a_page_has_a_term_that_is_explained(measured):
    runs = read_runs([measured / "standard", measured / "robust", measured / "certified"])
    own = ("recipe", "reproduce", "evidence")  # the evidence explains each of its rows itself
    sections = [section for section in all_sections(runs) if section.id not in own]
    names = {run.name for run in runs} | {f"{run.name}, from above" for run in runs}
    texts = set(headings(summarize(runs))) | {text for section in sections for text in headings(section.blocks)}
    weights = {text for text in texts if re.fullmatch(r"(body|head)\.[\w.]+", text)}
    unexplained = {t for t in texts - names - weights - PLAIN if not any(term for _, term in find_terms(t))}
    assert {text for text in unexplained if not text.startswith("Training loss: ")} == set()
    assert texts >= PLAIN  # nothing is excused that is not there


def test_a_term_is_marked_once_in_a_block_and_explained_once_on_the_page(measured):
    html = render(read_runs([measured / "robust", measured / "certified"]))
    buttons = re.findall(r'<button type="button" class="term" popovertarget="([\w-]+)" title="([^"]*)">', html)
    meanings = dict(re.findall(r'<div popover id="([\w-]+)" class="meaning"><p><strong>.*?</strong>: (.*?)</p>', html))
    assert dict(buttons) == meanings
    assert len(re.findall(r"<div popover", html)) == len(meanings) > 20
    table = next(part for part in html.split("<table>")[1:] if "Robust accuracy" in part).partition("</table>")[0]
    assert table.count('title="share of points that stay correct under attack') == 1
    assert "infidelity" in Page(html).text
