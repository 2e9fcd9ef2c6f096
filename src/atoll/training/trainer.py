"""The training loop; start reading at ``fit`` and ``train_step``."""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from atoll.attacks.base import AttackFactory, training_attack
from atoll.attacks.pgd import PGD
from atoll.certify.power import LipschitzEstimator
from atoll.data.base import Batch, Data, Split, batches, shuffled
from atoll.distributed import (
    all_sum,
    default_device,
    fail_together,
    gather,
    raise_on_lost_worker,
    rank,
    synchronize_batch_norm,
    world_size,
)
from atoll.errors import (
    LARGEST_STEPS,
    CheckpointError,
    InputError,
    Interrupted,
    TrainingError,
    check_count,
    check_range,
)
from atoll.files import write_record
from atoll.frozen import attack_form
from atoll.losses.base import Loss, Outputs
from atoll.models.base import Classifier
from atoll.modules import preserve_buffers
from atoll.precision import check_precision
from atoll.rng import generator, key
from atoll.stats import Accuracy
from atoll.threat import ThreatModel
from atoll.training.checkpoint import Best, Checkpoint, Checkpoints, load_checkpoint, load_weights
from atoll.training.methods.base import Method, Step, check_methods
from atoll.training.observers import Observer, RunningMeans
from atoll.training.optimizers import check_optimizer, fuse, resume_optimizer
from atoll.training.passes import ForwardPasses, cat_outputs
from atoll.training.schedules import Piecewise, Schedule
from atoll.training.validation import validate

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """Epochs, batch size, precision, validation and checkpoints of a training run.

    Args:
        epochs: number of passes over the training set; 0 only evaluates the initial or pretrained weights.
        batch_size: total batch size of a step, over all processes and accumulated parts.
        accumulate: number of parts into which each process splits its batch, to save memory.  Gradients are the same,
            except that batch norm uses statistics of the parts.
        clip_norm: largest norm of the gradient; None for no clipping.
        precision: ``float32``, or mixed precision: ``bf16``, and on GPUs ``fp16`` with loss scaling.
        compile: compile the passes of attacks with ``torch.compile``, if possible.
        workers: number of processes that decode images, for data that is not in memory.
        evaluate_every: number of epochs between validations.
        validation_steps: PGD steps on the validation set.
        test_steps: PGD steps of the final test.
        select_on: split on which the best checkpoint is selected; ``test`` is for comparison with papers that do so,
            and is recorded with the results.
        checkpoint_minutes: largest time between checkpoints, in addition to one after every epoch.
        keep: number of newest checkpoints to keep, in addition to the best.
        keep_epochs: further epochs whose checkpoints to keep.
        log_every: number of steps between records of the loss.
        power_iterations: power iterations per step, for losses that use Lipschitz constants.
        sync_batch_norm: share batch-norm statistics between processes, so that results do not depend on their number.
    """

    epochs: int = 30
    batch_size: int = 128
    accumulate: int = 1
    clip_norm: float | None = None
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    compile: bool = False
    workers: int = 2
    evaluate_every: int = 1
    validation_steps: int = 10
    test_steps: int = 20
    select_on: Literal["validation", "test"] = "validation"
    checkpoint_minutes: float = 5.0
    keep: int = 2
    keep_epochs: Sequence[int] = ()
    log_every: int = 50
    power_iterations: int = 5
    sync_batch_norm: bool = True

    def __post_init__(self) -> None:
        positive = ("batch_size", "accumulate", "evaluate_every", "keep", "log_every", "power_iterations")
        check_count(1, **{name: getattr(self, name) for name in positive})
        at_least_0 = ("epochs", "validation_steps", "test_steps", "workers")
        check_count(0, LARGEST_STEPS, **{name: getattr(self, name) for name in at_least_0})
        check_count(0, **{f"keep_epochs[{i}]": epoch for i, epoch in enumerate(self.keep_epochs)})
        check_range("[0, inf)", checkpoint_minutes=self.checkpoint_minutes)
        check_range("(0, inf)", clip_norm=self.clip_norm)


