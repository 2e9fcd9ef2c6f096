"""The progress of an evaluation, in memory and on disk.

The folder of an evaluation contains::

    adversarial.safetensors       adversarial inputs, clean logits, labels, and the attack that broke each point;
                                  memory-mapped, so that it can be as large as the data set
    progress-0-of-1.safetensors   broken points, counts, and the rows under attack, of one process;
                                  written atomically

The progress file is authoritative.  After a kill, anything in the first file that is newer than the progress file is
computed again and overwritten with the same values.  The progress file has a checksum of itself, of the logits and of
every adversarial input so far; if anything is damaged, the evaluation starts over.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from atoll.attacks.iterative import AttackState
from atoll.distributed import fail_together, is_main, rank, world_size
from atoll.errors import CheckpointError, DamagedError
from atoll.files import check_no_folder, read_tensors, reserve, temporary_path, write_tensors
from atoll.modules import PassCounts

_RECORD = "an evaluation"
_POSITION = ("batch_size", "stage", "position", "exhausted", "logits")  # fields of ``Progress`` that are stored
_TENSORS = ("correct", "broken", "distance", "hashes", "retry")
_DTYPES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}


@dataclass
class AttackCounts(PassCounts):
    """Counts of one attack: points attacked, successes claimed and confirmed, model passes (in rows), and time."""

    attacked: int = 0
    claimed: int = 0
    confirmed: int = 0
    seconds: float = 0.0


@dataclass
class Progress:
    """Results so far and position.  Points of other processes stay False until the results are combined at the end."""

    correct: Tensor  # whether each point is classified correctly without an attack, (points,)
    broken: Tensor  # whether each attack broke each point, (points, attacks)
    distance: Tensor  # of the adversarial input of each broken point, 0 for the others, (points, attacks)
    hashes: Tensor  # of the adversarial input of each broken point, 0 for the others, (points,)
    retry: Tensor  # points for which the model did not confirm a success that its faster form claimed, (points,)
    counts: list[AttackCounts]
    batch_size: int
    logits: str = ""  # digest of the clean logits of this process's points
    stage: int = 0  # position in the sequence of attacks; one that runs on several sets of points counts for each
    position: int = 0  # next point to attack
    exhausted: bool = False
    rows: AttackState | None = field(default=None, repr=False)

    @staticmethod
    def start(points: int, attacks: int, batch_size: int) -> Progress:
        """Return the progress of an evaluation that has not attacked anything yet."""
        return Progress(
            torch.zeros(points, dtype=torch.bool),
            torch.zeros(points, attacks, dtype=torch.bool),
            torch.zeros(points, attacks),
            torch.zeros(points, dtype=torch.int64),
            torch.zeros(points, dtype=torch.bool),
            [AttackCounts() for _ in range(attacks)],
            batch_size,
        )

    def save(self, folder: Path, config: str) -> None:
        tensors = {name: getattr(self, name) for name in _TENSORS}
        if self.rows is not None:
            tensors |= {f"rows/{name}": value.clone() for name, value in self.rows.tensors().items()}
        about = {name: getattr(self, name) for name in _POSITION} | {"counts": [asdict(c) for c in self.counts]}
        write_tensors(_path(folder), _RECORD, tensors, {"config": config, **about})

    @staticmethod
    def load(folder: Path, config: str, device: torch.device | str) -> Progress | None:
        """Load the progress saved in a folder; None if there is none, or if it is damaged.

        Raises a CheckpointError if it belongs to another evaluation.
        """
        path = _path(folder)
        same_run = {f"progress-{number}-of-{world_size()}.safetensors" for number in range(world_size())}
        if others := {other.name for other in folder.glob("progress-*.safetensors")} - same_run:
            raise CheckpointError(
                f"{folder} was started with a different number of processes ({min(others)}); resume with the same"
                " number or choose another folder"
            )
        try:
            tensors, about = read_tensors(path, _RECORD)
            if about["config"] != config:
                raise CheckpointError(
                    f"{folder} contains the progress of another evaluation (different inputs, labels, weights, attacks,"
                    " eps, seed or Atoll version); choose another folder or delete this one"
                )
            position = {name: about[name] for name in _POSITION}
            counts = [AttackCounts(**each) for each in about["counts"]]
            rows = {name.removeprefix("rows/"): t.to(device) for name, t in tensors.items() if name.startswith("rows/")}
            state = AttackState.from_tensors(rows) if rows else None
            correct, broken, distance, hashes, retry = (tensors[name] for name in _TENSORS)
            return Progress(correct, broken, distance, hashes, retry, counts, **position, rows=state)
        except (FileNotFoundError, DamagedError, ValueError, KeyError, TypeError):
            return None


def _path(folder: Path) -> Path:
    return folder / f"progress-{rank()}-of-{world_size()}.safetensors"


def _begins_with(path: Path, prefix: bytes, size: int) -> bool:
    """Whether there is a regular file of this size that begins like this."""
    if not path.exists() or not stat.S_ISREG(path.lstat().st_mode) or path.stat().st_size != size:
        return False
    with path.open("rb") as file:
        return file.read(len(prefix)) == prefix


def _create(path: Path, prefix: bytes, size: int) -> None:
    """Create a file with a beginning and a size, unless there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    check_no_folder(path)
    if not _begins_with(path, prefix, size):
        temporary = temporary_path(path)
        try:
            temporary.write_bytes(prefix)
            reserve(temporary, size)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    reserve(path, size)


class TensorFile:
    """Tensors with one row per point, in memory or in a safetensors file that is written in place.

    >>> file = TensorFile({"logits": ((2, 3), torch.float32)})
    >>> file["logits"].shape
    torch.Size([2, 3])
    """

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], path: Path | None = None) -> None:
        self._maps: list[np.memmap] = []
        if path is None:
            self._tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
            return
        # Write the format by hand (header length, JSON header, data): safetensors cannot write in place.
        entries, end = {}, 0
        for name, (shape, dtype) in shapes.items():
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        start = 8 + len(header)
        prefix = len(header).to_bytes(8, "little") + header
        with fail_together():
            if is_main():
                _create(path, prefix, start + end)
        self._tensors = {}
        for name, (shape, dtype) in shapes.items():
            kind = torch.empty((), dtype=dtype).numpy().dtype
            offset = start + entries[name]["data_offsets"][0]  # type: ignore[operator]
            if math.prod(shape):
                self._maps.append(np.memmap(path, kind, "r+", offset, shape))
                self._tensors[name] = torch.from_numpy(self._maps[-1])

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def flush(self) -> None:
        """Write to disk; call this before saving progress that refers to the data."""
        for mapped in self._maps:
            mapped.flush()
