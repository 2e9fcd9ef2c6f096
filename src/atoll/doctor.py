"""What this machine has, whether its accelerator agrees with the CPU, how fast it is, and what would make it faster."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from atoll.attacks import PGD
from atoll.certify import certifier_for
from atoll.data import Batch
from atoll.data.base import Data, MemorySplit, Splits
from atoll.display import Displayed, TextTable
from atoll.distributed import default_device
from atoll.losses import AT
from atoll.models import SmallConvNet
from atoll.precision import PRECISIONS, PrecisionCheck, probe
from atoll.threads import input_gradient, measure_threads, settle_threads
from atoll.threat import ThreatModel
from atoll.training.trainer import Trainer, TrainerSettings

PACKAGES = ("numpy", "scipy", "onnx", "onnxruntime", "plotly", "pandas", "timm", "ray")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "firefox")
COMPILERS = ("c++", "g++", "clang++")
CLASSES, STEPS = 10, 10
SMALL, MNIST = (1, 12, 12), (1, 28, 28)  # inputs of the network that is compared, and of the one that is timed
SECONDS = 8.0  # for the comparison with bare passes
Status = Literal["agrees", "differs", "skipped"]


@dataclass(frozen=True)
class Agreement:
    """A comparison of the accelerator with the CPU.

    Args:
        what: what is compared.
        status: the outcome.
        difference: the largest difference; of verdicts, the number of points.
        limit: the largest difference that rounding explains.
        reason: why the comparison was skipped.
    """

    what: str
    status: Status
    difference: float | None = None
    limit: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Pace:
    """How fast Atoll is compared with the passes of the model alone.

    Args:
        what: a training step, or an attack.
        images_per_second: of Atoll.
        ratio: time relative to the bare passes.
    """

    what: str
    images_per_second: float
    ratio: float


@dataclass(frozen=True)
class Diagnosis(Displayed):
    """The findings of ``diagnose``.

    Args:
        machine: processor, memory and load.
        software: versions; of programs, their paths; empty if something is missing.
        devices: names of all devices.
        device: the device that was examined.
        threads: the number of threads that is the fastest for a small network.
        precisions: of the device.
        agreements: comparisons of the accelerator with the CPU.
        paces: speeds compared with bare passes.
        advice: what would make it faster, one sentence each.
        seconds: duration of the examination.
    """

    machine: Mapping[str, str | int | float]
    software: Mapping[str, str]
    devices: Mapping[str, str]
    device: str
    threads: int
    precisions: tuple[PrecisionCheck, ...]
    agreements: tuple[Agreement, ...]
    paces: tuple[Pace, ...]
    advice: tuple[str, ...]
    seconds: float

    @property
    def is_sound(self) -> bool:
        """Whether no comparison shows a difference that rounding does not explain."""
        return all(agreement.status != "differs" for agreement in self.agreements)

    def table(self) -> TextTable:
        rows = [[name, str(value)] for facts in (self.machine, self.devices) for name, value in facts.items()]
        rows += [[name, value or "not installed"] for name, value in self.software.items()]
        rows.append(["threads for a small network", str(self.threads)])
        for precision in self.precisions:
            speed = precision.reason if precision.speed is None else f"{precision.speed:.2f} x the speed of float32"
            rows.append([f"{precision.name} on {self.device}", speed])
        for agreement in self.agreements:
            numbers = "" if agreement.difference is None else f" by {agreement.difference:.2g} of {agreement.limit:.2g}"
            rows.append([f"{agreement.what}, CPU and accelerator", agreement.reason or agreement.status + numbers])
        for pace in self.paces:
            rows.append([pace.what, f"{pace.images_per_second:,.0f} images/s, {pace.ratio:.2f} x its bare passes"])
        return TextTable(f"This machine, examined in {self.seconds:.0f} s", ["", "value"], rows, self.advice)


def diagnose(device: torch.device | None = None, on_step: Callable[[str], None] = lambda what: None) -> Diagnosis:
    """Examine this machine, which takes less than a minute.

    Args:
        device: the device to examine (default: ``default_device``); the CPU is the reference.
        on_step: called with the name of each step.
    """
    began, device = time.monotonic(), device or default_device()
    on_step("machine")
    facts, programs, devices = machine(), software(), find_devices()
    on_step("precisions")
    precisions = tuple(probe(device.type, name) for name in PRECISIONS) if device.type in ("cpu", "cuda", "mps") else ()
    on_step("agreement of CPU and accelerator")
    agreements = compare(device)
    on_step("threads")
    rows = 128 if device.type == "cpu" else 512
    net, x = _network(MNIST), _images(rows, MNIST)
    threads = measure_threads(lambda: input_gradient(net, x))
    settle_threads(None, device, net, lambda count: x[:count], rows)
    on_step("speed")
    paces = measure_paces(device, rows)
    usable = [precision for precision in precisions if device.type != "cpu" or precision.name == "bf16"]
    advice = tuple(advise(facts, devices, usable, threads))
    seconds = time.monotonic() - began
    return Diagnosis(
        facts, programs, devices, str(device), threads, precisions, agreements, paces, advice, seconds
    )  # fmt: skip


# --- facts -----------------------------------------------------------------------------------------------------------


def machine() -> dict[str, str | int | float]:
    """Processor, memory and load of this machine."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gigabytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": affinity,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "memory (GB)": round(gigabytes, 1),
        "load": round(os.getloadavg()[0], 2),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
    }


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def software() -> dict[str, str]:
    """Versions of packages and paths of programs; empty if something is missing."""
    versions = {"atoll": version("atoll"), "python": platform.python_version(), "torch": str(torch.__version__)}
    versions["cuda of torch"] = torch.version.cuda or ""
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = ""
    for name, programs in (("compiler", COMPILERS), ("browser", BROWSERS)):
        versions[name] = next((path for program in programs if (path := shutil.which(program))), "")
    return versions


