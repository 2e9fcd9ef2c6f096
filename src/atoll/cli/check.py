"""Check a proof file that `atoll certify --proof` wrote: prove all of its claims again.

The checker is independent of the certifier. It is one file (atoll/checker.py) that uses only NumPy and SciPy: it
evaluates the stored network, bounds its rounding errors, proves the norms of its layers, and computes the radii.

The exit code is 0 if all claims are proven, 1 if some are not, and 2 if the file is damaged, altered or malformed.

Examples:
  atoll certify runs/digits-gloro --proof digits.safetensors
  atoll check digits.safetensors
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.cli.answers import print_error, print_json
from atoll.cli.values import path

if TYPE_CHECKING:
    from atoll.checker import Checked


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=path, metavar="FILE", help="proof file, such as proof.safetensors")


def run(options: argparse.Namespace) -> int:
    from atoll.checker import ProofError, check  # imports NumPy and SciPy

    try:
        proof = check(options.file)
    except ProofError as error:
        print_error("check", "ProofError", f"{options.file}: {error}", as_json=options.json)
        return 2
    if options.json:
        print_json("check", _summary(proof))
    else:
        sys.stdout.write("\n".join(_lines(options.file, proof)) + "\n")
    return 0 if proof.proven.all() else 1


def _summary(proof: Checked) -> dict[str, object]:
    return {
        "claims": len(proof.proven),
        "proven": int(proof.proven.sum()),
        "failed": [int(row) for row in (~proof.proven).nonzero()[0]],
        "problems": proof.problems,
        "precision": proof.header["precision"],
        "bounds": proof.header["bounds"],
        "subject": proof.header["subject"],
    }


def _lines(file: Path, proof: Checked) -> list[str]:
    from atoll.checker import OPERATIONS

    header, failed = proof.header, (~proof.proven).nonzero()[0]
    names = sorted({name.removeprefix("aten.").partition(".")[0] for name in OPERATIONS} - {"input"})
    inputs = "all inputs" if header["bounds"] is None else "inputs in [{:g}, {:g}]".format(*header["bounds"])
    lines = [
        f"{file}: {len(proof.proven):,} claims (l2) about {inputs}, computed in {header['precision']}",
        f"model {header['subject']}",
        f"the checker covers {', '.join(names)}, and the head of Centroid Nets",
        f"proven: {int(proof.proven.sum()):,} of {len(proof.proven):,} claims",
    ]
    if len(failed):
        first = ", ".join(map(str, failed[:10]))
        lines.append(f"not proven: claims {first}" + (", ..." if len(failed) > 10 else ""))
    return lines + [f"reason: {problem}" for problem in proof.problems]
