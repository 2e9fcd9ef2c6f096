"""Pages that are generated when the site is built (mkdocs.yml), and formulas as MathML.

These are README.md, CONTRIBUTING.md and CHANGELOG.md as pages, the tutorials of docs/notebooks, the reference of every
package and module of ``atoll``, the help of every command, and the gallery of docs/results.  Errors are logged as
warnings, so ``mkdocs build --strict`` fails.
"""

from __future__ import annotations

import contextlib
import html
import io
import json
import logging
import os
import re
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
# Files that are pages of the site under another name.
BORROWED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "extend.md",
    "CHANGELOG.md": "changelog.md",
    "CITATION.cff": "CITATION.cff",
    **{f"docs/notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in NOTEBOOKS},
}
log = logging.getLogger("mkdocs.hooks.atoll")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List all results and decisions in the menu."""
    menus = {
        "Results": ["results/index.md", *pages_in("results")],
        "Decisions": pages_in("decisions"),
    }
    top = [entry for entry in config.nav or [] if isinstance(entry, dict)]
    for entry in [*top, *(child for parent in top for child in parent.get("Background", []))]:
        entry.update({title: pages for title, pages in menus.items() if title in entry})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {"results/index.md": gallery(), "commands.md": commands(), **reference()}
    for source, page in BORROWED.items():
        text = (ROOT / source).read_text()
        pages[page] = notebook_page(text, Path(source).name) if source.endswith(".ipynb") else text
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links to files of the repository into links to their pages."""
    sources = {name: source for source, name in BORROWED.items()}
    name = page.file.src_uri
    here = (ROOT / sources.get(name, f"docs/{name}")).parent

    def linked(match: re.Match[str]) -> str:
        target = os.path.relpath(here / match[1], ROOT)
        target = BORROWED.get(target, target.removeprefix("docs/"))
        return f"]({os.path.relpath(target, Path(name).parent)}"

    return re.sub(r"\]\((?!\w+:|#)([^)#\s]+)", linked, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Convert formulas to MathML, and link names of the library to the reference."""
    content = re.sub(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', _mathml, content, flags=re.DOTALL)
    return re.sub(r"<code>([\w.]+)</code>(?!</a>|</autoref>)", _linked, content)


def _mathml(match: re.Match[str]) -> str:
    return convert(html.unescape(match[2]), display="block" if match[1] == "div" else "inline")


def _linked(match: re.Match[str]) -> str:
    path = public_names().get(match[1])
    return f'<autoref identifier="{path}">{match[0]}</autoref>' if path else match[0]


def notebook_page(text: str, name: str) -> str:
    r"""A notebook as Markdown, with a link to the file behind its title.

    >>> markdown = {"cell_type": "markdown", "source": ["# Title\n", "\n", "Text"]}
    >>> code = {"cell_type": "code", "source": "1 + 1"}
    >>> print(notebook_page(json.dumps({"cells": [markdown, code]}), "tutorial.ipynb"))
    # Title
    <BLANKLINE>
    <a href="tutorial.ipynb" download>Download this notebook</a>
    <BLANKLINE>
    Text
    <BLANKLINE>
    ```python
    1 + 1
    ```
    """
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    title, _, rest = "\n\n".join(parts).partition("\n\n")
    return f'{title}\n\n<a href="{name}" download>Download this notebook</a>\n\n{rest}'


class Docstrings(griffe.Extension):
    """Converts docstrings to Markdown before griffe looks for sections in them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(docstring: str) -> str:
    r"""The reST of a docstring as Markdown: formulas, doctests, literal blocks.

    >>> markdown("A :math:`x_i`:\n\n.. math:: a\n    + b\n\n>>> 1\n1").split("\n\n")
    ['A \\(x_i\\):', '\\[a + b\\]', '```pycon\n>>> 1\n1\n```']
    >>> print(markdown("As in::\n\n    a\n      b\n\nNo more."))
    As in:
    <BLANKLINE>
    ```text
    a
      b
    ```
    <BLANKLINE>
    No more.
    """

    def one_line(text: str) -> str:
        return " ".join(text.split())

    text = re.sub(r"^\.\. math::(.*(?:\n +\S.*)*)", lambda m: rf"\[{one_line(m[1])}\]", docstring, flags=re.M)
    text = re.sub(r":math:`([^`]*)`", lambda m: rf"\({one_line(m[1])}\)", text)
    text = re.sub(r"^(>>> .*(?:\n.+)*)", r"```pycon\n\1\n```", text, flags=re.M)
    return re.sub(r"::\n\n((?: +\S.*\n?)+)", lambda m: f":\n\n```text\n{dedent(m[1]).rstrip()}\n```\n", text)


@cache
def library() -> griffe.Module:
    """All of ``atoll``, parsed without importing it."""
    package = griffe.load("atoll", search_paths=[ROOT / "src"])
    assert isinstance(package, griffe.Module)
    return package


@cache
def public_names() -> dict[str, str]:
    """Identifiers in the reference by name: full names, and short names of classes that packages export."""
    names = {}
    for module in modules(library()):
        for name in module.exports or []:
            path = f"{module.path}.{name}"
            names[path] = path
            if str(name)[0].isupper() and module is not library():
                names.setdefault(str(name), path)
    return names


def modules(parent: griffe.Module) -> list[griffe.Module]:
    """A module and all its submodules."""
    return [parent, *(below for child in parent.modules.values() for below in modules(child))]


def reference() -> dict[str, str]:
    """A page for every package and module of ``atoll``, and an index."""
    intro = "The package `atoll` itself also exports the names that are used most."
    pages, index = {}, ["# Reference", "", intro, ""]
    for module in modules(library()):
        if not module.docstring:
            log.warning("%s has no docstring", module.path)
    for name, module in sorted(library().modules.items()):
        if name not in ("__main__", "cli"):  # commands.md shows the help of the commands
            pages[f"api/{name}.md"] = "\n".join([f"# atoll.{name}", "", *described(module)])
            index.append(f"- [`atoll.{name}`]({name}.md): {first_sentence(module)}")
    return pages | {"api/index.md": "\n".join(index)}


def first_sentence(module: griffe.Module) -> str:
    text = module.docstring.value if module.docstring else ""
    return " ".join(markdown(text).partition("\n\n")[0].split())


def described(module: griffe.Module) -> list[str]:
    """Directives for the names that a module exports, then for the other names of its submodules."""
    exports = [str(name) for name in module.exports or []]
    shown = {module[name].canonical_path for name in exports if name in module.members}
    lines = directive(module, exports or own(module, set()), "show_root_heading: false", "show_root_toc_entry: false")
    for child in sorted(module.modules.values(), key=lambda child: (not child.modules, child.name)):
        rest = own(child, shown)
        if child.modules:
            lines += [f"## {child.path}", "", *described(child)]
        elif rest:
            lines += directive(child, rest, "show_root_full_path: true")
    return lines


def directive(module: griffe.Module, members: list[str], *options: str) -> list[str]:
    """The mkdocstrings directive that shows some members of a module."""
    return [f"::: {module.path}", "    options:", *(f"      {o}" for o in (*options, f"members: {members}")), ""]


def own(module: griffe.Module, shown: set[str]) -> list[str]:
    """Public names that a module defines, without those in ``shown``."""
    return [
        name
        for name, member in module.members.items()
        if not (member.is_alias or member.is_module or name[0] == "_") and member.docstring and member.path not in shown
    ]


def commands() -> str:
    """The help of ``atoll`` and of each of its commands."""
    from atoll.cli import VERBS, main

    os.environ["COLUMNS"] = "100"
    lines = ["# Command line", ""]
    for words in ([], *([verb] for verb in VERBS)):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*words, "--help"])
        lines += [f"## {' '.join(['atoll', *words])}", "", "```text", printed.getvalue().rstrip(), "```", ""]
    return "\n".join(lines)