def find_devices() -> dict[str, str]:
    """All devices that PyTorch can compute on."""
    devices = {"cpu": _processor()}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        about = f"{properties.total_memory / 2**30:.0f} GB, capability {properties.major}.{properties.minor}"
        devices[f"cuda:{index}"] = f"{properties.name}, {about}"
    if torch.backends.mps.is_available():
        devices["mps"] = "Apple GPU"
    return devices


# --- CPU and accelerator ---------------------------------------------------------------------------------------------


class _Noise(Data):
    """Images of noise, which need no files."""

    classes = tuple(map(str, range(CLASSES)))

    def load(self) -> Splits:
        split = MemorySplit((_images(64, MNIST) * 255).byte(), torch.arange(64) % CLASSES)
        return Splits(split, split)


def _images(rows: int, shape: tuple[int, ...]) -> Tensor:
    return torch.rand(rows, *shape, generator=torch.Generator().manual_seed(rows))


def _network(shape: tuple[int, ...]) -> SmallConvNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        widths, hidden = ((8, 16), 32) if shape == SMALL else ((16, 32), 100)
        net = SmallConvNet(shape, CLASSES, widths=widths, hidden=hidden).eval()
    with torch.no_grad():  # otherwise all images would get the same class
        net.head.bias -= net(_images(100, shape)).mean(0)
    return net


def compare(device: torch.device) -> tuple[Agreement, ...]:
    """Compare verdicts of an attack, gradients and certificates of a network on the CPU and on an accelerator."""
    names = ("verdicts", "gradients", "certificates")
    if device.type == "cpu":
        reason = "PyTorch finds no accelerator" if len(find_devices()) == 1 else "the CPU was selected"
        return tuple(Agreement(name, "skipped", reason=f"skipped: {reason}") for name in names)
    return tuple(_compare(name, device) for name in names)


def _compare(what: str, device: torch.device) -> Agreement:
    # TensorFloat-32, the default of convolutions on recent GPUs, has 10 bits, and many points are near a boundary.
    limits = {"verdicts": 10.0, "gradients": 1e-2, "certificates": 1e-6}
    try:
        difference = {"verdicts": _verdicts, "gradients": _gradients, "certificates": _certificates}[what](device)
    except (RuntimeError, TypeError, NotImplementedError) as error:  # an operation or type that the device lacks
        return Agreement(what, "skipped", reason=f"skipped: {' '.join(str(error).split())[:200]}")
    return Agreement(what, "agrees" if difference <= limits[what] else "differs", difference, limits[what])


def _both(device: torch.device) -> tuple[tuple[SmallConvNet, Tensor], ...]:
    """The network and its inputs on the CPU and on a device."""
    net, x = _network(SMALL), _images(100, SMALL)
    return (net, x), (copy.deepcopy(net).to(device), x.to(device))


def _verdicts(device: torch.device) -> float:
    """How many points are misclassified after an attack on one of both only."""
    survivors = []
    labels = _network(SMALL)(_images(100, SMALL)).argmax(1)
    for net, x in _both(device):
        y = labels.to(x.device)
        attack = PGD(ThreatModel("linf", 0.01, (0.0, 1.0)), steps=STEPS)
        survivors.append((net(attack(net, x, y)).argmax(1) == y).cpu())
    return float((survivors[0] != survivors[1]).sum())


