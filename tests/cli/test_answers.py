"""JSON answers of all commands, also of errors."""

import json
import shutil

import pytest

from atoll.cli import main, parse
from atoll.cli.answers import SCHEMA, print_json
from atoll.doctor import Diagnosis
from atoll.errors import AtollError, RecipeError
from atoll.runs.run import Run
from proof_cases import Graph


def test_json_has_no_nan(capsys):
    print_json("ls", {"value": [float("nan"), float("inf")]})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["value"] == [None, None]


ANSWERS = {  # a quick use of each command, and the keys of its answer
    "train --dry-run": (["train", "digits-at", "--dry-run"], {"recipe"}),
    "train": (["train", "--resume", "--out", "{run}"], {"run", "selected_on", "test"}),
    "attack": (["attack", "{run}", "--attacks", "none", "--points", "4"], {"results"}),
    "certify": (["certify", "{run}", "--eps", "0.1", "--points", "2", "--no-attack"], {"results"}),
    "curvature": (["curvature", "{run}", "--points", "4", "--top", "0", "--max-probes", "2"], {"results"}),
    "explain": (["explain", "{run}", "--points", "1", "--methods", "SM", "--pool", "0", "--checks", "0"], {"results"}),
    "check": (["check", "{proof}"], {"claims", "proven", "failed", "problems", "precision", "bounds", "subject"}),
    "predict": (["predict", "{run}", "{image}"], {"run", "predictions"}),
    "report": (["report", "{run}", "-o", "{folder}/report.html"], {"report", "bytes", "runs"}),
    "study": (["study"], {"studies"}),
    "ls": (["ls", "losses"], {"losses"}),
    "ls NAME": (["ls", "loss", "TRADES"], {"name", "class_path", "parameters"}),
    "ls runs": (["ls", "runs", "{run}"], {"runs"}),
    "doctor": (["doctor"], {"diagnosis"}),
    "completion": (["completion", "bash"], {"script"}),
    "completion LINE": (["completion", "bash", "atoll cert"], {"candidates"}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_every_command_answers_with_its_name_and_the_schema(name, trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Run, "predict", lambda self, *images, **options: [])
    monkeypatch.setattr("atoll.report.page._plotly", lambda: "")
    diagnosis = Diagnosis({}, {}, {}, "cpu", 1, (), (), (), (), 0.0)
    monkeypatch.setattr("atoll.doctor.diagnose", lambda on_step: diagnosis)
    graph = Graph()
    graph.linear([[1.0, 0.0], [0.0, 0.0]])
    proof = graph.write(tmp_path / "proof", [[0.5, 0.5]], [0], [0.1])
    words, keys = ANSWERS[name]
    run = shutil.copytree(trained, tmp_path / "run")
    words = [word.format(run=run, proof=proof, folder=tmp_path, image="a.png") for word in words]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["command"]) == (SCHEMA, words[0])
    assert answer.keys() == keys | {"schema", "command"}


ERRORS = [  # the words, the command in the answer, the type of the error, the exit code, and a part of the sentence
    (["trian"], "", "UsageError", 2, "did you mean train?"),
    ([], "", "UsageError", 2, "expected a command before --json"),
    (["attack"], "attack", "UsageError", 2, "missing RUN"),
    (["attack", "x", "--points", "y"], "attack", "UsageError", 2, "expected a whole number"),
    (["attack", "x", "--chekpoint", "y"], "attack", "UsageError", 2, "did you mean --checkpoint"),
    (
        ["attack", "nowhere"],
        "attack",
        "CheckpointError",
        1,
        "nowhere is not a run; expected a folder",
    ),
    (["train", "digits-xx"], "train", "RecipeError", 1, "no recipe 'digits-xx'"),
    (["train", "digits-at", "loss=TRDES", "--dry-run"], "train", "RecipeError", 1, "did you mean TRADES"),
    (["train", "digits-at", "--device", "gpu"], "train", "InputError", 1, "device: expected auto, cpu"),
    (["study", "trh-tabel"], "study", "InputError", 1, "did you mean trh-table"),
    (["check", "nothing"], "check", "ProofError", 2, "cannot read the file"),
    (["ls", "modles"], "ls", "InputError", 1, "did you mean models"),
    (["ls", "runs", "nowhere"], "ls", "InputError", 1, "nowhere: no such folder"),
]


@pytest.mark.parametrize(("words", "command", "kind", "code", "sentence"), ERRORS, ids=lambda part: str(part))
def test_errors_are_json_with_the_same_exit_code(words, command, kind, code, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--json"]) == code
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert printed.err == ""
    assert answer.keys() == {"schema", "command", "error"}
    assert (answer["schema"], answer["command"], answer["error"]["type"]) == (SCHEMA, command, kind)
    assert sentence in answer["error"]["message"]
    if words:  # without --json: the same sentence on standard error, and the same code
        assert main(words) == code
        printed = capsys.readouterr()
        assert printed.out == ""
        assert " ".join(answer["error"]["message"].split()) in " ".join(printed.err.split())


@pytest.mark.parametrize(
    ("error", "code", "kind", "message"),
    [
        (KeyboardInterrupt(), 130, "Interrupted", "Interrupted. Rerun the same command to resume."),
        (KeyboardInterrupt("Interrupted at step 3."), 130, "Interrupted", "Interrupted at step 3."),
        (RecipeError("no"), 1, "RecipeError", "no"),
        (AtollError("no"), 1, "AtollError", "no"),
        (OSError(28, "No space left on device", "x"), 1, "OSError", "x: No space left on device; free some space"),
    ],
)
def test_whatever_stops_a_command_is_json(error, code, kind, message, capsys, monkeypatch):
    parse(["attack", "x"])  # imports the command

    def run(options):
        raise error

    monkeypatch.setattr("atoll.cli.attack.run", run)
    assert main(["attack", "x", "--json"]) == code
    answer = json.loads(capsys.readouterr().out)["error"]
    assert answer["type"] == kind
    assert answer["message"].startswith(message)
    assert main(["attack", "x"]) == code
    assert message in " ".join(capsys.readouterr().err.split())


def test_other_processes_print_nothing(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert main(["attack", "nowhere", "--json"]) == 1
    assert "".join(capsys.readouterr()) == ""
