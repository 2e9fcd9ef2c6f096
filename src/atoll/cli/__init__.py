"""The command ``atoll``: one file per verb, errors as one sentence."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from atoll.cli import attack, certify, curvature, explain, export, ls, report, study, train
from atoll.cli.output import error_console
from atoll.distributed import is_main
from atoll.errors import AtollError, TrainingError

VERBS = {
    "train": train,
    "attack": attack,
    "certify": certify,
    "export": export,
    "curvature": curvature,
    "explain": explain,
    "study": study,
    "report": report,
    "ls": ls,
}

DESCRIPTION = """\
Train, attack, certify and explain adversarially robust image classifiers.

  atoll ls                                     what there is: recipes, models, data, attacks, methods
  atoll train digits-at                        train a recipe into runs/digits-at
  atoll train digits-at trainer.epochs=5       ... with another value
  atoll train --resume --out runs/digits-at    go on where a run was stopped or killed
  atoll attack runs/digits-at                  robust accuracy of its best checkpoint
  atoll certify runs/digits-gloro              radii within which predictions provably cannot change
  atoll export runs/digits-gloro -o net.onnx   the same as a file that other programs can run
  atoll curvature runs/digits-at               how flat it is, layer by layer
  atoll explain runs/digits-at                 what it looks at, and whether that is faithful
  atoll study trh-two-moons                    a figure of a paper, and whether its claim held
  atoll report runs/digits-at                  all of that as a page to read
"""


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog="atoll", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = whole.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    for name, module in VERBS.items():
        verb = verbs.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb.add_argument("--json", action="store_true", help="print JSON for machines instead of tables for people")
        verb.add_argument("--debug", action="store_true", help="show the traceback of an error")
        module.arguments(verb)
    return whole


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The words of a command; leaves with argparse's message if they are not understood.

    >>> parse(["train", "digits-at", "--data.root", "here", "trainer.epochs=5"]).overrides
    ['data.root=here', 'trainer.epochs=5']
    """
    whole = parser()
    # Overrides may stand anywhere; argparse would only take them directly behind the recipe.
    options, rest = whole.parse_known_args(_dotted_flags(argv))
    stray = [word for word in rest if not hasattr(options, "overrides") or word.startswith("-") or "=" not in word]
    if stray:
        whole.error(f"unrecognized arguments: {' '.join(stray)}")
    if rest:
        options.overrides += rest
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = parse(sys.argv[1:] if argv is None else argv)
    try:
        code: int = VERBS[options.verb].run(options)
        return code
    except AtollError as error:
        if options.debug:
            raise
        # Under torchrun all processes find the same fault in a recipe; a broken run may show in any of them.
        if is_main() or isinstance(error, TrainingError):
            error_console.print(f"atoll {options.verb}: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `atoll ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dotted_flags(argv: Sequence[str]) -> list[str]:
    """``--data.root DIR`` and ``--data.root=DIR`` mean the override ``data.root=DIR``."""
    words, result = iter(argv), []
    for word in words:
        if word.startswith("--") and "." in word.partition("=")[0]:
            key, equals, value = word[2:].partition("=")
            result.append(f"{key}={value if equals else next(words, '')}")
        else:
            result.append(word)
    return result
