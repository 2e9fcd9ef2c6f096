"""``atoll curvature`` as a user runs it."""

import json

import numpy as np
import pytest

from atoll.cli import main


def test_prints_a_table_and_keeps_numbers_and_pictures(trained, capsys):
    words = ["curvature", str(trained), "--points", "40", "--top", "1", "--landscape", "input", "--gap"]
    assert main(words) == 0
    table = capsys.readouterr().out
    for word in ("head.weight", "WCI", "largest eigenvalues", "PAC-Bayes", "no proof", "robust gap"):
        assert word in table
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads((trained / "curvature" / "curvature.json").read_text()) == found
    assert found["wci"]["value"] <= found["bound"] * (1 + 1e-9)
    assert found["traces"]["estimator"] == "gauss_newton"
    for name in ("layers.png", "landscape-input.png"):
        assert (trained / "curvature" / name).read_bytes()[:4] == b"\x89PNG"
    assert np.load(trained / "curvature" / "landscape-input.npz").files


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--points", "0"], "expected at least 1"),
        (["--loss", "Magic"], "--loss: expected one of"),
        (["--checkpoint", "worst"], "--checkpoint: expected best, last or a step"),
        (["--max-probes", "1"], "max_probes: expected"),
    ],
)
def test_nonsense_is_one_sentence(trained, capsys, words, sentence):
    assert main(["curvature", str(trained), *words]) == 1
    assert sentence in " ".join(capsys.readouterr().err.split())
