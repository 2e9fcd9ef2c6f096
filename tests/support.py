"""Small data, models and trainers that many tests share."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import atoll
from atoll.attacks import PGD
from atoll.data import Data, MemorySplit, Splits, batches
from atoll.data.base import in_order
from atoll.files import sha256, write_record
from atoll.losses import (
    ALP,
    AT,
    EMMA,
    MART,
    TRADES,
    CentroidMargin,
    FixedMarginCE,
    GloRoCE,
    GloRoTRADES,
    LipschitzMargin,
    LogitAnnealing,
    Loss,
    Outputs,
    Standard,
)
from atoll.models import CentroidNet, SmallConvNet
from atoll.threat import ThreatModel
from atoll.training.methods import (
    AWP,
    AWPT,
    RAT,
    S2O,
    SAM,
    SWA,
    CutMix,
    EarlyStopping,
    EpsRamp,
    GaussianNoise,
    Lookahead,
    MeasureWCI,
    Mixup,
    TrH,
    WCISchedule,
)
from atoll.training.trainer import Trainer, TrainerSettings

# A new loss or method joins every test of the trainer (resume, processes, accumulation) by one line.
LOSSES = {"standard": Standard, "at": AT, "trades": TRADES, "alp": ALP, "mart": MART}
# Losses of clean logits for networks with a known Lipschitz constant.
ANNEALED = {"logit-annealing": lambda: LogitAnnealing(offset=0.5, beta=2.0)}
# Losses of logits and Lipschitz constants; they have no attack and no curvature in logit space alone.
CERTIFIED = {
    "gloro-ce": GloRoCE,
    "gloro-trades": lambda: GloRoTRADES(lambda_t=1.5),
    "emma": EMMA,
    "fixed-margin": FixedMarginCE,
    "lipschitz-margin": LipschitzMargin,
}
# The same for Centroid Nets, whose losses see centroids as well.
CENTROID = {"centroid-margin": CentroidMargin}
METHODS = {
    "lookahead": lambda: Lookahead(k=2),
    "early-stopping": lambda: EarlyStopping(patience=50),
    "mixup": Mixup,
    "cutmix": CutMix,
    "gaussian-noise": GaussianNoise,
    "trh": lambda: TrH(lambda_=1e-3, schedule="linear", gamma=1e-3),
    "awp": AWP,
    "awpt": AWPT,
    "sam": SAM,
    "swa": lambda: SWA(alpha=0.8),
    "s2o": S2O,
    "s2o-text": lambda: S2O(reading="text"),
    "rat": RAT,
    "rat-paper": lambda: RAT(reading="paper"),
    "rat-exact": lambda: RAT(terms="exact", reading="paper"),
    "measure-wci": lambda: MeasureWCI(points=12, gap=True),
    "wci-schedule": lambda: WCISchedule(threshold=0.5, start=0.3, points=12),
}
TOGETHER = tuple({type(make()): name for name, make in METHODS.items()}.values())  # a run uses a method only once


def rewrite(path: Path, tree: dict) -> None:
    """Write a record with a checksum that matches, whatever it holds."""
    kind = json.loads(path.read_text())["record"]
    write_record(path, kind, {name: value for name, value in tree.items() if name not in ("record", "checksum")})


def renew_digests(path: Path) -> None:
    """Record the current digests of the files of a result in its ``result.json``."""
    files = [file for pattern in ("*.npz", "*.safetensors") for file in path.parent.glob(pattern)]
    change(path, files={file.name: sha256(file) for file in files})


def change(path: Path, **values) -> None:
    """Change a record and its checksum, as if it had been written like this."""
    rewrite(path, json.loads(path.read_text()) | values)


# A training of a few seconds, as words of the command.
SMALL = [
    "digits-at", "data.limit=128", "model.widths=[4,4]", "attack.steps=2", "trainer.epochs=3", "trainer.batch_size=32",
    "trainer.validation_steps=1", "trainer.test_steps=2",
]  # fmt: skip


class TinyData(Data):
    """96 training and 32 test images of 1x8x8 pixels in three classes that a small net can tell apart."""

    double = False  # float64 instead of uint8, for comparisons that must not drown in rounding

    @property
    def classes(self) -> tuple[str, ...]:
        return ("a", "b", "c")

    def load(self) -> Splits:
        draw = torch.Generator().manual_seed(0)
        labels = torch.arange(128) % 3
        images = torch.randint(0, 120, (128, 1, 8, 8), generator=draw, dtype=torch.uint8)
        for k in range(3):
            images[labels == k, :, 2 * k : 2 * k + 3] += 100
        whole = MemorySplit(images.double() / 255 if self.double else images, labels)
        return Splits(whole.take(torch.arange(96)), whole.take(torch.arange(96, 128)))


def tiny_model(batch_norm: bool = False) -> SmallConvNet:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return SmallConvNet((1, 8, 8), 3, widths=(4, 8), hidden=8, batch_norm=batch_norm)


def tiny_centroid_net(batch_norm: bool = False) -> CentroidNet:
    def encoder(shape, classes):
        return SmallConvNet(shape, classes, widths=(4, 8), hidden=8, batch_norm=batch_norm)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return CentroidNet((1, 8, 8), 3, per_class=4, encoder=encoder)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def first_batch(trainer, device="cpu"):
    """The first sixteen points, as a step gets them."""
    return next(batches(trainer.data.train, in_order(16, 16), device=device))


def tiny_trainer(
    loss="at",
    *,
    methods=(),
    folder=None,
    batch_norm=False,
    optimizer=None,
    observers=(),
    double=False,
    device="cpu",
    **settings,
):
    defaults = {"epochs": 3, "batch_size": 16, "validation_steps": 2, "test_steps": 3, "log_every": 1}
    model = tiny_centroid_net(batch_norm) if loss in CENTROID else tiny_model(batch_norm)
    data = TinyData(validation=1 / 6)
    if double:
        model, data.double = model.double(), True
    return Trainer(
        model,
        data,
        (LOSSES | ANNEALED | CERTIFIED | CENTROID)[loss](),
        ThreatModel("l2" if loss in ANNEALED | CERTIFIED | CENTROID else "linf", 0.1),
        attack=lambda threat, objective: PGD(threat, objective, steps=3),
        methods=[EpsRamp() if name == "eps-ramp" else METHODS[name]() for name in methods],
        optimizer=optimizer or (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
        settings=TrainerSettings(**defaults | settings),
        folder=folder,
        observers=observers,
        device=device,
    )


def weights(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_identical(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Every bit of every tensor."""
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different, f"different: {different}"