class Trainer:
    """Trains a model.

    Args:
        model: maps inputs to logits; methods that use features require a ``Classifier``.
        data: the data set.
        loss: the loss to minimize, which also defines the objective of the attack.
        threat: the threat model; its bounds are replaced by those of the data.
        attack: creates the attack of the training step, given the threat model and the objective of the loss.
        methods: training methods, in the order in which they act.
        optimizer: creates the optimizer, given the parameters; fused if possible, unless it sets ``fused``.
        schedule: learning-rate schedule.
        settings: epochs, batch size, validation and checkpoints.
        seed: seed of data order, augmentation and attacks.
        folder: folder for checkpoints; None to write nothing.
        observers: observers that receive the metrics.
        device: where to compute; by default a GPU if there is one.
        about: plain JSON stored in every checkpoint, from which the model can be rebuilt.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        loss: Loss,
        threat: ThreatModel | None = None,
        *,
        attack: AttackFactory | None = None,
        methods: Sequence[Method] = (),
        optimizer: OptimizerFactory | None = None,
        schedule: Schedule | None = None,
        settings: TrainerSettings | None = None,
        seed: int = 0,
        folder: Path | str | None = None,
        observers: Sequence[Observer] = (),
        device: torch.device | str | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings = settings or TrainerSettings()
        self.device = torch.device(device) if device else default_device()
        self.data, self.loss, self.methods, self.seed = data, loss, tuple(methods), seed
        self.threat = replace(threat or ThreatModel(), bounds=data.bounds)
        self.threat.require_convex("threat.norm")
        factory = attack or functools.partial(PGD, steps=10)
        self.attack = training_attack(factory, self.threat, loss.objective) if loss.objective else None
        if self.attack is not None:  # labels are checked when they are loaded, and inputs before each update
            self.attack.known_classes = data.num_classes
        self.schedule = schedule or Piecewise()
        self.observers = tuple(observers) if rank() == 0 else ()
        self.about = dict(about or {})
        self.folder = Path(folder) if folder is not None else None
        self.checkpoints = Checkpoints(self.folder / "checkpoints", self.settings.keep) if self.folder else None
        self._check()

        model = model.to(self.device)
        if self.settings.sync_batch_norm:
            model = synchronize_batch_norm(model, self.device)
        self.model = model
        # For the attack; checked with the initial weights, so that a resumed run uses the same form.  Batch norm does
        # not change, because signs of small gradients must not depend on whether several processes share it.
        compile = self.settings.compile  # separately for each batch size, so that a resumed run gets the same code
        size = self.settings.batch_size // world_size() // self.settings.accumulate if compile else 2
        example = torch.rand(size, *data.shape, generator=generator("frozen form")).to(self.device)
        self.form = None
        if self.attack is not None:
            self.form = attack_form(model, example, compile=compile, dynamic=False, norms=False)
        self.lipschitz = self._lipschitz_estimate()
        self.passes: nn.Module = ForwardPasses(model, self.lipschitz if loss.uses_lipschitz else None)
        if world_size() > 1:
            self.passes = DistributedDataParallel(self.passes)
        make_optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-4))
        self.optimizer = fuse(make_optimizer(model.parameters()))
        check_optimizer(self.optimizer)
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.settings.precision == "fp16")

        # The position of the run: everything needed to resume besides weights and states.
        self.epoch = 0
        self.batch = 0  # number of finished batches in the current epoch
        self.step = 0
        self.best: dict[str, Best] = {}  # by name of the weights: raw, and averages of methods
        self.sums = RunningMeans()
        self.finished = False  # set by methods that stop a run early
        self.damaged: list[str] = []  # damaged checkpoints that were skipped on resume
        self._saved_at = time.monotonic()
        self.stop_requested = False  # set by signal handlers: save after this step and stop
        self.trained = False  # whether training has finished and everything is saved

    # --- the loop -----------------------------------------------------------------------------------------------

    def fit(self, *, resume: bool = False) -> None:
        """Run the training.

        With ``resume``, the run continues from its newest intact checkpoint and produces bit-identical weights.
        """
        hint = f"resume from the checkpoints in {self.folder}" if self.folder else "it cannot resume without a folder"
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), raise_on_lost_worker(hint):
            for method in self.methods:
                method.setup(self)
            self.best = {weights: Best() for weights in self.weight_sets}
            if resume:
                self._resume()
            for observer in self.observers:
                observer.start(self)
            try:
                if not self.step:
                    self._save()  # so that the run can resume from the very first step
                if not self.settings.epochs:
                    self._conclude(self._validation_metrics())
                while self.epoch < self.settings.epochs and not self.finished:
                    for batch in self._rest_of_epoch():
                        torch.manual_seed(key(self.seed, "dropout", self.step, rank()))
                        self.train_step(batch)
                        self.batch += 1
                        self.step += 1
                        self._save_if_due()
                    self._finish_epoch()
                self.trained = True
                self._write_index()
                if any(gather(self.stop_requested)):  # after the last step
                    self.stop()
            finally:
                for observer in self.observers:
                    observer.end()

    def train_step(self, batch: Batch) -> Step:
        """Train on one batch: attack, forward and backward passes, and update."""
        factor = self.schedule(self.position, self.settings.epochs)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        self.optimizer.zero_grad()  # here, so that old gradients take no memory during the attack
        self.model.train()
        step = Step(batch.x, batch.y, batch.index, self.step, self.position, eps=self.threat.radius)
        for method in self.methods:
            method.before_attack(self, step)
        if self.attack is not None and self.form is not None:
            with self._all(method.around_attack(self, step) for method in self.methods), self._autocast():
                seed = (self.seed, "train", self.epoch)
                self.form.refresh()
                with self.form:
                    parts = [self.attack(self.model, p.x, p.y, seed=seed, index=p.index) for p in self.parts(step)]
                step.x_adv = torch.cat(parts) if len(parts) > 1 else parts[0]
        with self._all(method.around_step(self, step) for method in self.methods):
            self.forward_backward(step)
        for method in self.methods:
            method.before_step(self, step)
        self._update(step)
        for method in self.methods:
            method.after_step(self, step)
        self._observe(step)
        return step

    def forward_backward(self, step: Step, *, plain: bool = False) -> None:
        """Run a clean pass (if needed), an adversarial pass and a backward pass, and store gradients in ``.grad``.

        With ``plain``, it computes the gradient of the loss only, without terms of methods.
        """
        self.optimizer.zero_grad()
        parts = self.parts(step)
        if len(parts) > 1 and not plain and any(method.uses_batch for method in self.methods):
            step.out = self._outputs(parts)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            sync = self.passes.no_sync() if isinstance(self.passes, DistributedDataParallel) and not last else None
            with sync or nullcontext():
                with self._autocast():
                    clean = self.loss.uses_clean if plain else self.uses_clean
                    # Update the Lipschitz estimates once per step, because the parts of a batch share them.
                    part.out = self.passes(part.x if clean else None, part.x_adv, part.eps, update=number == 0)
                part.terms = self.loss.values(part.out, part.y)
                for method in () if plain else self.methods:
                    method.on_loss(self, part)
                part.terms = {name: value.mean() / len(parts) for name, value in part.terms.items()}
                total = torch.stack(list(part.terms.values())).sum()
                self.scaler.scale(total).backward()  # type: ignore[no-untyped-call]
                part.terms = {name: value.detach() for name, value in part.terms.items()}
        if len(parts) > 1:  # for methods and observers of the whole step
            step.out = cat_outputs([part.out for part in parts])
            step.terms = {name: sum((part.terms[name] for part in parts), torch.zeros(())) for name in parts[0].terms}

    def _update(self, step: Step) -> None:
        """Update the weights; raises a TrainingError first if a term or a gradient is not finite."""
        self._check_finite(step)
        if self.settings.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _finish_epoch(self) -> None:
        """Validate, call methods and observers, update the best checkpoint, and save."""
        self.epoch, self.batch = self.epoch + 1, 0
        metrics = {f"train_{name}": value for name, value in self.sums.means().items()}
        self.sums = RunningMeans()
        metrics["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        if self.epoch % self.settings.evaluate_every == 0 or self.epoch == self.settings.epochs:
            metrics |= self._validation_metrics()
        for method in self.methods:
            method.after_epoch(self, metrics)
        self._conclude(metrics)

    def _validation_metrics(self) -> dict[str, float]:
        """Return the accuracies on the split that selects the best checkpoint, for all sets of weights."""
        metrics: dict[str, float] = {}
        split = self.data.split(self.settings.select_on)
        for weights in self.weight_sets if len(split) else ():
            with self.using(weights):
                accuracy = self.validate(split, self.settings.validation_steps)
            metrics |= {self._metric(name, weights): a.value for name, a in accuracy.items()}
        return metrics

    def _conclude(self, metrics: Mapping[str, float]) -> None:
        """Update the best checkpoint, record the metrics of an epoch, and save."""
        for weights, best in self.best.items():
            score = metrics.get(self._metric(self._selected, weights))
            if score is not None and score > best.score:
                self.best[weights] = Best(score, self.step, self.epoch)
        # Record before saving: resume drops a record without a checkpoint, but could not restore a missing record.
        self._record("epoch", metrics)
        self._save()

    # --- parts of a step ----------------------------------------------------------------------------------------

    def _rest_of_epoch(self) -> Iterator[Batch]:
        """Return the remaining batches of this epoch, with only this process's share of each."""
        settings, data = self.settings, self.data
        extra: dict[str, Any] = {"extra": data.num_extra, "extra_ratio": data.extra_ratio}
        order = shuffled(data.num_own, settings.batch_size, self.seed, self.epoch, **extra)
        share = settings.batch_size // world_size()
        mine = [index[rank() * share : (rank() + 1) * share] for index in order[self.batch :]]
        seed, device = (self.seed, "augment", self.epoch), self.device
        return batches(data.train, mine, augment=data.augment, seed=seed, device=device, workers=settings.workers)

    def parts(self, step: Step) -> list[Step]:
        """Return the step itself or, with gradient accumulation, equal parts of it."""
        if self.settings.accumulate == 1:
            return [step]
        size = len(step.y) // self.settings.accumulate
        rows = [slice(start, start + size) for start in range(0, len(step.y), size)]
        fields = {"x": step.x, "y": step.y, "index": step.index, "x_adv": step.x_adv}
        tensors: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
        return [replace(step, whole=step, **{name: value[r] for name, value in tensors.items()}) for r in rows]

    @torch.no_grad()
    def _outputs(self, parts: Sequence[Step]) -> Outputs:
        """Return the outputs that the parts of a step will have, without gradients or side effects.

        Dropout draws the same numbers again.
        """
        devices = [self.device] if self.device.type == "cuda" else []
        passes = ForwardPasses(self.model)
        with torch.random.fork_rng(devices), preserve_buffers(self.model), self._autocast():
            return cat_outputs([passes(part.x if self.uses_clean else None, part.x_adv) for part in parts])

    def _autocast(self) -> torch.autocast:
        dtype = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.settings.precision]
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    @staticmethod
    def _all(contexts: Iterable[Any]) -> ExitStack:
        """Combine context managers: enter in order and exit in reverse, also if one of them fails."""
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            return stack.pop_all()

    def _observe(self, step: Step) -> None:
        labels = step.y if step.y.dim() == 1 else step.y.argmax(1)
        self.sums.add("count", torch.full((), float(len(labels)), device=self.device))
        self.sums.add("loss", torch.stack(list(step.terms.values())).sum() * len(labels))
        for name, logits in (("clean", step.out.logits), ("robust", step.out.adv_logits)):
            if logits is not None:
                self.sums.add(name, logits.argmax(1) == labels)
        if self.observers and (self.step + 1) % self.settings.log_every == 0:
            terms = {name: float(value) for name, value in step.terms.items()}
            lr = self.optimizer.param_groups[0]["lr"]
            self._record("step", {"loss": sum(terms.values()), **terms, "learning_rate": lr}, step=self.step + 1)
        for observer in self.observers:
            observer.progress(self)

    # --- measuring ----------------------------------------------------------------------------------------------

    @property
    def position(self) -> float:
        """Number of finished epochs, fractional."""
        return self.epoch + self.batch / self.steps_per_epoch

    @property
    def uses_clean(self) -> bool:
        """Whether a step needs a clean pass."""
        return self.loss.uses_clean or any(method.uses_clean for method in self.methods)

    @property
    def steps_per_epoch(self) -> int:
        return max(1, self.data.num_own // self.settings.batch_size)

    @property
    def selection_metric(self) -> str:
        """The metric that selects the best checkpoint: verified, robust or clean accuracy, depending on the loss."""
        return self._metric(self._selected)

    @property
    def _selected(self) -> str:
        if self.lipschitz is not None:
            return "vra" if self.lipschitz.exact else "vra_estimate"
        return "robust" if self.attack and self.settings.validation_steps else "clean"

    def _metric(self, name: str, weights: str = "raw") -> str:
        """Return ``validation_robust`` for the trained weights, ``validation_swa_robust`` for an average."""
        return "_".join([self.settings.select_on, *([] if weights == "raw" else [weights]), name])

    @property
    def averages(self) -> dict[str, dict[str, Tensor]]:
        return {name: weights for method in self.methods for name, weights in method.averages().items()}

    @property
    def weight_sets(self) -> list[str]:
        """Names of the available weights: ``raw`` for the trained weights, and averages."""
        return ["raw", *self.averages]

    @contextmanager
    def using(self, weights: str) -> Iterator[None]:
        """Switch the model to other weights, and restore its own on exit."""
        if weights == "raw":
            yield
            return
        own = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(self.averages[weights])
        try:
            yield
        finally:
            self.model.load_state_dict(own)

    def validate(self, split: Split, steps: int) -> dict[str, Accuracy]:
        """Measure clean accuracy, accuracy under PGD if ``steps > 0``, and verified accuracy if the loss certifies."""
        size = math.ceil(self.settings.batch_size / world_size())
        return validate(self.model, split, self.threat, steps, size, self.lipschitz, self.device)

    def _record(self, kind: str, metrics: Mapping[str, float], step: int | None = None) -> None:
        record = {"kind": kind, "step": self.step if step is None else step, "epoch": self.position, **metrics}
        for observer in self.observers:
            observer.record(record)

    # --- saving and resuming ------------------------------------------------------------------------------------

    def _save(self) -> None:
        self._saved_at = time.monotonic()
        if self.checkpoints is None:
            return
        state = self.state_dict()
        with fail_together():
            if rank() != 0:
                return
            if wrong := self._not_finite():
                raise TrainingError(self._diagnosis([f"{wrong} is not finite"]))
            about = {**self.about, "step": self.step, "epoch": self.epoch}
            checkpoint = Checkpoint(self.model.state_dict(), state, about, dict(self.averages))
            scheduled = {epoch * self.steps_per_epoch for epoch in self.settings.keep_epochs}
            best = {best.step for best in self.best.values()}
            self.checkpoints.save(self.step, checkpoint, protect=best | scheduled)
            self._write_index()

    def _write_index(self) -> None:
        """Write ``index.json``, which says which checkpoints are last and best."""
        if self.folder is None or rank() != 0:
            return
        best = {weights: best.step for weights, best in self.best.items()}
        index = {"last": self.step, "best": best, "epoch": self.epoch, "finished": self.trained}
        write_record(self.folder / "index.json", "the checkpoints", {**index, "selected_on": self.settings.select_on})

    def stop(self) -> None:
        """Stop after the current step and a save, or at once if everything is saved; for signal handlers."""
        self.stop_requested = True
        if self.trained:
            raise KeyboardInterrupt("Interrupted during the final test.")

    def _save_if_due(self) -> None:
        due = time.monotonic() - self._saved_at > 60 * self.settings.checkpoint_minutes
        # Clocks differ and signals arrive at different times, but all processes must save or stop at the same step.
        stop, due = all_sum(torch.tensor([self.stop_requested, due]).int()).bool().tolist()
        if stop or due:
            self._save()
        if stop:
            raise Interrupted(f"Interrupted at step {self.step}.")

    def state_dict(self) -> dict[str, Any]:
        """Return everything except the model that a run needs to resume; call it in all processes."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "methods": [method.state_dict() for method in self.methods],
            "position": {"epoch": self.epoch, "batch": self.batch, "step": self.step},
            "sums": self.sums.state_dict(),
            "best": {weights: vars(best) for weights, best in self.best.items()},
            "finished": self.finished,
            "lipschitz": dict(self.lipschitz.state_dict()) if self.lipschitz is not None else {},
        }

    def _resume(self) -> None:
        checkpoint = self._newest_checkpoint()
        if checkpoint is None:
            return
        state = checkpoint.training
        if not isinstance(state.get("methods"), list):
            raise CheckpointError(f"{self.folder}/checkpoints has no states of methods; start again in another folder")
        if len(state["methods"]) != len(self.methods):
            raise CheckpointError(
                f"the checkpoint has the state of {len(state['methods'])} methods, but the recipe has"
                f" {len(self.methods)}; resume with the original recipe"
            )
        load_weights(self.model, checkpoint.model)
        try:
            self._restore(checkpoint, state)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise CheckpointError(
                f"the state of the training in {self.folder}/checkpoints does not fit the recipe or this version of"
                f" Atoll ({type(error).__name__}: {error}); start again in another folder"
            ) from error

    def _newest_checkpoint(self) -> Checkpoint | None:
        """Return the newest intact checkpoint of the first process, the same in all processes; None if it has none."""
        if self.checkpoints is None:
            return None
        step, checkpoint = -1, None
        with fail_together():
            if rank() == 0 and (newest := self.checkpoints.newest()) is not None:
                checkpoint, self.damaged = newest
                step = self.checkpoints.steps()[-1 - len(self.damaged)]
        step, digest = gather((step, checkpoint.digest if checkpoint else None))[0]
        with fail_together():
            if rank() != 0:
                own = self.checkpoints.steps()
                checkpoint = load_checkpoint(self.checkpoints.path(step)) if step in own else None
                if (checkpoint.digest if checkpoint else None) != digest or (own and digest is None):
                    start = "starts anew" if digest is None else f"resumes from step {step}"
                    raise CheckpointError(
                        f"{self.checkpoints.folder} differs from that of process 0, which {start}; use a disk that all"
                        " machines share"
                    )
        return checkpoint

    def _restore(self, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
        """Restore the state of optimizer, methods and position."""
        self.optimizer = resume_optimizer(self.optimizer, state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        for method, saved in zip(self.methods, state["methods"], strict=True):
            method.load_state_dict(saved)
            for name, average in method.averages().items():
                for entry, value in checkpoint.weights(name).items():
                    average[entry].copy_(value)
        self.epoch, self.batch, self.step = (operator.index(state["position"][n]) for n in ("epoch", "batch", "step"))
        if min(self.epoch, self.batch, self.step) < 0:
            raise ValueError("expected a position >= 0")
        self.sums = RunningMeans()
        self.sums.load_state_dict(state["sums"], self.device)
        self.best = {
            weights: Best(float(best["score"]), operator.index(best["step"]), operator.index(best["epoch"]))
            for weights, best in state["best"].items()
        }
        self.finished = bool(state["finished"])
        if self.lipschitz is not None:
            self.lipschitz.load_state_dict(state["lipschitz"])

    # --- faults -------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise an InputError for invalid combinations of settings, before any work."""
        settings = self.settings
        check_methods(self.methods)
        self.threat.check_radius(self.data.shape)
        self.schedule.check(settings.epochs)
        check_precision(self.device.type, settings.precision)
        if settings.batch_size % (world_size() * settings.accumulate):
            raise InputError(
                f"batch_size: expected a multiple of {world_size()} processes x {settings.accumulate} accumulated"
                f" parts, got {settings.batch_size}"
            )

    def _lipschitz_estimate(self) -> LipschitzEstimator | None:
        """Return Lipschitz estimates for losses that train certified radii, otherwise None.

        Raises an InputError if this model or threat model does not support them.
        """
        if not self.loss.certifies:
            return None
        name = type(self.loss).__name__
        if self.threat.norm != "l2":
            raise InputError(f"threat.norm: expected l2 for {name}, got {self.threat.norm}")
        if not isinstance(self.model, Classifier):
            raise InputError(f"{name}: expected a Classifier with a linear head, got {type(self.model).__name__}")
        return LipschitzEstimator(self.model, iterations=self.settings.power_iterations)

    def _check_finite(self, step: Step) -> None:
        """Raise a TrainingError before the update if a term or a gradient is not finite on any process.

        Inputs outside the bounds of the threat model are an InputError.  The flags of a step are read together, to wait
        only once for the device.  With loss scaling, gradients may overflow; the scaler then skips the update and
        halves the scale.  At scale 1, after 16 halvings, this is an error.
        """
        named = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        may_overflow = self.scaler.get_scale() > 1
        largest = [] if may_overflow or not named else [nn.utils.get_total_norm(named.values(), norm_type=math.inf)]
        numbers = [value.to(self.device) for value in (*step.terms.values(), *largest)]
        flags = [~number.isfinite() for number in numbers]
        if self.attack is not None:
            flags.append(self.threat.outside(step.x))
        wrong = all_sum(torch.stack(flags).int()).tolist()
        if not any(wrong):
            return
        if self.attack is not None and wrong[-1]:
            self.threat.check(step.x)
            raise InputError("inputs: another process got values that are not finite or outside the bounds")
        bad = []
        for name, value, flag in zip(step.terms, numbers, wrong, strict=False):
            if flag:
                bad.append(f"the loss term {name} is {'not finite' if value.isfinite() else value.item()}")
        gradients = [name for name, gradient in named.items() if not gradient.isfinite().all()]
        raise TrainingError(self._diagnosis(bad or [f"the gradient of {name} is not finite" for name in gradients[:1]]))

    def _not_finite(self) -> str | None:
        """Return the name of a weight or running statistic that is not finite, or None."""
        tensors: list[tuple[str, Tensor]] = [(f"the weight {name}", p) for name, p in self.model.named_parameters()]
        for prefix, module in self.model.named_modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                tensors += [(f"the statistic {prefix}.{name}", b) for name, b in module.named_buffers(recurse=False)]
        return next((name for name, tensor in tensors if not tensor.isfinite().all()), None)

    def _diagnosis(self, bad: Sequence[str]) -> str:
        """Return an error message that says what is not finite and what to do."""
        lr = self.optimizer.param_groups[0]["lr"]
        intact = f"; the last good checkpoint is in {self.folder}" if self.folder else ""
        return (
            f"training diverged at step {self.step} (epoch {self.position:.2f}, learning rate {lr:g}):"
            f" {' and '.join(bad)}; try a lower learning rate, a warm-up or gradient clipping (clip_norm){intact}"
        )
