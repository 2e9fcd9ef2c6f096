"""``atoll check`` as a user runs it."""

import json
import subprocess
import sys

import numpy as np

from atoll.cli import main
from proof_cases import Graph


def plane(path, radius):
    """A linear classifier whose plane is at distance 0.5 from the input."""
    graph = Graph()
    graph.linear(np.array([[1.0, 0.0], [0.0, 0.0]]))
    return graph.write(path, [[0.5, 0.5]] * len(radius), [0] * len(radius), radius)


def test_proven_claims(tmp_path, capsys):
    path = plane(tmp_path / "f", [0.49, 0.1])
    assert main(["check", str(path)]) == 0
    out = capsys.readouterr().out
    assert "2 claims (l2) about all inputs, computed in float64" in out
    assert "the checker covers add, cat, convolution, div, linear," in out
    assert "proven: 2 of 2 claims" in out
    assert main(["check", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["claims"], printed["proven"], printed["failed"], printed["problems"]) == (2, 2, [], [])


def test_claims_that_are_not_proven(tmp_path, capsys):
    assert main(["check", str(plane(tmp_path / "f", [0.1, 0.51]))]) == 1
    out = capsys.readouterr().out
    assert "proven: 1 of 2 claims" in out
    assert "not proven: claims 1" in out


def test_operations_that_are_not_covered(tmp_path, capsys):
    graph = Graph()
    graph.call("sigmoid.default", self=graph.last)
    assert main(["check", str(graph.write(tmp_path / "f", [[0.5, 0.1]], [0], [0.0]))]) == 1
    assert "reason: aten.sigmoid.default is not supported (net.py, line 1)" in capsys.readouterr().out


def test_damaged_files(tmp_path, capsys):
    path = plane(tmp_path / "f", [0.1])
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert main(["check", str(path)]) == 2
    assert "the digest does not match: the file is damaged or was altered" in capsys.readouterr().err
    assert main(["check", str(tmp_path / "nothing")]) == 2
    assert "cannot read the file: No such file or directory" in capsys.readouterr().err


def test_it_does_not_import_torch(tmp_path):
    path = plane(tmp_path / "f", [0.1])
    code = "import sys; from atoll.cli import main; sys.exit(main(sys.argv[1:]) or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, "check", str(path)], check=False).returncode == 0


def test_certify_writes_files_that_check_proves(gloro_run, tmp_path, capsys):
    for precision in ("float64", "float32"):
        file = tmp_path / "proof.safetensors"
        words = [
            "certify",
            str(gloro_run.folder),
            "--no-attack",
            "--points",
            "50",
            "--eps",
            "0.3",
            "--precision",
            precision,
        ]
        assert main([*words, "--proof", str(file)]) == 0
        printed = capsys.readouterr()
        assert "claims of 50 points" in " ".join(printed.err.split())
        assert main(["check", str(file), "--json"]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert summary["proven"] == summary["claims"] > 10
        assert summary["precision"] == precision


def test_wrong_uses_of_proof_are_refused(gloro_run, tmp_path, capsys):
    file, folder = str(tmp_path / "f"), str(gloro_run.folder)
    assert main(["certify", folder, folder, "--no-attack", "--points", "2", "--proof", file]) == 1
    assert "--proof: expected one run, got 2" in " ".join(capsys.readouterr().err.split())
    words = ["--smooth", "0.1", "--samples", "10", "--points", "1"]
    assert main(["certify", folder, *words, "--proof", file]) == 1
    assert "not one of randomized smoothing" in " ".join(capsys.readouterr().err.split())