def run_command(*words: str, processes: int = 1, check: bool = False, cwd: Path | None = None, **environment: str):
    """The command ``atoll`` as a user would run it, in a process of its own."""
    launcher = [sys.executable, "-m"]
    if processes > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    result = subprocess.run(
        [*launcher, "atoll", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=240,
        env=script_environment() | environment,
        check=False,
    )
    if check:
        assert result.returncode == 0, result.stderr
    return result


def fork(task: Callable[[], object], errors: Path, **environment: str) -> BaseProcess:
    """Start a task in a process of its own that need not import PyTorch, because it is a copy of this one.

    What the task returns is the exit code.  Its standard error is written to the file ``errors``.
    """

    def run() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(environment)
        with open(os.devnull, "w") as sys.stdout, errors.open("w") as sys.stderr:
            try:
                sys.exit(task())
            except Exception:
                traceback.print_exc()
                raise

    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    process.start()
    return process


def on_two_processes(task: Callable[[], object], folder: Path) -> None:
    """Run a task on two processes that can join each other as if torchrun had started them."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    errors = [folder / f"errors-{rank}" for rank in range(2)]
    processes = [
        fork(task, path, WORLD_SIZE="2", RANK=str(rank), LOCAL_RANK=str(rank), **meeting)
        for rank, path in enumerate(errors)
    ]
    for process in processes:
        process.join(240)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0], "".join(path.read_text() for path in errors)


def script_environment() -> dict[str, str]:
    """For scripts that import from tests/: they also get the Atoll that the tests have."""
    paths = [str(Path(__file__).parent), str(Path(atoll.__file__).parents[1])]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def naive_loss(loss: Loss, g: torch.Tensor, g_adv: torch.Tensor, y: torch.Tensor, stop: bool = False) -> torch.Tensor:
    """The losses of the papers, written down once more without any care for numerics or gradients.

    With ``stop`` the clean prediction is constant where it is compared with the adversarial one.
    """
    if isinstance(loss, LogitAnnealing):
        t = loss.terms["ce"][1]
        rows = (
            (f - t.offset * torch.eye(len(f), dtype=f.dtype)[k]).div(t.temperature) for f, k in zip(g, y, strict=True)
        )
        p_y = torch.stack([row.exp()[k] / row.exp().sum() for row, k in zip(rows, y, strict=True)])
        return -t.temperature * (1 - p_y) ** t.beta * p_y.log()
    p, q = g.softmax(1), g_adv.softmax(1)
    p_y, q_y = p.gather(1, y[:, None])[:, 0], q.gather(1, y[:, None])[:, 0]
    if stop:
        p = p.detach()
    kl = (p * (p / q).log()).sum(1)
    others = torch.stack([torch.cat([row[:label], row[label + 1 :]]).max() for row, label in zip(q, y, strict=True)])
    weight = [weight for weight, _ in loss.terms.values()][-1]
    return {
        "Standard": -p_y.log(),
        "AT": -q_y.log(),
        "TRADES": -p_y.log() + weight * kl,
        "ALP": -q_y.log() + weight * ((p - q) ** 2).sum(1),
        "MART": -q_y.log() - (1 - others).log() + weight * (1 - p.gather(1, y[:, None])[:, 0]) * kl,
    }[type(loss).__name__]


def naive_margin(loss: Loss, z: torch.Tensor, centroids: torch.Tensor, y: torch.Tensor, margin: float) -> torch.Tensor:
    """The same for Centroid Nets, one example and one pair of centroids at a time."""
    term, values = loss.terms["margin"][1], []
    for point, label in zip(z, y.tolist(), strict=True):
        others = centroids[[j for j in range(len(centroids)) if j != label]].flatten(0, 1)
        near = sorted(others, key=lambda c: float((point - c).norm().detach()))[: term.others]
        radii = []
        for p in sorted(centroids[label], key=lambda p: float((point - p).norm().detach()))[: term.own]:
            radii.append(min(((point - c).norm() ** 2 - (point - p).norm() ** 2) / (2 * (p - c).norm()) for c in near))
        values.append(term.tau * (1 + ((term.target - max(radii) / margin) / term.tau).exp()).log())
    return torch.stack(values)


def naive_certified(loss: Loss, out: Outputs, y: torch.Tensor) -> torch.Tensor:
    """The same for losses with Lipschitz constants, one example at a time."""
    values = []
    for f, label in zip(out.logits, y.tolist(), strict=True):
        classes, top = range(len(f)), int(f.argmax())
        abstain = torch.stack([f[i] + out.certified_margin[top, i] for i in classes if i != top]).max()
        rest, margin = f.exp().sum(), out.certified_margin[label]
        gains = {
            "EMMA": [((f[label] - f[i]) / margin[i]).clamp(0, 1).detach() * margin[i] if i != label
                     else 0.0 for i in classes],
            "FixedMarginCE": list(margin),
            "LipschitzMargin": [0.0 if i == label else 2**0.5 * out.certified_margin_all for i in classes],
        }  # fmt: skip
        name = type(loss).__name__
        if name == "GloRoCE":
            values.append(-(f[label].exp() / (rest + abstain.exp())).log())
        elif name == "GloRoTRADES":
            weight = loss.terms["abstain"][0]
            abstains = abstain.exp() / (rest + abstain.exp())
            values.append(-(f[label].exp() / rest).log() - weight * (1 - abstains).log())
        else:
            total = sum((f[i] + gain).exp() for i, gain in enumerate(gains[name]))
            values.append(-(f[label].exp() / total).log())
    return torch.stack(values)


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def gloo_threads() -> list[str]:
    """Threads of this process that only end with its process group."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo" in name]
