"""Clean and robust accuracy of a model: attacks one after the other, each point's worst case, resumable.

``Evaluator.run`` is the path of a point: clean pass, attack after attack, a plain pass that confirms each success.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atoll.attacks.base import Attack, check_labels
from atoll.attacks.diagnostics import EvaluationWarning, diagnose_model, diagnose_results
from atoll.attacks.iterative import Drive, IterativeAttack, OneShot, Points, Rows
from atoll.attacks.progress import AttackCounts, Progress, Store
from atoll.data.base import Split, batches, to_float
from atoll.distributed import all_sum, barrier, is_main, rank, world_size
from atoll.errors import InputError
from atoll.measure import split_digest
from atoll.modules import count_passes, evaluation_mode
from atoll.rng import PointRNG
from atoll.stats import Accuracy

ROBUST, MISCLASSIFIED = -1, -2  # in ``broken_by``: no attack broke the point; no attack was needed
PROBE = 32  # points that the checks look at

OnProgress = Callable[[str, float, int], None]


@dataclass(frozen=True)
class AttackSummary:
    """What one attack did.

    ``accuracy`` is what is left after it: of all attacks so far in a cascade, otherwise of this attack alone.
    ``forward`` and ``backward`` count model passes by rows, so that batch sizes do not matter.
    """

    name: str
    accuracy: Accuracy
    attacked: int
    broken: int
    forward: int
    backward: int
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """Robust accuracy and what it rests on.

    Args:
        clean: accuracy without attack.
        robust: the pointwise worst case of all attacks.
        attacks: in the order they ran.
        warnings: what a reader of the numbers must know.
        broken_by: for each point the number of the first attack that broke it, -1 if it stands, -2 if it was wrong
            without an attack.
        batch_size: rows attacked at a time.
        adversarial: the points as the attacks left them (clean where nothing broke them), if they were kept.
    """

    clean: Accuracy
    robust: Accuracy
    attacks: tuple[AttackSummary, ...]
    warnings: tuple[EvaluationWarning, ...]
    broken_by: Tensor
    batch_size: int
    adversarial: Tensor | None = None

    @property
    def accuracy(self) -> dict[str, Accuracy]:
        """All accuracies by name: ``clean``, each attack's, and with several attacks ``worst``."""
        found = {"clean": self.clean} | {attack.name: attack.accuracy for attack in self.attacks}
        return found | ({"worst": self.robust} if len(self.attacks) > 1 else {})

    def to_json(self) -> dict[str, Any]:
        return {
            "clean": self.clean.to_json(),
            "robust": self.robust.to_json(),
            "attacks": [vars(attack) | {"accuracy": attack.accuracy.to_json()} for attack in self.attacks],
            "warnings": [warning.to_json() for warning in self.warnings],
            "batch_size": self.batch_size,
        }


