"""Clean and robust accuracy of a model under several attacks, with saved progress.

``Evaluator.run`` shows the path of a point: clean pass, attacks, and a plain forward pass that confirms each success.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atoll.attacks.base import Attack, check_labels
from atoll.attacks.diagnostics import EvaluationWarning, diagnose_model, diagnose_results
from atoll.attacks.iterative import AttackLoop, AttackState, IterativeAttack, OneShot, Points
from atoll.attacks.progress import Progress, TensorFile
from atoll.attacks.sampling import Sampling, diagnose_sample
from atoll.config import fields_to_plain
from atoll.data.base import Split, batches, to_float
from atoll.display import Displayed, TextTable
from atoll.distributed import all_sum, fail_together, gather, is_main, rank, world_size
from atoll.errors import InputError, check_count
from atoll.frozen import attack_form
from atoll.graph import tensors_digest
from atoll.measure import OnProgress, split_digest
from atoll.modules import count_passes, evaluation_mode
from atoll.rng import content_hash
from atoll.stats import Accuracy, SampledAccuracy, percent_interval

if TYPE_CHECKING:
    from atoll.attacks.measure import AttackResult

ROBUST, MISCLASSIFIED = -1, -2  # values of ``broken_by``: no attack broke the point; misclassified without an attack
PROBE = 32  # number of points that the diagnostics use
FORMAT = 6  # version of the progress file; older versions are refused


@dataclass(frozen=True)
class AttackSummary:
    """The result of one attack.

    ``accuracy`` is the accuracy after all attacks so far in a cascade, and under this attack alone otherwise.
    ``forward`` and ``backward`` count model passes in rows, so that batch sizes do not matter.
    """

    name: str
    accuracy: Accuracy
    attacked: int
    broken: int
    forward: int
    backward: int
    seconds: float


def attack_table(title: str, result: Evaluation | AttackResult, notes: Sequence[str] = ()) -> TextTable:
    """Accuracies of an evaluation, with what each attack cost."""
    rows = [["clean", *percent_interval(result.clean), "-", "-", "-"]]
    for attack in result.attacks:
        broken, passes = f"{attack.broken:,} of {attack.attacked:,}", f"{attack.forward + attack.backward:,}"
        rows.append([attack.name, *percent_interval(attack.accuracy), broken, passes, f"{attack.seconds:.1f}"])
    sample = result.estimate
    rows.append(["at most" if sample else "worst case", *percent_interval(result.robust), "-", "-", "-"])
    if sample is not None:
        broken = f"{sample.rejected:,} of {sample.sampled:,} sampled"
        rows.append(["estimate", *percent_interval(sample), broken, "-", "-"])
    warnings = [f"{warning.kind}: {warning.message}" for warning in result.warnings]
    columns = ["attack", "accuracy %", "95 %", "broken", "passes", "seconds"]
    return TextTable(title, columns, rows, [*notes, *warnings])


@dataclass(frozen=True)
class Evaluation(Displayed):
    """Robust accuracy and the results behind it.

    Args:
        clean: accuracy without attack.
        robust: the pointwise worst case of all attacks.
        attacks: results of the attacks, in the order they ran.
        warnings: reasons not to trust the numbers.
        broken_by: for each point, the number of the first attack that broke it, -1 if it is robust, -2 if it is
            misclassified without an attack.
        batch_size: attack batch size.
        adversarial: adversarial inputs for broken points, clean inputs for the others; None unless requested.
        estimate: the accuracy under all attacks, if some ran only on a sample; ``robust`` is an upper bound then.
        distance: for each point and attack, the distance of the adversarial input, infinity if there is none, and 0
            for points that are misclassified without an attack.
    """

    clean: Accuracy
    robust: Accuracy
    attacks: tuple[AttackSummary, ...]
    warnings: tuple[EvaluationWarning, ...]
    broken_by: Tensor = field(metadata={"stored": False})
    batch_size: int
    adversarial: Tensor | None = field(default=None, metadata={"stored": False})
    estimate: SampledAccuracy | None = None
    distance: Tensor = field(default_factory=lambda: torch.zeros(0, 0), metadata={"stored": False})

    @property
    def accuracy(self) -> dict[str, Accuracy]:
        """All accuracies by name: ``clean``, one per attack, and ``worst`` if there are several attacks."""
        accuracies = {"clean": self.clean} | {attack.name: attack.accuracy for attack in self.attacks}
        return accuracies | ({"worst": self.robust} if len(self.attacks) > 1 else {})

    def table(self) -> TextTable:
        return attack_table(f"{self.clean.total:,} points", self)

    def to_json(self) -> dict[str, Any]:
        return fields_to_plain(self)


def evaluate(
    model: nn.Module,
    split: Split,
    attacks: Mapping[str, Attack],
    *,
    cascade: bool = False,
    sampling: Sampling | None = None,
    batch_size: int | None = None,
    seed: object = 0,
    device: torch.device | str = "cpu",
    check: bool = True,
    keep: bool = False,
    folder: Path | None = None,
    save_every: float = 30.0,
    compile: bool = False,
    on_progress: OnProgress | None = None,
) -> Evaluation:
    """Measure clean and robust accuracy; torchrun distributes the points over processes.

    A point counts as robust only if it is also classified correctly without an attack, so misclassified points are not
    attacked.  A success counts only after a plain forward pass has confirmed it.  The result for a point depends on its
    index and the seed, not on the batch size or the number of processes (up to rounding: the logits of a model may
    differ in the last bit between batch sizes).

    Args:
        model: maps inputs to logits; switched to evaluation mode.
        split: the points.
        attacks: the attacks by name (not ``clean`` or ``worst``).
        cascade: run each attack only on the points that are still robust, as in AutoAttack; otherwise on all correctly
            classified points.
        sampling: further attacks for a random sample of the points that a cascade leaves; they give an estimate.
        batch_size: attack batch size; None to choose one that fits memory.  A resumed evaluation keeps its own.
        seed: seed of the random streams.
        device: where to compute.
        check: run the diagnostics before and after (a few passes).
        keep: return the adversarial inputs.
        folder: where to store the adversarial inputs and the progress (implies ``keep``).  Repeat the call to resume an
            interrupted evaluation with bit-identical results.  Raises a CheckpointError if the folder belongs to
            another evaluation (other inputs, labels, weights, attacks or seed).
        save_every: seconds between saves of the progress.
        compile: compile the passes of attacks with ``torch.compile`` if possible.  The model itself still confirms
            every success.
        on_progress: called with the name of the attack, the number of finished points, and the total.

    >>> from atoll.attacks import PGD, ThreatModel
    >>> from atoll.data import MemorySplit
    >>> split = MemorySplit(torch.tensor([[[[60]]], [[[160]]]], dtype=torch.uint8), torch.tensor([0, 1]))
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2))
    >>> model[1].weight.data, model[1].bias.data = torch.tensor([[-1.0], [1.0]]), torch.tensor([0.5, -0.5])
    >>> evaluate(model, split, {"PGD": PGD(ThreatModel("linf", 0.2))}).accuracy
    {'clean': 100.00 % [34.2, 100.0], 'PGD': 50.00 % [9.5, 90.5]}
    """
    if clash := {"clean", "worst"} & attacks.keys():
        raise InputError(f"attacks: the names clean and worst are reserved, got {', '.join(sorted(clash))}")
    if sampling is not None and not cascade:
        raise InputError("sampling: expected a cascade, whose remaining points can be sampled")
    if sampling is not None and (clash := attacks.keys() & sampling.verify.keys()):
        raise InputError(f"sampling: expected other names than those of the cascade, got {', '.join(sorted(clash))}")
    check_count(1, batch_size=batch_size)
    if not len(split):
        raise InputError("split: expected at least one point, got none")
    return Evaluator(
        model,
        split,
        attacks,
        cascade,
        sampling,
        batch_size,
        seed,
        device,
        check,
        keep,
        folder,
        save_every,
        compile,
        on_progress,
    ).run()


@dataclass
class Evaluator:
    """A running evaluation; see ``evaluate`` for the fields."""

    model: nn.Module
    split: Split
    attacks: Mapping[str, Attack]
    cascade: bool
    sampling: Sampling | None
    batch_size: int | None
    seed: object
    device: torch.device | str
    check: bool
    keep: bool
    folder: Path | None
    save_every: float
    compile: bool
    on_progress: OnProgress | None

    def __post_init__(self) -> None:
        self.cheap = len(self.attacks)  # attacks that run on all points
        if self.sampling is not None:
            self.attacks = {**self.attacks, **self.sampling.verify}
        self.stage = 0

    def run(self) -> Evaluation:
        warnings: list[EvaluationWarning] = []
        if self.check:
            probe = self._fetch(torch.arange(min(PROBE, len(self.split))))
            warnings += diagnose_model(self.model, probe, self.split.labels[:PROBE].to(self.device), self.attacks)
        with evaluation_mode(self.model):
            self.saved = self.shown = time.monotonic()
            example = self._fetch(torch.arange(min(PROBE, len(self.split))))
            self.form = attack_form(self.model, example, compile=self.compile, dynamic=True)
            if not self._resume():
                size = self.batch_size or automatic_batch_size(self.model, self._fetch(torch.arange(1)))
                self.progress = Progress.start(len(self.split), len(self.attacks), size)
                self._clean()
                self._save()
            self._stage(torch.ones(len(self.split), dtype=torch.bool), range(self.cheap))
            estimate = None if self.sampling is None else self._sample(self.sampling, warnings)
        return self._result(warnings, estimate)

    def _resume(self) -> bool:
        """Continue from saved progress; returns False if there is none, or if a file of any process is damaged."""
        if self.folder is None:
            return False
        progress = Progress.load(self.folder, self.config, self.device)
        fits = progress is not None and progress.broken.shape == (len(self.split), len(self.attacks))
        if not all(gather(fits)):
            return False
        assert progress is not None
        self.progress, self.tensors = progress, self._open()
        return all(gather(self._verify()))

    def _verify(self) -> bool:
        """Whether the stored tensors match the progress; restores the inputs of points that are not broken.

        An interrupted process may have overwritten these after it saved its progress.
        """
        p, broken = self.progress, self.progress.broken.any(1)
        for index in torch.split(self.indices[~broken[self.indices]], p.batch_size):
            self.tensors["adversarial"][index] = self._fetch(index).cpu()
        own = self.indices[broken[self.indices]]
        return tensors_digest(self.tensors["logits"][self.indices]) == p.logits and all(
            content_hash(self.tensors["adversarial"][point]) == int(p.hashes[point]) for point in own
        )

    def _stage(self, points: Tensor, attacks: Iterable[int]) -> None:
        """Run some attacks on some points, unless this process did so before it was interrupted."""
        for number in attacks:
            for form in (self.form, nullcontext()):  # points that need a second try get the model itself
                if self.stage >= self.progress.stage:
                    self._attack(number, points, form)
                self.stage += 1

    def _sample(self, sampling: Sampling, warnings: list[EvaluationWarning]) -> SampledAccuracy:
        """Check a random sample of the points that the cascade left, or all of them if it misses many."""
        p, verify, total = self.progress, range(self.cheap, len(self.attacks)), len(self.split)
        own = p.correct & ~p.broken[:, : self.cheap].any(1)
        order = sampling.order(all_sum(own.long()).nonzero().squeeze(1), self.seed)

        def check(points: Tensor) -> int:
            """How many points the verifying attacks break."""
            self._stage(torch.zeros(total, dtype=torch.bool).index_fill(0, points, True), verify)
            return int(all_sum(p.broken[points, self.cheap :].any(1).long()).sum())

        remaining, pilot = len(order), sampling.pilot(len(order))
        pilot_rejected = check(order[:pilot])
        end = pilot + sampling.size(total, remaining, pilot, pilot_rejected)
        rejected = check(order[pilot:end])
        estimate = SampledAccuracy(total, remaining, end - pilot, rejected, pilot, pilot_rejected)
        warnings += diagnose_sample(estimate, sampling.escalate)
        if sampling.escalate and any(diagnose_sample(estimate)):
            rejected += check(order[end:])
            estimate = SampledAccuracy(total, remaining, remaining - pilot, rejected, pilot, pilot_rejected)
        return estimate

    def _clean(self) -> None:
        """Compute the clean logits of all points, which determine the points to attack and the order of targets."""
        order = torch.split(self.indices, self.progress.batch_size)
        done = 0
        for number, batch in enumerate(batches(self.split, order, device=self.device)):
            logits = self._logits(batch.x)
            check_labels(logits, batch.y)
            if not logits.isfinite().all():
                raise InputError("model: expected finite logits, got NaN or infinity")
            for attack in self.attacks.values():
                attack.threat.check(batch.x)
            if number == 0:
                self.tensors = self._open(logits.shape[1])
            index = batch.index.cpu()
            self.progress.correct[index] = torch.eq(logits.argmax(1), batch.y).cpu()
            self.tensors["logits"][index] = logits.float().cpu()
            if self.keeps_inputs:
                self.tensors["adversarial"][index] = batch.x.cpu()
            done += len(index)
            self._report("clean", done, len(self.indices))
        if self.folder is not None:
            self.progress.logits = tensors_digest(self.tensors["logits"][self.indices])

    def _attack(self, number: int, points: Tensor, form: AbstractContextManager[object]) -> None:
        name, attack = list(self.attacks.items())[number]
        p, first = self.progress, form is self.form
        counts = p.counts[number]
        iterative = attack if isinstance(attack, IterativeAttack) else OneShot(attack)
        eligible = points & p.correct if first else p.retry
        if self.cascade:
            eligible = eligible & ~p.broken[:, :number].any(1)
        todo = self.indices[eligible[self.indices]]
        if not first and not len(todo):
            return

        def next_batch(count: int) -> Points | None:
            index = todo[p.position : p.position + count]
            p.position += len(index)
            counts.attacked += len(index) if first else 0
            if not len(index):
                return None
            x, y, logits = self._fetch(index), self.split.labels[index], self.tensors["logits"][index]
            return Points(x, y.to(self.device), index.to(self.device), logits.to(x))

        streams = partial(attack.streams, (self.seed, name))
        classes = self.tensors["logits"].shape[1]
        loop = AttackLoop(iterative, self.model, next_batch, streams, classes, p.batch_size, p.rows, p.exhausted, form)
        began = time.monotonic()
        finished = p.position - (0 if p.rows is None else len(p.rows))
        with ExitStack() as counting:
            for model in (self.model, *_models(attack)):
                counting.enter_context(count_passes(model, counts))
            for done in loop:
                finished += len(done)
                self._record(done[iterative.broken(done)], attack, number, retry=first and len(self.form) > 0)
                counts.seconds, began = counts.seconds + time.monotonic() - began, time.monotonic()
                p.rows, p.exhausted, p.batch_size = loop.rows, loop.exhausted, loop.batch_size
                if time.monotonic() - self.saved >= self.save_every:
                    self._save()
                self._report(name, finished, len(todo), loop)
        p.stage, p.position, p.exhausted, p.rows = self.stage + 1, 0, False, None
        p.retry &= first
        self._save()

    def _record(self, rows: AttackState, attack: Attack, number: int, *, retry: bool) -> None:
        """Record the successes that are confirmed: misclassified in a plain forward pass, inside ball and bounds.

        With ``retry``, mark points for a second try if an attack claimed a success that is not confirmed.
        """
        if not len(rows):
            return
        x_adv, threat = rows.x_adv, attack.threat
        distance = threat.distance(x_adv, rows.x)
        holds = threat.contains(x_adv, rows.x) & (self._logits(x_adv, attack.eot).argmax(1) != rows.y)
        index = rows.index[holds].cpu()
        counts = self.progress.counts[number]
        counts.confirmed += len(index)
        claims = isinstance(attack, IterativeAttack)
        self.progress.retry[rows.index[~holds].cpu()] = retry and claims
        counts.claimed += len(rows) if claims and not retry else len(index)
        self.progress.broken[index, number] = True
        self.progress.distance[index, number] = distance[holds].float().cpu()
        if self.keeps_inputs:
            # Store the adversarial input of the first successful attack in the list, also without a cascade.
            first = ~self.progress.broken[index, :number].any(1)
            for point, values in zip(index[first], x_adv[holds].cpu()[first], strict=True):
                self.tensors["adversarial"][point] = values
                self.progress.hashes[point] = content_hash(values) if self.folder is not None else 0

    def _result(self, warnings: list[EvaluationWarning], estimate: SampledAccuracy | None) -> Evaluation:
        p, total = self.progress, len(self.split)
        correct, broken = all_sum(p.correct.long()).bool(), all_sum(p.broken.long()).bool()
        own = [(c.attacked, c.claimed, c.confirmed, c.forward, c.backward) for c in p.counts]
        sums = all_sum(torch.tensor(own)).tolist() if own else []
        first = broken & (broken.cumsum(1) == 1)
        broken_by = torch.where(broken.any(1), first.int().argmax(1) if sums else 0, ROBUST)
        broken_by = torch.where(correct, broken_by, MISCLASSIFIED)
        distance = torch.where(broken, all_sum(p.distance.clone()), math.inf).where(correct[:, None], 0.0)
        results = []
        for number, (name, counts) in enumerate(zip(self.attacks, p.counts, strict=True)):
            lost = broken[:, : number + 1].any(1) if self.cascade else broken[:, number]
            attacked, _, confirmed, forward, backward = sums[number]
            accuracy = Accuracy(int((correct & ~lost).sum()), total)
            results.append(AttackSummary(name, accuracy, attacked, confirmed, forward, backward, counts.seconds))
        if self.check:
            new = [int((broken_by == number).sum()) for number in range(len(results))]
            warnings += diagnose_results(self.attacks, new, [s[1] for s in sums], [s[2] for s in sums], total)
        if self.keep and self.folder is None:
            all_sum(self.tensors["adversarial"])  # the points of other processes are zero here
        if self.folder is not None:
            with fail_together():
                if is_main():
                    self.tensors["label"][:] = self.split.labels
                    self.tensors["broken_by"][:] = broken_by
                    self.tensors.flush()
        return Evaluation(
            Accuracy(int(correct.sum()), total),
            Accuracy(int((broken_by == ROBUST).sum()), total),
            tuple(results),
            tuple(warnings),
            broken_by,
            p.batch_size,
            self.tensors["adversarial"] if self.keeps_inputs else None,
            estimate,
            distance,
        )

    @property
    def keeps_inputs(self) -> bool:
        return self.keep or self.folder is not None

    @cached_property
    def indices(self) -> Tensor:
        """The points of this process."""
        return torch.arange(len(self.split))[rank() :: world_size()]

    @cached_property
    def config(self) -> str:
        """A digest of everything the result depends on, so that no evaluation resumes from progress of another."""
        models = [self.model, *(model for attack in self.attacks.values() for model in _models(attack))]
        parts = [FORMAT, repr(self.model), repr(self.attacks), self.cascade, self.seed, split_digest(self.split)]
        parts.append(repr(self.sampling))
        parts.append(tensors_digest(*(model.state_dict() for model in models)))
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _open(self, classes: int | None = None) -> TensorFile:
        n, path = len(self.split), None if self.folder is None else self.folder / "adversarial.safetensors"
        if classes is None:  # a resumed evaluation
            classes = self._logits(self._fetch(torch.arange(1))).shape[1]
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"logits": ((n, classes), torch.float32)}
        if self.keeps_inputs:
            x = self._fetch(torch.arange(1))
            shapes |= {"adversarial": ((n, *x.shape[1:]), x.dtype)}
            shapes |= {"label": ((n,), torch.int64), "broken_by": ((n,), torch.int64)}
        return TensorFile(shapes, path)

    def _fetch(self, index: Tensor) -> Tensor:
        return to_float(self.split.fetch(index).to(self.device))

    def _logits(self, x: Tensor, passes: int | None = None) -> Tensor:
        return average_logits(self.model, x, passes or max((attack.eot for attack in self.attacks.values()), default=1))

    def _save(self) -> None:
        if self.folder is not None:
            self.tensors.flush()
            self.progress.save(self.folder, self.config)
        self.saved = time.monotonic()

    def _report(self, name: str, finished: int, total: int, loop: AttackLoop | None = None) -> None:
        if self.on_progress is None or (time.monotonic() - self.shown < 0.2 and finished < total):
            return
        partial_points = 0.0
        if loop is not None and loop.rows is not None:
            partial_points = float((loop.rows.iteration / loop.attack.num_steps(loop.classes)).sum())
        self.on_progress(name, min(finished + partial_points, total), total)
        self.shown = time.monotonic()


@torch.no_grad()
def average_logits(model: nn.Module, x: Tensor, passes: int) -> Tensor:
    """Return logits or, with several passes (randomized models), the logarithm of the mean probabilities."""
    if passes == 1:
        logits: Tensor = model(x)
        return logits
    return torch.stack([model(x).softmax(1) for _ in range(passes)]).mean(0).log()


def _models(attack: Attack) -> list[nn.Module]:
    """Return the models that belong to an attack, such as a surrogate."""
    return [part for part in vars(attack).values() if isinstance(part, nn.Module)]


def automatic_batch_size(model: nn.Module, x: Tensor, *, largest: int = 512) -> int:
    """Return an attack batch size that fits memory, given what the model saves for the backward pass of one point.

    Uses an eighth of the free memory on CPUs and half of it on GPUs; beyond ``largest``, batches are not faster.
    """
    saved: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    with torch.autograd.graph.saved_tensors_hooks(record, lambda t: t), torch.enable_grad():
        model(x[:1].detach().requires_grad_())
    images = 16 * x[:1].numel() * x.element_size()  # memory of the attack state of one row
    needed = 2 * sum(size for place, size in saved.items() if place not in weights) + images
    if x.device.type == "cuda":
        free = torch.cuda.mem_get_info(x.device)[0] // 2
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8
    return min(largest, 1 << max(0, (free // needed).bit_length() - 1))
