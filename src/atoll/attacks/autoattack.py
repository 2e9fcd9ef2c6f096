"""AutoAttack with the interface of the original package, for existing scripts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from atoll.attacks.autoattack_settings import (
    DEFAULTS,
    MEMBERS,
    OriginalSettings,
    SettingError,
    build_attack,
    load_settings,
)
from atoll.attacks.base import Attack
from atoll.attacks.diagnostics import is_randomized
from atoll.attacks.evaluate import PROBE, Evaluation, evaluate
from atoll.attacks.sampling import Sampling
from atoll.attacks.suites import SUITES, get_attack, sampling_for, suite
from atoll.data.base import MemorySplit
from atoll.distributed import is_main, parse_device, world_size
from atoll.errors import InputError
from atoll.measure import OnProgress
from atoll.modules import evaluation_mode
from atoll.registry import suggest
from atoll.threat import Norm, ThreatModel

NORMS: dict[str, Norm] = {"Linf": "linf", "L2": "l2", "L1": "l1", "linf": "linf", "l2": "l2", "l1": "l1"}
WRITABLE = ("seed", "verbose", "attacks_to_run", "device", "evaluation")  # attributes to set after construction


class AutoAttack:
    """Robust accuracy under an ensemble of attacks; a drop-in replacement for the original ``AutoAttack``.

    Args:
        model: maps inputs in [0, 1] to logits; a module or, if gradients flow through it, any function.
        norm: ``Linf``, ``L2`` or ``L1``.
        eps: radius, a number or a fraction like ``"8/255"``.
        seed: seed of the random streams.  If None, each run draws one from PyTorch's global generator, except that
            runs with a ``state_path`` use 0, so that they can be resumed.
        verbose: print the accuracy after each attack, as the original does.
        attacks_to_run: names of attacks, for ``version="custom"``; also an attribute.
        version: ``standard``, ``plus``, ``rand``, ``fast`` or ``custom``.
        is_tf_model: only False; TensorFlow models are not supported.
        device: where to compute; None for the device of the model (of a function: a GPU if there is one).
        log_path: file to which the lines printed by ``verbose`` are appended.

    The attributes ``apgd``, ``apgd_targeted``, ``fab`` and ``square`` contain the settings of the attacks, under the
    names of the original.  After a run, ``evaluation`` contains intervals, model passes and warnings.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> adversary = AutoAttack(model, norm="Linf", eps="8/255", version="custom", verbose=False)
    >>> adversary.attacks_to_run = ["apgd-ce", "square"]
    >>> adversary.apgd.n_restarts, adversary.square.n_queries = 1, 100
    >>> x = torch.rand(5, 1, 2, 2)
    >>> adversary.run_standard_evaluation(x, model(x).argmax(1), bs=5).shape
    torch.Size([5, 1, 2, 2])
    """

    model: nn.Module | Callable[[Tensor], Tensor]
    norm: str
    epsilon: float | str
    seed: int | None
    verbose: bool
    version: str
    is_tf_model: bool
    device: torch.device
    logger: Logger
    apgd: OriginalSettings
    apgd_targeted: OriginalSettings
    fab: OriginalSettings
    square: OriginalSettings
    threat: ThreatModel
    evaluation: Evaluation
    _module: nn.Module
    _attacks_to_run: list[str]

    def __init__(
        self,
        model: nn.Module | Callable[[Tensor], Tensor],
        norm: str = "Linf",
        eps: float | str = 0.3,
        seed: int | None = None,
        verbose: bool = True,
        attacks_to_run: Sequence[str] = (),
        version: str = "standard",
        is_tf_model: bool = False,
        device: torch.device | str | None = None,
        log_path: str | Path | None = None,
    ) -> None:
        if norm not in NORMS:
            raise InputError(f"norm: expected Linf, L2 or L1, got {norm!r}")
        if is_tf_model:
            raise InputError("is_tf_model: TensorFlow models are not supported; convert the model to PyTorch")
        if not callable(model):
            raise InputError(f"model: expected a module or a function, got {type(model).__name__}")
        if attacks_to_run and version != "custom":
            raise InputError(f"attacks_to_run: expected version='custom', got version={version!r}")
        module = model if isinstance(model, nn.Module) else FunctionModule(model)
        if device is None:
            unknown = "auto" if isinstance(module, FunctionModule) else "cpu"
            device = next((parameter.device for parameter in module.parameters()), unknown)
        threat = ThreatModel(NORMS[norm], eps)
        # The other attributes cannot be set later, because the attacks would not follow.
        vars(self).update(
            model=model,
            norm=norm,
            epsilon=eps,
            is_tf_model=False,
            threat=threat,
            logger=Logger(log_path),
            _module=module,
        )
        self.seed, self.verbose, self.device = seed, verbose, _as_device(device)
        vars(self).update({group: OriginalSettings(group, threat) for group in DEFAULTS})
        self.set_version(version)
        if version == "custom":
            self.attacks_to_run = attacks_to_run

    def __setattr__(self, name: str, value: Any) -> None:
        if type(self) is AutoAttack and name not in WRITABLE:  # subclasses may add attributes
            if name not in AutoAttack.__annotations__:
                raise SettingError(f"{name}: AutoAttack has no such attribute{suggest(name, (*WRITABLE, *DEFAULTS))}")
            advice = "call set_version" if name == "version" else "create another AutoAttack"
            raise SettingError(f"{name}: cannot be set after construction; {advice} instead")
        super().__setattr__(name, _as_device(value) if name == "device" else value)

    @property
    def attacks_to_run(self) -> list[str]:
        """Names of the attacks, in order: those of the original in lower case, or any of Atoll."""
        return self._attacks_to_run

    @attacks_to_run.setter
    def attacks_to_run(self, names: Sequence[str]) -> None:
        if isinstance(names, str):
            raise InputError(f"attacks_to_run: expected a list of names, got {names!r}")
        self._build(names)  # a wrong name is an error here, not after hours
        vars(self)["_attacks_to_run"] = list(names)

    @property
    def attacks(self) -> dict[str, Attack]:
        """The attacks with their present settings, by Atoll's name."""
        if not self.attacks_to_run:
            raise InputError("attacks_to_run: expected at least one attack, got none")
        return self._build(self.attacks_to_run)

    def _build(self, names: Sequence[str]) -> dict[str, Attack]:
        """Build attacks from their names in the original (with the settings) or in Atoll."""
        if self.version == "fast":
            attacks = suite("fast", self.threat)
            if list(names) != list(attacks):
                raise SettingError("attacks_to_run: the attacks of version='fast' are fixed; use version='custom'")
            return attacks
        attacks = {}
        for name in names:
            key = str(name).lower()
            if key in MEMBERS:
                label, attack = MEMBERS[key].name, build_attack(key, self.threat, self._settings)
            else:
                label, attack = name, get_attack(name, self.threat)
            if label in attacks:
                raise InputError(f"attacks_to_run: expected each attack once, got {name} twice; set its n_restarts")
            attacks[label] = attack
        return attacks

    @property
    def _settings(self) -> dict[str, OriginalSettings]:
        return {group: getattr(self, group) for group in DEFAULTS}

    def set_version(self, version: str = "standard") -> None:
        """Choose the attacks and settings of a version; ``custom`` keeps both."""
        if version not in (*SUITES, "custom"):
            raise InputError(f"version: got {version!r}{suggest(version, (*SUITES, 'custom'))}")
        attacks = {} if version == "custom" else suite(version, self.threat)
        vars(self)["version"] = version
        for settings in self._settings.values():
            vars(settings)["_locked"] = version == "fast"
        if version == "custom":
            return
        if self.verbose:
            _print(f"setting parameters for {version} version")
        if version == "fast":
            self.attacks_to_run = list(attacks)
            return
        load_settings(attacks, self._settings)
        if version == "standard":
            self.fab.n_restarts = 1  # for scripts that add `fab`
        self.attacks_to_run = [name.lower() for name in attacks]

    def get_logits(self, x: Tensor) -> Tensor:
        """Return the logits of the model."""
        logits: Tensor = self.model(x)
        return logits

    def get_seed(self) -> int:
        """Return the seed, or draw one."""
        return int(torch.randint(2**62, ())) if self.seed is None else self.seed

    @overload
    def run_standard_evaluation(
        self,
        x_orig: Tensor,
        y_orig: Tensor,
        bs: int | None = ...,
        return_labels: Literal[False] = ...,
        state_path: str | Path | None = ...,
    ) -> Tensor: ...
    @overload
    def run_standard_evaluation(
        self,
        x_orig: Tensor,
        y_orig: Tensor,
        bs: int | None = ...,
        *,
        return_labels: Literal[True],
        state_path: str | Path | None = ...,
    ) -> tuple[Tensor, Tensor]: ...
    def run_standard_evaluation(
        self,
        x_orig: Tensor,
        y_orig: Tensor,
        bs: int | None = 250,
        return_labels: bool = False,
        state_path: str | Path | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run one attack after another, each on the points that are still robust.

        Args:
            x_orig: inputs in [0, 1].
            y_orig: labels.
            bs: attack batch size; None to choose one that fits memory.
            return_labels: also return the model's predictions on the adversarial inputs.
            state_path: folder for saved progress; repeat the call to resume an interrupted evaluation.  Raises a
                CheckpointError if the folder belongs to other inputs, labels, weights, attacks, eps or seed.

        Returns:
            Adversarial inputs for the points that an attack broke, clean inputs for the others.
        """
        folder = None if state_path is None else Path(state_path)
        if folder is not None:
            if folder.is_file():
                raise InputError(
                    f"state_path: expected a folder, got the file {folder}, perhaps a state of the original AutoAttack;"
                    " choose another path"
                )
            action = "Restored state from" if any(folder.glob("progress-*")) else "Created state in"
            self._log(f"{action} {folder}")
        attacks = self.attacks
        self._log(f"using {self.version} version including {', '.join(self.attacks_to_run)}.")
        randomized = self.version == "fast" and is_randomized(self._module, x_orig[:PROBE].to(self.device))
        sampling = sampling_for(self.version, self.threat, randomized=randomized)
        log = CascadeLog(self._log, len(x_orig))
        live = log.on_progress if sampling is None and world_size() == 1 else None
        self.evaluation = self._evaluate(attacks, x_orig, y_orig, bs, folder, sampling, live)
        log.finish(self.evaluation)
        x_adv, y_adv = self._adversarial(x_orig, y_orig, bs)
        distance = self.threat.distance(x_adv, x_orig).abs().max()  # not -0
        self._log(
            f"max {self.norm} perturbation: {distance:.5f}, nan in tensor: {int(x_adv.isnan().sum())},"
            f" max: {x_adv.max():.5f}, min: {x_adv.min():.5f}"
        )
        self._log(f"robust accuracy: {self.evaluation.robust.value:.2%}")
        if self.evaluation.estimate is not None:
            self._log(f"estimate: {self.evaluation.estimate}")
        return (x_adv, y_adv) if return_labels else x_adv

    def run_standard_evaluation_individual(
        self, x_orig: Tensor, y_orig: Tensor, bs: int | None = 250, return_labels: bool = False
    ) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        """Run each attack on all correctly classified points.

        Returns:
            Adversarial inputs (with ``return_labels`` also predictions) by name, as in ``attacks_to_run``.
        """
        self._log(f"using {self.version} version including {', '.join(self.attacks_to_run)}")
        results: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
        for key, (name, attack) in zip(self.attacks_to_run, self.attacks.items(), strict=True):
            began = time.monotonic()
            self.evaluation = self._evaluate({name: attack}, x_orig, y_orig, bs)
            x_adv, y_adv = self._adversarial(x_orig, y_orig, bs)
            results[key] = (x_adv, y_adv) if return_labels else x_adv
            tabs, seconds = "\t \t" if key == "fab" else "\t", time.monotonic() - began
            accuracy = f"{self.evaluation.robust.value:.2%}"
            self._log(f"robust accuracy by {key.upper()} {tabs} {accuracy} \t (time attack: {seconds:.1f} s)")
        return results

    def clean_accuracy(self, x_orig: Tensor, y_orig: Tensor, bs: int | None = 250) -> float:
        """Return the accuracy without attack."""
        accuracy = self._evaluate({}, x_orig, y_orig, bs).clean.value
        if self.verbose:
            _print(f"clean accuracy: {accuracy:.2%}")
        return accuracy

    def _evaluate(
        self,
        attacks: Mapping[str, Attack],
        x: Tensor,
        y: Tensor,
        bs: int | None,
        folder: Path | None = None,
        sampling: Sampling | None = None,
        on_progress: OnProgress | None = None,
    ) -> Evaluation:
        return evaluate(
            self._module,
            MemorySplit(x.detach().cpu(), y.detach().cpu().long()),
            attacks,
            cascade=True,
            sampling=sampling,
            batch_size=bs,
            seed=(self.seed or 0) if folder is not None else self.get_seed(),
            device=self.device,
            keep=True,
            folder=folder,
            on_progress=on_progress,
        )

    @torch.no_grad()
    def _adversarial(self, x: Tensor, y: Tensor, bs: int | None) -> tuple[Tensor, Tensor]:
        """Return adversarial inputs and their predictions, on the devices of inputs and labels."""
        assert self.evaluation.adversarial is not None
        x_adv = self.evaluation.adversarial.to(x.device, copy=True)
        with evaluation_mode(self._module):
            parts = torch.split(x_adv, bs or self.evaluation.batch_size)
            return x_adv, torch.cat([self._module(part.to(self.device)).argmax(1) for part in parts]).to(y)

    def _log(self, line: str) -> None:
        if is_main():
            self.logger.log(line, show=self.verbose)


class FunctionModule(nn.Module):
    """A function as a module; a method such as ``model.forward`` brings the weights of its model along.

    >>> len(list(FunctionModule(nn.Linear(2, 3).forward).parameters())), list(FunctionModule(torch.sin).parameters())
    (2, [])
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        owner = getattr(function, "__self__", None)
        self.owner = owner if isinstance(owner, nn.Module) else None

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Logger:
    """Prints lines and appends them to a file.

    Args:
        log_path: the file; None to only print.
    """

    def __init__(self, log_path: str | Path | None) -> None:
        self.log_path = None if log_path is None else Path(log_path)

    def log(self, line: str, *, show: bool = True) -> None:
        """Write a line to the file and, if ``show``, to the standard output."""
        if show:
            _print(line)
        if self.log_path is not None:
            with self.log_path.open("a") as file:
                file.write(line + "\n")


class CascadeLog:
    """Writes the lines of the original while a cascade runs.

    ``evaluate`` reports the number of points that an attack starts with, which are those that are still robust.  So the
    result of an attack is known as soon as the next one starts; that of the last one is known at the end.

    Args:
        write: writes a line.
        points: number of points.
    """

    def __init__(self, write: Callable[[str], None], points: int) -> None:
        self.write, self.points = write, points
        self.began = time.monotonic()
        self.starts: list[tuple[str, int]] | None = None  # of the attacks so far; None if the evaluation was resumed

    def on_progress(self, name: str, finished: float, total: int) -> None:
        """Log the last attack if a new one has started."""
        if name == "clean":
            self.starts = []
        elif self.starts is not None and name not in dict(self.starts):
            if self.starts:
                self._attack(*self.starts[-1], total, time.monotonic() - self.began)
            else:
                self._clean(total)
            self.starts.append((name, total))

    def finish(self, evaluation: Evaluation) -> None:
        """Log everything that is not in the log yet."""
        if not self.starts:
            self._clean(evaluation.clean.correct)
        logged, seconds = max(0, len(self.starts or ()) - 1), 0.0
        for number, result in enumerate(evaluation.attacks):
            seconds += result.seconds
            if number >= logged and result.attacked:
                self._attack(result.name, result.attacked, result.accuracy.correct, seconds, result.broken)
        for warning in evaluation.warnings:
            self.write(f"Warning: {warning.kind}: {warning.message}")

    def _clean(self, correct: int) -> None:
        self.write(f"initial accuracy: {correct / self.points:.2%}")

    def _attack(self, name: str, attacked: int, robust: int, seconds: float, broken: int | None = None) -> None:
        broken = attacked - robust if broken is None else broken
        self.write(f"{name.lower()} - 1/1 - {broken} out of {attacked} successfully perturbed")
        accuracy = f"{robust / self.points:.2%}"
        self.write(f"robust accuracy after {name.upper()}: {accuracy} (total time {seconds:.1f} s)")


def _as_device(value: torch.device | str | int) -> torch.device:
    """Return a device, or raise an InputError if it is not available."""
    device = torch.device("cuda", value) if isinstance(value, int) else value
    if isinstance(device, torch.device) and (device.type != "cuda" or torch.cuda.is_available()):
        return device
    return parse_device(str(device))


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