def pages_in(folder: str) -> list[str]:
    return [f"{folder}/{path.name}" for path in sorted((DOCS / folder).glob("*.md"))]


def gallery() -> str:
    """Title, first picture and outcomes of every result."""
    lines = ["# Results", "", "Each page lists the commands that produce it and the outcome of every claim.", ""]
    for path in sorted((DOCS / "results").glob("*.md")):
        text = path.read_text()
        title = re.search(r"^# (.*)", text, re.M)
        picture = re.search(r"^!\[.*?\]\(.*?\)", text, re.M)
        lines += [f"## [{title[1] if title else path.stem}]({path.name})", ""]
        lines += [f"[{picture[0]}]({path.name})", ""] if picture else []
        lines += [f"- {outcome}" for outcome in outcomes(text)] + [""]
    return "\n".join(lines)


def outcomes(text: str) -> list[str]:
    """Paragraphs and list items that state the outcome of a claim or have bold text.

    >>> outcomes("# Title\\n\\nThe claim is supported.\\n\\n| **1** |\\n\\n- **More** of\\n  it\\n- no more")
    ['The claim is supported.', '**More** of it']
    """
    blocks = [" ".join(block.split()) for block in re.split(r"\n\s*\n|^- ", text, flags=re.M)]
    pattern = re.compile(r"(?![|#!]).*(\bsupported\b|\bcontradicted\b|\*\*)")
    return [block for block in blocks if pattern.match(block)]
