"""Check a proof file of `atoll certify --proof`: prove all of its claims again, independently of the certifier.

atoll certify runs/digits-gloro --proof digits.safetensors
atoll check digits.safetensors

The checker is one file (atoll/checker.py) that uses NumPy and SciPy only.  It evaluates the stored network, bounds the
rounding of its precision, proves the norms of its layers, and computes the radii.

Exit code: 0 if all claims are proven, 1 if some are not, 2 if the file is damaged, altered or malformed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from atoll.checker import OPERATIONS, Checked, ProofError, check


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="proof file")


def run(options: argparse.Namespace) -> int:
    try:
        proof = check(options.file)
    except ProofError as error:
        sys.stderr.write(f"atoll check: {options.file}: {error}\n")
        return 2
    if options.json:
        sys.stdout.write(json.dumps(_summary(proof), indent=2) + "\n")
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
