"""The documentation builds as a site and works in a browser without a network."""

import http.server
import os
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (
    "index", "guides/attack", "api/curvature", "api/certify", "api/measure", "results/index", "commands", "errata",
    "extend", "architecture", "decisions/identity", "notebooks/train-and-attack",
)  # fmt: skip


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Builds and serves the site; mkdocs checks links and references, docs/hooks.py checks docstrings."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.slow  # `make docs` builds the site as well, and tests/test_documents.py checks code, commands and links
def test_the_site_works(address, browser):  # one test, so that the site is built once
    messages, requests = [], []
    for scheme, background in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(30, 33, 41)")):
        context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
        context.set_default_timeout(180_000)  # milliseconds; pages load slowly on a busy machine
        page = context.new_page()
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        for name in PAGES:
            page.goto(f"{address}{name}.html")
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == background
            assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is too wide"
    assert messages == []
    assert [url for url in requests if not url.startswith((address, "data:", "blob:"))] == []

    page.goto(f"{address}api/curvature.html")
    formulas = "[...document.querySelectorAll('math')].map(formula => formula.getBoundingClientRect().height)"
    assert min(page.evaluate(formulas)) > 5
    assert page.locator("math merror").count() == 0
    assert not re.search(r"\\[(\[]|:math:|\.\. math", page.inner_text("article"))
    page.goto(f"{address}index.html")
    page.click("article a:has(code:text-is('TRADES')) >> nth=0")  # names lead to the reference
    page.wait_for_url("**/api/losses.html#atoll.losses.TRADES")

    page.goto(f"{address}results/index.html")
    results = sorted(path.stem for path in (ROOT / "docs/results").glob("*.md"))
    assert page.locator("article h2").count() == len(results) > 0
    page.fill("[data-md-component=search-query]", "randomized smoothing")
    page.wait_for_selector(".md-search-result__item")
