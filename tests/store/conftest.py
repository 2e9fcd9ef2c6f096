"""Small runs of every kind, made once; tests copy them."""

import pytest

from store_cases import make_runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module", autouse=True)
def _no_plotly():
    """Pages without plotly.js, which is most of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plotly.offline.get_plotlyjs", lambda: "0")
        yield