def _gradients(device: torch.device) -> float:
    """The largest relative difference of the gradient of an image."""
    here, there = (input_gradient(net, x).cpu().double().flatten(1) for net, x in _both(device))
    return float(((here - there).norm(dim=1) / here.norm(dim=1)).max())


def _certificates(device: torch.device) -> float:
    """The largest relative difference of a certified radius; infinite if a prediction differs."""
    here, there = (certifier_for(net.double())(x.double()) for net, x in _both(device))
    if not torch.equal(here.prediction.cpu(), there.prediction.cpu()):
        return float("inf")
    radii = here.radius.cpu()
    return float(((radii - there.radius.cpu()).abs() / radii.clamp_min(1e-12)).max())


# --- speed -----------------------------------------------------------------------------------------------------------


def measure_paces(device: torch.device, rows: int) -> tuple[Pace, ...]:
    """Time a training step and an attack, compared with their passes alone, in alternating rounds."""
    net, x = _network(MNIST).to(device), _images(rows, MNIST).to(device)
    y = torch.arange(rows, device=device) % CLASSES
    trainer = Trainer(
        copy.deepcopy(net),
        _Noise(validation=0),
        AT(),
        ThreatModel("linf", "8/255"),
        attack=functools.partial(PGD, steps=STEPS),
        settings=TrainerSettings(batch_size=64),
        device=device,
    )
    batch = Batch(x, y, torch.arange(rows, device=device))
    attack = PGD(ThreatModel("linf", "8/255", (0.0, 1.0)), steps=STEPS)
    bare = copy.deepcopy(net).train()

    def gradients() -> Tensor:
        for _ in range(STEPS):
            last = input_gradient(net, x)
        return last

    def step() -> Tensor:
        gradients()
        bare.zero_grad()
        loss = F.cross_entropy(bare(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    cases: dict[str, tuple[Callable[[], object], Callable[[], Tensor]]] = {
        f"PGD-{STEPS} training step": (lambda: trainer.train_step(batch), step),
        f"PGD-{STEPS} attack": (lambda: attack(net, x, y), gradients),
    }
    paces = []
    for what, (ours, passes) in cases.items():
        seconds: list[tuple[float, float]] = []
        began = time.perf_counter()
        while len(seconds) < 3 or (len(seconds) < 15 and time.perf_counter() - began < SECONDS / 2):
            seconds.append((_seconds(ours, x), _seconds(passes, x)))
        rounds = seconds[1:]  # the first one warms up
        ratio = statistics.median(a / b for a, b in rounds)
        paces.append(Pace(what, rows / statistics.median(a for a, _ in rounds), ratio))
    return tuple(paces)


def _seconds(call: Callable[[], object], x: Tensor) -> float:
    """Duration of a call, and of everything that it started on the device."""
    began = time.perf_counter()
    call()
    x.flatten()[0].item()
    return time.perf_counter() - began


# --- advice ----------------------------------------------------------------------------------------------------------


def advise(
    facts: Mapping[str, str | int | float],
    devices: Mapping[str, str],
    precisions: Sequence[PrecisionCheck],
    threads: int,
) -> list[str]:
    """What would make it faster, one sentence each."""
    advice = []
    if len(devices) == 1 and shutil.which("nvidia-smi"):
        advice.append("This machine has NVIDIA tools, but PyTorch finds no GPU: install a build of PyTorch for CUDA.")
    elif len(devices) == 1:
        advice.append("PyTorch finds no accelerator: a GPU is many times as fast for all but the smallest networks.")
    load, cores = float(facts["load"]), int(facts["cores"])
    if load > 0.5 * cores + 1:
        advice.append(f"Other programs use this machine (load {load:g} on {cores} cores): stop them, and repeat this.")
    number = str(facts["OMP_NUM_THREADS"])
    if number.isdecimal() and int(number) > threads:
        advice.append(
            f"{threads} threads are as fast as {number} for small networks: unset OMP_NUM_THREADS, so that commands"
            " measure how many they need."
        )
    for precision in precisions:
        if precision.speed is not None and precision.speed > 1.2:
            speed = f"{precision.speed:.1f} times as fast as float32"
            advice.append(f"{precision.name} is {speed} here: train with trainer.precision={precision.name}.")
    return advice