def evaluate(
    model: nn.Module,
    split: Split,
    attacks: Mapping[str, Attack],
    *,
    cascade: bool = False,
    batch_size: int | None = None,
    seed: object = 0,
    device: torch.device | str = "cpu",
    check: bool = True,
    keep: bool = False,
    folder: Path | None = None,
    save_every: float = 30.0,
    on_progress: OnProgress | None = None,
) -> Evaluation:
    """Accuracy on clean points and under attacks; under torchrun the points are shared out.

    A point counts as robust only if it is also classified correctly without an attack, so points that are wrong
    already are not attacked.  Every success is confirmed by a plain forward pass before it counts.  What happens to a
    point depends on its index and the seed, not on the batch size or the number of processes (up to rounding: a
    model's arithmetic may differ in the last bit from one batch size to another).

    Args:
        model: any module from inputs to logits; evaluated in evaluation mode.
        split: the points.
        attacks: by the name under which they are reported (not ``clean`` or ``worst``).
        cascade: each attack runs only on points that those before it left standing, as in AutoAttack; otherwise on all
            points that are classified correctly.
        batch_size: rows attacked at a time; if None, as many as fit comfortably into memory.
        seed: of the random streams.
        check: look for what spoils evaluations, before and after (a few passes).
        keep: return the adversarial inputs.
        folder: keep them there (implies ``keep``), with all it takes to go on after a kill and end with the same bits.
        save_every: seconds between two records of the progress.
        on_progress: called now and then with the name of the attack, how many points are done, and of how many.

    >>> from atoll.attacks import PGD, ThreatModel
    >>> from atoll.data import MemorySplit
    >>> split = MemorySplit(torch.tensor([[[[60]]], [[[160]]]], dtype=torch.uint8), torch.tensor([0, 1]))
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2))
    >>> model[1].weight.data, model[1].bias.data = torch.tensor([[-1.0], [1.0]]), torch.tensor([0.5, -0.5])
    >>> evaluate(model, split, {"PGD": PGD(ThreatModel("linf", 0.2))}).accuracy
    {'clean': 100.00 % ± 35.36, 'PGD': 50.00 % ± 35.36}
    """
    if clash := {"clean", "worst"} & attacks.keys():
        raise InputError(f"attacks: the names clean and worst are taken, got {', '.join(clash)}")
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch_size: expected at least 1, got {batch_size}")
    if not len(split):
        raise InputError("split: expected at least one point, got none")
    return Evaluator(
        model, split, attacks, cascade, batch_size, seed, device, check, keep, folder, save_every, on_progress
    ).run()


