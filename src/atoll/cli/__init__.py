"""The command ``atoll``: one file per verb, errors as one sentence."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from atoll.cli.answers import print_error
from atoll.errors import AtollError, TrainingError, describe
from atoll.import_path import forget_foreign_folders
from atoll.registry import closest, suggest


class Verb(NamedTuple):
    """The arguments of a command and what it does, for the help."""

    usage: str
    summary: str


# One module each, imported when its verb is used: PyTorch takes seconds to import, and `atoll --help` does without.
VERBS = {
    "train": Verb("RECIPE [KEY=VALUE ...] [options]", "train a model as a recipe describes"),
    "attack": Verb("RUN [RUN ...] [options]", "measure robust accuracy"),
    "certify": Verb("RUN [RUN ...] [options]", "certify predictions and measure verified accuracy"),
    "check": Verb("FILE [options]", "check a proof file independently of the certifier"),
    "export": Verb("RUN -o FILE [options]", "write a model to an ONNX file"),
    "predict": Verb("RUN IMAGE [IMAGE ...] [options]", "classify image files"),
    "adopt": Verb("MODEL --data DATA --out RUN [options]", "turn a model from elsewhere into a run"),
    "health": Verb("RUN [RUN ...] [options]", "check data and model for defects"),
    "audit": Verb("RUN [options]", "measure everything in a given time and write one page"),
    "curvature": Verb("RUN [RUN ...] [options]", "measure how flat the loss is, layer by layer"),
    "explain": Verb("RUN [RUN ...] [IMAGE ...] [options]", "compute attributions and measure how faithful they are"),
    "study": Verb("[NAME] [KEY=VALUE ...] [options]", "reproduce a table or figure of a paper"),
    "report": Verb("RUN [RUN ...] [options]", "write an HTML report of one or more runs"),
    "ls": Verb("[KIND] [NAME] [options]", "list recipes, components and runs"),
    "doctor": Verb("[options]", "examine this machine: devices, precisions, agreement with the CPU, speed"),
    "completion": Verb("SHELL", "print a script for completion with Tab in bash, zsh or fish"),
}

# Commands that store their progress; `train` says itself how to resume.
RESUMABLE = ("attack", "certify", "curvature", "explain", "study", "audit")

HELP = f"""\
usage: atoll COMMAND [options]

Train, attack, certify and explain adversarially robust image classifiers.

Commands:
{chr(10).join(f"  {name:<12}{verb.summary}" for name, verb in VERBS.items())}

Options:
  -h, --help  show this help and exit
  --version   show the version of Atoll and exit

Examples:
  atoll ls                                     list recipes, models, data sets, attacks and methods
  atoll train digits-at                        train a recipe into runs/digits-at
  atoll train digits-at epochs=5 lr=0.1        change values of the recipe
  atoll train --resume --out runs/digits-at    resume a run that was stopped or killed
  atoll attack runs/digits-at                  measure the robust accuracy of the best checkpoint
  atoll certify runs/digits-gloro              prove radii within which predictions cannot change
  atoll predict runs/digits-at photos/         classify all images in a folder
  atoll report runs/digits-at                  write a report with all results
  atoll ls runs                                list all runs with their main numbers

Run `atoll COMMAND --help` for the options of a command.
"""


class UsageError(AtollError):
    """The command line is wrong; the exit code is 2."""


class _Parser(argparse.ArgumentParser):
    """Raises a UsageError with one sentence instead of printing all options and exiting."""

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace("expected one argument", "expected a value")
        message = message.replace("the following arguments are required:", "missing")
        raise UsageError(message if message.endswith("?") else f"{message}; see `{self.prog} --help`")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(action, f"got {value!r}{suggest(str(value), known)}")


def parser(verb: str) -> argparse.ArgumentParser:
    """The parser of a command; it imports the command."""
    module = importlib.import_module(f"atoll.cli.{verb}")
    sub = _Parser(
        prog=f"atoll {verb}",
        usage=f"atoll {verb} {VERBS[verb].usage}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # otherwise a new option breaks scripts that abbreviate another
    )
    module.arguments(sub)
    output = sub.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON instead of tables, also for errors")
    output.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return sub


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; a UsageError says what is wrong with it.

    >>> parse(["train", "digits-at", "--data.root", "here", "epochs=5"]).overrides
    ['data.root=here', 'epochs=5']
    """
    verb, *words = _find_verb(argv)
    sub = parser(verb)
    for word in words:
        if word.startswith("--") and word.endswith("=--"):  # argparse would take it for no value at all
            sub.error(f"{word[:-3]}: expected a value, got '--'")
    # Overrides may stand anywhere; argparse would only take them directly after the recipe.
    options, rest = sub.parse_known_args(_dotted_flags(words) if verb in ("train", "study") else words)
    for word in rest:
        if word.startswith("-"):
            _refuse_option(sub, word, takes_overrides=hasattr(options, "overrides"))
        if not hasattr(options, "overrides") or "=" not in word:
            sub.error(f"unexpected argument {word!r}")
    if rest:
        options.overrides += rest
    options.verb = verb
    return options


