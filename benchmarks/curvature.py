"""Cost of all traces of PreActResNet-18 at 5 % error of WCI, compared with other methods and with training.

Slow methods are not run to the end: a few random vectors give the time and variance per vector, which determine the
time to reach the error.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from atoll.attacks import PGD
from atoll.curvature import EmpiricalRisk, traces, wci
from atoll.curvature.ggn import ggn_trace_samples
from atoll.curvature.risk import derivative
from atoll.data import Digits, batches
from atoll.losses import AT
from atoll.models import PreActResNet
from atoll.threat import ThreatModel
from atoll.training.trainer import Trainer, TrainerSettings
from atoll_papers.cost import Noise, peak_memory, seconds
from benchmarks.measure import Row
from benchmarks.peers import run_peer

WIDTH = 64  # the width of ResNet-18
POINTS = 64  # few are enough, because the cost per point is compared
DEFAULT_POINTS, EPOCH = 512, 50_000  # points for WCI during training, and images of CIFAR
BATCH = 32
ERROR = 0.05
THREAT = ThreatModel("linf", "8/255")


@functools.cache
def problem() -> EmpiricalRisk:
    """A briefly trained network, so that its spectrum is realistic, with adversarial inputs."""
    x, y = Digits().tensors("train", 40 * BATCH)
    x = F.interpolate(x, size=(32, 32), mode="bilinear").expand(-1, 3, -1, -1).contiguous()
    torch.manual_seed(0)
    model = PreActResNet((3, 32, 32), 10, width=WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for images, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return EmpiricalRisk.attacked(model.eval(), AT(), x[:POINTS], y[:POINTS], PGD(THREAT, steps=10))


def loop_over_layers() -> float:
    """Seconds to reach the same error of WCI with Hessian products for one layer at a time, over all points.

    The quadratic form of a layer has the same variance as the Gauss-Newton samples with all points in one group: both
    are sums of the same eigenvalues times squared Gaussians.
    """
    p = problem()
    everyone = torch.arange(POINTS)
    chosen = [i for i, name in enumerate(p.names) if name in p.matrices]
    samples = ggn_trace_samples(p, everyone, range(32), 0)[:, chosen] / POINTS
    norms = torch.stack([p.parameters[i].detach().norm().double() for i in chosen])
    slope = norms / (2 * samples.mean(0).sqrt())
    variance = float((slope.square() * samples.var(0)).sum())  # layers have independent vectors
    vectors = variance / (ERROR * wci(p).index.value) ** 2
    timed = chosen[:: max(1, len(chosen) // 4)]
    return max(1.0, vectors) * len(chosen) * sum(map(_layer_product, timed)) / len(timed)


def _layer_product(layer: int) -> float:
    p = problem()
    parameter = p.parameters[layer]

    def product() -> None:
        for index in torch.arange(POINTS).split(p.micro_batch):
            slope = derivative([p.losses(index).sum()], [parameter], create_graph=True)
            derivative(slope, [parameter], [torch.ones_like(parameter)])

    return seconds(product)


def pyhessian(vectors: int = 8) -> float:
    """Seconds until PyHessian's trace of the whole network reaches the error."""
    p = problem()
    assert p.x_adv is not None
    with tempfile.TemporaryDirectory() as folder:
        save_file(p.model.state_dict(), Path(folder) / "model.safetensors")
        save_file({"x": p.x_adv, "y": p.y}, Path(folder) / "points.safetensors")
        theirs = run_peer("pyhessian_trace", folder, WIDTH, p.micro_batch, vectors)
    spread = float(torch.tensor(theirs["traces"]).std()) / traces(p).total.value
    return float(theirs["seconds"]) / vectors * max(1.0, (spread / ERROR) ** 2)


def training_step() -> Callable[[], object]:
    data = Noise((3, 32, 32), BATCH)
    trainer = Trainer(
        PreActResNet((3, 32, 32), 10, width=WIDTH),
        data,
        AT(),
        THREAT,
        attack=lambda threat, objective: PGD(threat, objective, steps=10),
        settings=TrainerSettings(batch_size=BATCH),
        device="cpu",
    )
    batch = next(batches(data.train, [torch.arange(BATCH)]))
    return lambda: trainer.train_step(batch)


def index_step() -> Callable[[], object]:
    """WCI as measured during training, on a few points: two vectors for groups of eight, including the attack."""
    data = Noise((3, 32, 32), BATCH)
    model = PreActResNet((3, 32, 32), 10, width=WIDTH).eval()
    x, y = data.tensors("train", BATCH)

    def measure() -> None:
        made = EmpiricalRisk.attacked(model, AT(), x, y, PGD(THREAT, steps=10))
        wci(made, group=8, max_probes=2)

    return measure


def run() -> Iterator[Row]:
    p = problem()
    time = seconds(lambda: wci(p, relative_error=ERROR))
    result = wci(p, relative_error=ERROR)
    note = f"{time:.1f} s, {result.traces.probes} vectors, error {100 * result.index.relative_error:.1f} %"
    name = "loop over layers / all traces at once, time at 5 % error of WCI"
    yield Row(name, loop_over_layers() / time, 10, True, note)
    time, theirs = seconds(lambda: traces(p, relative_error=ERROR)), pyhessian()
    note = f"{time:.1f} s and {theirs:,.0f} s (extrapolated from the spread of 8 vectors)"
    yield Row("all traces / PyHessian's single trace, time at 5 % error", time / theirs, 1.0, note=note)
    step, index = training_step(), index_step()
    step(), index()
    share = DEFAULT_POINTS * seconds(index) / (EPOCH * seconds(step))
    yield Row(f"WCI with {DEFAULT_POINTS} points / PGD-10 epoch with {EPOCH:,} images, time", share, 0.05)
    memory = peak_memory(index_step, whole=True) / peak_memory(training_step, whole=True)
    yield Row(f"WCI / training step with {BATCH} images, peak memory", memory, 1.3)
