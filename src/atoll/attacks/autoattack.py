"""AutoAttack with the interface of the original package, for existing scripts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, overload

import torch
from torch import Tensor, nn

from atoll.attacks.base import Attack
from atoll.attacks.diagnostics import is_randomized
from atoll.attacks.evaluate import PROBE, Evaluation, evaluate
from atoll.attacks.sampling import Sampling
from atoll.attacks.suites import get_attack, sampling_for, suite
from atoll.data.base import MemorySplit
from atoll.errors import InputError
from atoll.modules import evaluation_mode
from atoll.threat import Norm, ThreatModel

NORMS: dict[str, Norm] = {"Linf": "linf", "L2": "l2", "L1": "l1", "linf": "linf", "l2": "l2", "l1": "l1"}


class AutoAttack:
    """Robust accuracy under an ensemble of attacks; a drop-in replacement for the original ``AutoAttack``.

    Args:
        model: maps inputs in [0, 1] to logits.
        norm: ``Linf``, ``L2`` or ``L1``.
        eps: radius, a number or a fraction like ``"8/255"``.
        seed: seed of the random streams; None is the same as 0.
        verbose: print the accuracy after each attack, as the original does.
        attacks_to_run: names of attacks, for ``version="custom"``.
        version: ``standard``, ``plus``, ``rand``, ``fast`` or ``custom``.
        device: where to compute; None for the device of the model.
        log_path: file to which the lines printed by ``verbose`` are appended.

    After a run, the attribute ``evaluation`` contains intervals, model passes and warnings.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> adversary = AutoAttack(model, norm="Linf", eps="8/255", version="fast", verbose=False)
    >>> x = torch.rand(5, 1, 2, 2)
    >>> adversary.run_standard_evaluation(x, model(x).argmax(1), bs=5).shape
    torch.Size([5, 1, 2, 2])
    """

    evaluation: Evaluation

    def __init__(
        self,
        model: nn.Module,
        norm: str = "Linf",
        eps: float | str = 0.3,
        seed: int | None = None,
        verbose: bool = True,
        attacks_to_run: Sequence[str] = (),
        version: str = "standard",
        device: torch.device | str | None = None,
        log_path: str | Path | None = None,
    ) -> None:
        if norm not in NORMS:
            raise InputError(f"norm: expected Linf, L2 or L1, got {norm!r}")
        if attacks_to_run and version != "custom":
            raise InputError(f"attacks_to_run: expected version='custom', got version={version!r}")
        self.model = model
        self.threat = ThreatModel(NORMS[norm], eps)
        self.seed = seed or 0
        self.verbose = verbose
        self.version = version
        custom = {name: get_attack(name, self.threat) for name in attacks_to_run}
        self.attacks = custom if version == "custom" else suite(version, self.threat)
        if not self.attacks:
            raise InputError("attacks_to_run: expected at least one attack, got none")
        self.device = torch.device(device or next((parameter.device for parameter in model.parameters()), "cpu"))
        self.log_path = Path(log_path) if log_path is not None else None

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
        folder = Path(state_path) if state_path else None
        randomized = self.version == "fast" and is_randomized(self.model, x_orig[:PROBE].to(self.device))
        sampling = sampling_for(self.version, self.threat, randomized=randomized)
        self.evaluation = self._evaluate(self.attacks, x_orig, y_orig, bs, folder, sampling)
        self._log(f"initial accuracy: {100 * self.evaluation.clean.value:.2f}%")
        seconds = 0.0
        for result in self.evaluation.attacks:
            seconds += result.seconds
            accuracy = f"{100 * result.accuracy.value:.2f}%"
            self._log(f"robust accuracy after {result.name}: {accuracy} (total time {seconds:.1f} s)")
        for warning in self.evaluation.warnings:
            self._log(f"{warning.kind}: {warning.message}")
        self._log(f"robust accuracy: {100 * self.evaluation.robust.value:.2f}%")
        if self.evaluation.estimate is not None:
            self._log(f"estimate: {self.evaluation.estimate}")
        return self._adversarial(x_orig, bs, return_labels)

    def run_standard_evaluation_individual(
        self, x_orig: Tensor, y_orig: Tensor, bs: int | None = 250, return_labels: bool = False
    ) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        """Run each attack on all correctly classified points and return adversarial inputs by attack name."""
        results: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
        for name, one in self.attacks.items():
            self.evaluation = self._evaluate({name: one}, x_orig, y_orig, bs)
            self._log(f"robust accuracy by {name.upper()}: {100 * self.evaluation.robust.value:.2f}%")
            results[name] = self._adversarial(x_orig, bs, return_labels)
        return results

    def clean_accuracy(self, x_orig: Tensor, y_orig: Tensor, bs: int | None = 250) -> float:
        """Return the accuracy without attack."""
        return self._evaluate({}, x_orig, y_orig, bs).clean.value

    def _evaluate(
        self,
        attacks: dict[str, Attack],
        x: Tensor,
        y: Tensor,
        bs: int | None,
        folder: Path | None = None,
        sampling: Sampling | None = None,
    ) -> Evaluation:
        split = MemorySplit(x.detach().cpu(), y.detach().cpu().long())
        return evaluate(
            self.model,
            split,
            attacks,
            cascade=True,
            sampling=sampling,
            batch_size=bs,
            seed=self.seed,
            device=self.device,
            keep=True,
            folder=folder,
        )

    @torch.no_grad()
    def _adversarial(self, x: Tensor, bs: int | None, return_labels: bool) -> Tensor | tuple[Tensor, Tensor]:
        """Return adversarial inputs on the device of the clean ones and, if requested, their predictions."""
        assert self.evaluation.adversarial is not None
        x_adv = self.evaluation.adversarial.to(x.device, copy=True)
        if not return_labels:
            return x_adv
        with evaluation_mode(self.model):
            parts = torch.split(x_adv, bs or len(x_adv))
            return x_adv, torch.cat([self.model(part.to(self.device)).argmax(1) for part in parts]).to(x.device)

    def _log(self, line: str) -> None:
        if self.verbose:
            sys.stdout.write(line + "\n")
        if self.log_path is not None:
            with self.log_path.open("a") as file:
                file.write(line + "\n")
