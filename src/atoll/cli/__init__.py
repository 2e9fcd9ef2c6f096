"""The command ``atoll``: one file per verb, errors as one sentence."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from atoll.errors import AtollError, TrainingError
from atoll.registry import forget_foreign_folders

# One module each, imported when its verb is used: PyTorch takes seconds to import, and `atoll --help` does without.
VERBS = {
    "train": "train a recipe",
    "attack": "measure robust accuracy",
    "certify": "prove robustness",
    "check": "check proof files of certify, independently",
    "export": "write a model as an ONNX file",
    "curvature": "measure flatness, layer by layer",
    "explain": "show what models look at, and whether that is faithful",
    "study": "reproduce a table or figure of a paper",
    "report": "write one page about one or several runs",
    "ls": "list recipes, components and runs",
}

# Commands that store their progress; `train` says itself how to resume.
RESUMABLE = ("attack", "certify", "curvature", "explain", "study")

DESCRIPTION = """\
Train, attack, certify and explain adversarially robust image classifiers.

  atoll ls                                     list recipes, models, data sets, attacks, methods
  atoll ls runs                                list runs with their main numbers
  atoll train digits-at                        train a recipe into runs/digits-at
  atoll train digits-at trainer.epochs=5       the same with another value
  atoll train --resume --out runs/digits-at    resume a run that was stopped or killed
  atoll attack runs/digits-at                  measure robust accuracy of the best checkpoint
  atoll certify runs/digits-gloro              prove radii within which predictions cannot change
  atoll check proof.safetensors                prove the certificates of a file again, independently
  atoll export runs/digits-at -o net.onnx      write the model for other programs
  atoll curvature runs/digits-at               measure flatness, layer by layer
  atoll explain runs/digits-at                 show what the model looks at
  atoll study trh-two-moons                    reproduce a figure of a paper and check its claim
  atoll report runs/digits-at                  write one page with all results
"""


def parser(verb: str | None = None) -> argparse.ArgumentParser:
    """The parser of the command; only the named verb knows its options, because the others are not imported."""
    layout = argparse.RawDescriptionHelpFormatter
    base = argparse.ArgumentParser(prog="atoll", description=DESCRIPTION, formatter_class=layout)
    verbs = base.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    for name, text in VERBS.items():
        module = importlib.import_module(f"atoll.cli.{name}") if name == verb else None
        sub = verbs.add_parser(name, help=text, description=module.__doc__ if module else None, formatter_class=layout)
        sub.add_argument("--json", action="store_true", help="print JSON for machines instead of tables for people")
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if module:
            module.arguments(sub)
    return base


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; exits with argparse's message if it is wrong.

    >>> parse(["train", "digits-at", "--data.root", "here", "trainer.epochs=5"]).overrides
    ['data.root=here', 'trainer.epochs=5']
    """
    verb = next((word for word in argv if word in VERBS), None)
    full = parser(verb)
    # Overrides may stand anywhere; argparse would only take them directly after the recipe.
    options, rest = full.parse_known_args(_dotted_flags(argv) if verb in ("train", "study") else argv)
    stray = [word for word in rest if not hasattr(options, "overrides") or word.startswith("-") or "=" not in word]
    if stray:
        full.error(f"unrecognized arguments: {' '.join(stray)}")
    if rest:
        options.overrides += rest
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if argv is None:  # this process is the command: nothing in the current folder may pass for an installed package
        forget_foreign_folders()
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        code: int | None = importlib.import_module(f"atoll.cli.{options.verb}").run(options)
        return code or 0
    except AtollError as error:
        if options.debug:
            raise
        from atoll.cli.output import error_console
        from atoll.distributed import is_main

        # Under torchrun all processes find the same fault in a recipe; a broken run may show in any of them.
        if is_main() or isinstance(error, TrainingError):
            error_console.print(f"atoll {options.verb}: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt as interrupt:
        if int(os.environ.get("RANK", "0")) == 0:
            rerun = " Rerun the same command to resume." if options.verb in RESUMABLE else ""
            sys.stderr.write(f"{interrupt or f'Interrupted.{rerun}'}\n")
        return 130
    except BrokenPipeError:  # `atoll ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dotted_flags(argv: Sequence[str]) -> list[str]:
    """``--data.root DIR`` and ``--data.root=DIR`` mean the override ``data.root=DIR``."""
    words, result = list(argv), []
    while words:
        word = words.pop(0)
        if word.startswith("--") and "." in word.partition("=")[0]:
            key, equals, value = word[2:].partition("=")
            if not equals and words and not words[0].startswith("--"):  # otherwise the value was forgotten
                value = words.pop(0)
            result.append(f"{key}={value}")
        else:
            result.append(word)
    return result