def _find_verb(argv: Sequence[str]) -> list[str]:
    """The command and its arguments; help and version are answered here."""
    words = ["--help"] if list(argv) == ["help"] else list(argv)
    if words[:1] == ["help"]:
        words = [words[1], "--help"]
    first = words[0] if words else ""
    if first in ("-h", "--help"):
        sys.stdout.write(HELP)
        raise SystemExit(0)
    if first == "--version":
        from importlib.metadata import version

        sys.stdout.write(f"atoll {version('atoll')}\n")
        raise SystemExit(0)
    if not first:
        raise UsageError("expected a command; `atoll --help` lists them")
    if first.startswith("-"):
        verb = next((word for word in words if word in VERBS), "COMMAND")
        raise UsageError(f"expected a command before {first}, as in `atoll {verb} {first}`; see `atoll --help`")
    if first not in VERBS:
        raise UsageError(f"unknown command {first!r}{suggest(first, VERBS)}")
    return words


def _refuse_option(sub: argparse.ArgumentParser, word: str, takes_overrides: bool) -> NoReturn:
    """Say that there is no such option, and what may have been meant."""
    option = word.partition("=")[0]
    known = {name.lstrip("-"): name for name in sub._option_string_actions}
    if close := closest(option.lstrip("-"), known):
        sub.error(f"unknown option {option}; did you mean {' or '.join(known[name] for name in close)}?")
    more = f"; to change the recipe, write {option.lstrip('-')}=VALUE" if takes_overrides else ""
    sub.error(f"unknown option {option}{more}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if argv is None:  # this process is the command: nothing in the current folder may pass for an installed package
        forget_foreign_folders()
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before PyTorch: idle threads sleep instead of spinning
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        sys.stderr.write(HELP)
        return 2
    try:
        options = parse(words)
    except UsageError as error:
        command = words[0] if words[0] in VERBS else ""
        print_error(command, "UsageError", str(error), as_json="--json" in words)
        return 2
    if argv is None:
        keep_freed_memory()
        warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # without a line of code
    try:
        return _run(options)
    except AtollError as error:
        if options.debug:
            raise
        # Under torchrun all processes find the same fault in a recipe; a broken run may show in any of them.
        if _is_main() or isinstance(error, TrainingError):
            print_error(options.verb, type(error).__name__, str(error), as_json=options.json)
        return 1
    except KeyboardInterrupt as interrupt:
        if _is_main():
            rerun = " Rerun the same command to resume." if options.verb in RESUMABLE else ""
            message = str(interrupt) or f"Interrupted.{rerun}"
            if options.json:
                print_error(options.verb, "Interrupted", message, as_json=True)
            else:
                sys.stderr.write(f"{message}\n")
        return 130
    except BrokenPipeError:  # `atoll ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # a full disk, too little memory; anything else is a bug, whose traceback helps
        description = describe(error)
        if description is None or options.debug:
            raise
        kind, sentence = "OSError" if isinstance(error, OSError) else type(error).__name__, description
    # Here, because the error refers to all that the command allocated, and printing needs memory.
    if _is_main() or kind != "OSError":
        print_error(options.verb, kind, sentence, as_json=options.json)
    return 1


def keep_freed_memory() -> None:
    """Let the C library (glibc) keep up to 1 GB of freed memory of this process instead of returning it to the system.

    Otherwise every layer asks the system for the memory of its output, page by page, which can take as long as the
    computation.
    """
    import ctypes  # here, because `atoll --help` does without

    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 32 << 20)  # the largest value that glibc accepts
        mallopt(trim_threshold, 1 << 30)


def _run(options: argparse.Namespace) -> int:
    """Run a command on the device that its options name."""
    module = importlib.import_module(f"atoll.cli.{options.verb}")
    with contextlib.ExitStack() as stack:
        computes = getattr(module, "computes", lambda options: True)  # otherwise the command does without PyTorch
        if hasattr(options, "device") and computes(options):
            from atoll.distributed import use_device
            from atoll.threads import choose_threads

            stack.enter_context(use_device(options.device))
            stack.enter_context(choose_threads(options.threads))
        code: int | None = module.run(options)
    return code or 0


def _is_main() -> bool:
    """Whether this process prints; like ``atoll.distributed.is_main``, which imports PyTorch."""
    return int(os.environ.get("RANK", "0")) == 0


def _begins_anew(word: str) -> bool:
    """Whether a word is an option or an override, not the value of the option before it."""
    return word.startswith("--") or ("=" in word and not os.path.exists(word))


def _dotted_flags(argv: Sequence[str]) -> list[str]:
    """``--data.root DIR`` and ``--data.root=DIR`` mean the override ``data.root=DIR``."""
    words, result = list(argv), []
    while words:
        word = words.pop(0)
        if word.startswith("--") and "." in word.partition("=")[0]:
            key, equals, value = word[2:].partition("=")
            if not equals and words and not _begins_anew(words[0]):  # otherwise the value was forgotten
                value = words.pop(0)
            result.append(f"{key}={value}")
        else:
            result.append(word)
    return result
