"""Completion: what is offered, and that real shells insert it."""

import fcntl
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from atoll.cli import VERBS, main, parse, parser
from atoll.cli.completion import SCRIPTS, VALUES, candidates
from atoll.registry import registry
from atoll.runs.recipe import full_key, read_recipe, recipes
from support import script_environment


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with two runs, one of them in a folder of runs."""
    for run in ("runs/first", "runs/study/second one", "elsewhere/third"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "recipe.yaml").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "image.png").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


OFFERS = {  # a command line up to the cursor, and all that is offered
    "atoll cer": ["certify"],
    "/usr/bin/atoll cer": ["certify"],
    "ATOLL=1 atoll cer": ["certify"],
    "atoll help cer": ["certify"],
    "atoll --v": ["--version"],
    "atoll nonsense ": [],
    "atoll": [],
    "": [],
    "torch": [],
    "atoll attack ": ["runs/first", "runs/study/second one"],
    "atoll attack runs/": ["runs/first", "runs/study/"],
    "atoll attack e": ["elsewhere/", "empty/"],
    "atoll attack .h": [".hidden/"],
    "atoll attack nowhere/": [],
    "atoll attack 'runs/study/sec": ["runs/study/second one"],
    "atoll explain i": ["image.png"],
    "atoll predict runs/first i": [],  # the shell completes file names
    "atoll attack runs/first --spl": ["--split"],
    "atoll attack runs/first --split v": ["validation"],
    "atoll attack runs/first --split=v": ["--split=validation"],
    "atoll attack runs/first --attacks PGD-2": ["PGD-20"],
    "atoll attack runs/first --attacks FGSM,PGD-2": ["FGSM,PGD-20"],
    "atoll attack runs/first --surrogate runs/f": ["runs/first"],
    "atoll attack --split test r": ["runs/"],
    "atoll attack --adbd r": ["runs/"],
    "atoll certify runs/first --checkpoint l": ["last"],
    "atoll curvature runs/first --loss TRA": ["TRADES"],
    "atoll adopt net.onnx --data Fash": ["FashionMNIST", "FashionMNISTSmall"],
    "atoll audit runs/first --only att": ["attack"],
    "atoll audit runs/first --fail-under rob": ["robust="],
    "atoll train digits-trad": ["digits-trades"],
    "atoll train digits-flat/trades-tr": ["digits-flat/trades-trh"],
    "atoll train digits-at epo": ["epochs="],
    "atoll train digits-at trainer.epo": ["trainer.epochs="],
    "atoll train digits-at loss=TRA": ["loss=TRADES"],
    "atoll train digits-at loss.la": [],
    "atoll train digits-at loss=TRADES loss.la": ["loss.lambda_t="],
    "atoll train mine.yaml batch": ["batch_size="],
    "atoll train digits-at epochs=": [],
    "atoll train digits-at --resum": ["--resume"],
    "atoll train digits-at --out ": [],
    "atoll study rat-ta": ["rat-table"],
    "atoll study --scale s": ["smoke"],
    "atoll ls rec": ["recipes"],
    "atoll ls model VG": ["VGG"],
    "atoll ls models VG": ["VGG"],
    "atoll ls runs el": ["elsewhere/"],
    "atoll ls models VGG ": [],
    "atoll completion f": ["fish"],
    "atoll completion fish ": [],
    "atoll attack 'a\nb": [],
    "atoll attack \0": [],
    "atoll attack \0/x": [],
}


@pytest.mark.parametrize("line", OFFERS, ids=repr)
def test_offers(line, here):
    assert candidates(line) == OFFERS[line]


@pytest.mark.parametrize("verb", VERBS)
def test_all_options_of_all_commands_are_offered(verb):
    options = [option for action in parser(verb)._actions for option in action.option_strings if option[:2] == "--"]
    assert candidates(f"atoll {verb} -") == options
    assert verb in candidates("atoll ")


def test_all_keys_that_are_offered_are_keys():
    for recipe in ("digits-at", "digits-gloro", "digits-flat/trades-trh"):
        tree = read_recipe(recipe)
        for prefix in ("", "trainer.", "optimizer."):
            for key in candidates(f"atoll train {recipe} {prefix}"):
                assert key.endswith(".") or full_key(tree, key.removesuffix("="))


def test_values_are_those_of_options_and_their_names_are_known():
    options = {action.dest for verb in VERBS for action in parser(verb)._actions}
    assert set(VALUES) <= options
    assert set(candidates("atoll curvature x --loss ")) == set(registry("loss").members())
    assert {name.partition("/")[0] for name in candidates("atoll train ")} == set(recipes())
    for checkpoint in candidates("atoll attack x --checkpoint "):
        parse(["attack", "x", "--checkpoint", checkpoint])


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_is_printed(shell, capsys):
    assert main(["completion", shell]) == 0
    assert f"atoll completion {shell}" in capsys.readouterr().out


# --- real shells -----------------------------------------------------------------------------------------------------

SETUP = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source <(atoll completion bash)"),
    "zsh": (["zsh", "-f", "-i"], "autoload -Uz compinit; compinit -u -D; source <(atoll completion zsh)"),
    "fish": (["fish", "--no-config", "-i"], "atoll completion fish | source"),
}
TYPED = {  # what is typed before Tab, and the words of the line after it
    "atoll cer": "certify",
    "atoll train digits-at loss=TRA": "train digits-at loss=TRADES",
    "atoll train digits-at epo": "train digits-at epochs=",
    "atoll attack runs/st": "attack runs/study/",
    "atoll attack x --attacks FGSM,RayS": "attack x --attacks FGSM,RayS",
    "atoll predict runs/first ima": "predict runs/first image.png",
}


class Shell:
    """An interactive shell on a terminal."""

    def __init__(self, shell, folder):
        words, setup = SETUP[shell]
        (folder / "bin").mkdir()
        # Prints its words, and completes in this environment.
        (folder / "bin" / "atoll").write_text(
            f'#!/bin/sh\nif [ "$1" = completion ]; then exec {sys.executable} -m atoll "$@"; fi\necho "typed [$*]"\n'
        )
        (folder / "bin" / "atoll").chmod(0o755)
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        environment = script_environment() | {"PATH": path, "TERM": "dumb", "HOME": str(folder), "PS1": "$ "}
        environment |= {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))}
        self.terminal, other = pty.openpty()
        self.process = subprocess.Popen(
            words, stdin=other, stdout=other, stderr=other, cwd=folder, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # fish needs a controlling terminal
        )  # fmt: skip
        os.close(other)
        self.type(f"{setup}; atoll ready\n")

    def type(self, text):
        """Type a command line, and return the words with which ``atoll`` was called."""
        os.write(self.terminal, text.encode())
        shown, end = "", time.monotonic() + 120
        while not (call := re.search(r"typed \[([^\]]*)\]", shown)):
            ready, _, _ = select.select([self.terminal], [], [], max(end - time.monotonic(), 0))
            assert ready, f"expected an answer, got {shown!r}"
            shown += os.read(self.terminal, 4096).decode(errors="replace")
        return call[1].strip()

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.terminal)


@pytest.mark.parametrize("shell", SETUP)
def test_tab_in_a_real_shell(shell, here):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    terminal = Shell(shell, here)
    try:
        for typed, expected in TYPED.items():
            assert terminal.type(f"{typed}\t\n") == expected
    finally:
        terminal.close()
