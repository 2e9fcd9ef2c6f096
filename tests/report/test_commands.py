"""The commands of the page repeat what was measured."""

import json
import shlex
import shutil

import pytest

from atoll.cli import main, parse
from atoll.cli.measure import settings_from
from atoll.measure import load_result
from atoll.report import read_runs
from atoll.report.blocks import Code
from atoll.report.commands import repeat
from atoll.report.sections import reproduce
from report_cases import copy_result, result_file
from support import change

VARIATIONS = [
    ("attack", {"individual": True, "surrogate": "runs/other one", "seed": 3, "split": "train", "adbd": True}),
    ("certify", {"attack": False, "eta": 0.25, "reject": ("noise", "Digits"), "smooth": None, "budget": 1e9}),
    ("curvature", {"loss": "Standard()", "density": False, "landscape": None, "points": 7, "max_probes": 5}),
    ("explain", {"methods": ("IG",), "norm": "linf", "budget": None, "checks": 0, "sigma": 0.05}),
]


@pytest.mark.parametrize(("kind", "settings"), [(kind, {}) for kind, _ in VARIATIONS] + VARIATIONS)
def test_the_flags_of_a_command_are_the_settings_of_the_result(robust, kind, settings):
    result = copy_result(result_file(robust, kind), "varied", settings, origin={"weights": "swa", "step": 12})
    line = repeat(robust, result)
    options = parse(shlex.split(line)[1:])
    assert settings_from(options, type(result.settings)) == result.settings
    assert (options.checkpoint, options.weights, options.runs) == ("12", "swa", [robust])


def test_the_commands_of_the_page_make_the_same_results(robust):
    """Typed again, the command of an attack finds the same numbers; that of the training is valid."""
    change(robust / "environment.json", command=["bin/atoll", "train", "digits-at", "loss=TRADES"])
    (code,) = (block for block in reproduce.section(read_runs([robust])).blocks if isinstance(block, Code))
    assert code.lines[0] == "atoll train digits-at loss=TRADES"
    commands = [shlex.split(line)[1:] for line in code.lines]
    assert {command[0] for command in commands} == {"train", "attack", "certify", "curvature", "explain"}
    path = result_file(robust, "attack")
    before = load_result(path.parent)
    shutil.rmtree(path.parent)
    (command,) = [command for command in commands if "FGSM,PGD-3" in command]
    assert main(command) == 0
    after = load_result(path.parent)  # under the same digest
    assert (after.robust, after.settings, after.subject) == (before.robust, before.settings, before.subject)
    assert main([*commands[0], "--dry-run"]) == 0


def test_all_points_are_a_number_on_the_command_line(robust):
    path = result_file(robust, "curvature")
    tree = json.loads(path.read_text())
    change(path, settings=tree["settings"] | {"points": None})
    assert "--points 16" in repeat(robust, load_result(path.parent))