@dataclass
class Evaluator:
    """One evaluation under way; see ``evaluate`` for the fields."""

    model: nn.Module
    split: Split
    attacks: Mapping[str, Attack]
    cascade: bool
    batch_size: int | None
    seed: object
    device: torch.device | str
    check: bool
    keep: bool
    folder: Path | None
    save_every: float
    on_progress: OnProgress | None

    def run(self) -> Evaluation:
        warnings = []
        if self.check:
            probe = self._fetch(torch.arange(min(PROBE, len(self.split))))
            warnings += diagnose_model(self.model, probe, self.split.labels[:PROBE].to(self.device), self.attacks)
        with evaluation_mode(self.model):
            progress = None if self.folder is None else Progress.load(self.folder, self.config, self.device)
            self.progress = progress or Progress(
                torch.zeros(len(self.split), dtype=torch.bool),
                torch.zeros(len(self.split), len(self.attacks), dtype=torch.bool),
                [AttackCounts() for _ in self.attacks],
                self.batch_size or automatic_batch_size(self.model, self._fetch(torch.arange(1))),
            )
            self.saved = self.shown = time.monotonic()
            if progress is None:
                self._clean()
                self._save()
            else:
                self.store = self._open()
            for number, (name, attack) in enumerate(self.attacks.items()):
                if number >= self.progress.number:
                    self._attack(number, name, attack)
        return self._result(warnings)

    def _clean(self) -> None:
        """Logits of all points, once; they say who is worth attacking, and which targets are close."""
        order = torch.split(self.mine, self.progress.batch_size)
        done = 0
        for number, batch in enumerate(batches(self.split, order, device=self.device)):
            logits = self._logits(batch.x)
            check_labels(logits, batch.y)
            if not logits.isfinite().all():
                raise InputError("model: expected finite logits, got NaN or infinity")
            if number == 0:
                for attack in self.attacks.values():
                    attack.threat.check(batch.x)
                self.store = self._open(logits.shape[1])
            index = batch.index.cpu()
            self.progress.correct[index] = torch.eq(logits.argmax(1), batch.y).cpu()
            self.store["logits"][index] = logits.float().cpu()
            if self.kept:
                self.store["adversarial"][index] = batch.x.cpu()
            done += len(index)
            self._report("clean", done, len(self.mine))

    def _attack(self, number: int, name: str, attack: Attack) -> None:
        p = self.progress
        tally = p.tallies[number]
        rows = attack if isinstance(attack, IterativeAttack) else OneShot(attack)
        standing = p.correct & ~p.broken[:, :number].any(1) if self.cascade else p.correct
        todo = self.mine[standing[self.mine]]
        tally.attacked = len(todo)

        def feed(count: int) -> Points | None:
            index = todo[p.position : p.position + count]
            p.position += len(index)
            if not len(index):
                return None
            x, y, logits = self._fetch(index), self.split.labels[index], self.store["logits"][index]
            return Points(x, y.to(self.device), index.to(self.device), logits.to(x))

        def streams(index: Tensor) -> PointRNG:
            return attack.streams((self.seed, name), index)

        classes = self.store["logits"].shape[1]
        drive = Drive(rows, self.model, feed, streams, classes, p.batch_size, p.rows, p.exhausted)
        began = time.monotonic()
        finished = p.position - (0 if p.rows is None else len(p.rows))
        with ExitStack() as counting:
            for model in (self.model, *_models(attack)):
                counting.enter_context(count_passes(model, tally))
            for done in drive:
                finished += len(done)
                self._record(done, attack, number)
                tally.seconds, began = tally.seconds + time.monotonic() - began, time.monotonic()
                p.rows, p.exhausted, p.batch_size = drive.rows, drive.exhausted, drive.batch_size
                if time.monotonic() - self.saved >= self.save_every:
                    self._save()
                self._report(name, finished, len(todo), drive)
        p.number, p.position, p.exhausted, p.rows = number + 1, 0, False, None
        self._save()

    def _record(self, rows: Rows, attack: Attack, number: int) -> None:
        """Take the claims that hold: wrong in a plain forward pass, inside the ball and the bounds."""
        rows = rows[rows.success]
        if not len(rows):
            return
        adv, threat = rows.adv, attack.threat
        inside = threat.distance(adv, rows.x) <= threat.radius * (1 + 1e-5) + 1e-7
        if threat.bounds is not None:
            low, high = threat.bounds
            inside &= ((adv >= low) & (adv <= high)).flatten(1).all(1)
        holds = inside & (self._logits(adv, attack.eot).argmax(1) != rows.y)
        index = rows.index[holds].cpu()
        tally = self.progress.tallies[number]
        tally.confirmed += len(index)
        tally.claimed += len(rows) if isinstance(attack, IterativeAttack) else len(index)
        self.progress.broken[index, number] = True
        if self.kept:
            # The first attack in the list wins, also when the attacks do not build on each other.
            first = ~self.progress.broken[index, :number].any(1)
            self.store["adversarial"][index[first]] = adv[holds].cpu()[first]

    def _result(self, warnings: list[EvaluationWarning]) -> Evaluation:
        p, total = self.progress, len(self.split)
        correct, broken = all_sum(p.correct.long()).bool(), all_sum(p.broken.long()).bool()
        counts = [(t.attacked, t.claimed, t.confirmed, t.forward, t.backward) for t in p.tallies]
        sums = all_sum(torch.tensor(counts)).tolist() if counts else []
        first = broken & (broken.cumsum(1) == 1)
        broken_by = torch.where(broken.any(1), first.int().argmax(1) if len(counts) else 0, ROBUST)
        broken_by = torch.where(correct, broken_by, MISCLASSIFIED)
        results = []
        for number, (name, tally) in enumerate(zip(self.attacks, p.tallies, strict=True)):
            gone = broken[:, : number + 1].any(1) if self.cascade else broken[:, number]
            attacked, _, confirmed, forward, backward = sums[number]
            left = Accuracy(int((correct & ~gone).sum()), total)
            results.append(AttackSummary(name, left, attacked, confirmed, forward, backward, tally.seconds))
        if self.check:
            new = [int((broken_by == number).sum()) for number in range(len(results))]
            warnings += diagnose_results(self.attacks, new, [s[1] for s in sums], [s[2] for s in sums], total)
        if self.keep and self.folder is None:
            all_sum(self.store["adversarial"])  # the points of other processes are zero here
        if self.folder is not None:
            barrier()
            if is_main():
                self.store["label"][:] = self.split.labels
                self.store["broken_by"][:] = broken_by
                self.store.flush()
        return Evaluation(
            Accuracy(int(correct.sum()), total),
            Accuracy(int((broken_by == ROBUST).sum()), total),
            tuple(results),
            tuple(warnings),
            broken_by,
            p.batch_size,
            self.store["adversarial"] if self.kept else None,
        )

    @property
    def kept(self) -> bool:
        return self.keep or self.folder is not None

    @cached_property
    def mine(self) -> Tensor:
        """The points of this process."""
        return torch.arange(len(self.split))[rank() :: world_size()]

    @cached_property
    def config(self) -> str:
        """A digest of all that the result depends on, so that no evaluation goes on with another one's progress."""
        digest = hashlib.sha256()
        parts = [repr(self.attacks), self.cascade, self.seed]
        digest.update(repr(parts).encode())
        digest.update(split_digest(self.split).encode())
        for model in (self.model, *(model for attack in self.attacks.values() for model in _models(attack))):
            for name, tensor in model.state_dict().items():
                digest.update(name.encode())
                digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _open(self, classes: int | None = None) -> Store:
        n, path = len(self.split), None if self.folder is None else self.folder / "adversarial.safetensors"
        if classes is None:  # a resumed evaluation; one pass over one point tells
            classes = self._logits(self._fetch(torch.arange(1))).shape[1]
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"logits": ((n, classes), torch.float32)}
        if self.kept:
            x = self._fetch(torch.arange(1))
            shapes |= {"adversarial": ((n, *x.shape[1:]), x.dtype)}
            shapes |= {"label": ((n,), torch.int64), "broken_by": ((n,), torch.int64)}
        return Store(shapes, path)

    def _fetch(self, index: Tensor) -> Tensor:
        return to_float(self.split.fetch(index).to(self.device))

    @torch.no_grad()
    def _logits(self, x: Tensor, passes: int | None = None) -> Tensor:
        passes = passes or max((attack.eot for attack in self.attacks.values()), default=1)
        return mean_logits(self.model, x, passes)

    def _save(self) -> None:
        if self.folder is not None:
            self.store.flush()
            self.progress.save(self.folder, self.config)
        self.saved = time.monotonic()

    def _report(self, name: str, finished: int, total: int, drive: Drive | None = None) -> None:
        if self.on_progress is None or (time.monotonic() - self.shown < 0.2 and finished < total):
            return
        under_way = 0.0
        if drive is not None and drive.rows is not None:
            under_way = float((drive.rows.clock / drive.attack.length(drive.classes)).sum())
        self.on_progress(name, min(finished + under_way, total), total)
        self.shown = time.monotonic()


def _models(attack: Attack) -> list[nn.Module]:
    """Models that an attack brings along, such as a surrogate."""
    return [part for part in vars(attack).values() if isinstance(part, nn.Module)]


def mean_logits(model: nn.Module, x: Tensor, passes: int = 1) -> Tensor:
    """Logits; of a randomised model the logarithm of its mean probabilities over several passes."""
    if passes == 1:
        logits: Tensor = model(x)
        return logits
    return torch.stack([model(x).softmax(1) for _ in range(passes)]).mean(0).log()


def automatic_batch_size(model: nn.Module, x: Tensor, *, largest: int = 512) -> int:
    """How many rows can be attacked at a time, from what one point makes the model keep for its backward pass.

    An eighth of the free memory is used on CPUs, half of it on GPUs; more rows than ``largest`` gain nothing.
    """
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), torch.enable_grad():
        model(x[:1].detach().requires_grad_())
    images = 16 * x[:1].numel() * x.element_size()  # what attacks keep of each row besides
    needed = 2 * sum(size for place, size in kept.items() if place not in weights) + images
    if x.device.type == "cuda":
        free = torch.cuda.mem_get_info(x.device)[0] // 2
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8
    return min(largest, 1 << max(0, (free // needed).bit_length() - 1))
