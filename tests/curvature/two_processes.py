"""Run by torchrun from test_risk.py: everything that is summed over points, written by rank 0."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from atoll.attacks import PGD
from atoll.curvature import (
    EmpiricalRisk,
    HessianProducts,
    density,
    hessian,
    pac_bayes,
    robust_gap,
    top_eigenvalues,
    traces,
    wci,
    weight_landscape,
)
from atoll.curvature.ggn import diagonal
from atoll.curvature.risk import flatten
from atoll.distributed import is_main, process_group
from atoll.threat import ThreatModel
from curvature.cases import make_risk


def measure() -> dict[str, torch.Tensor]:
    given = make_risk("conv-bn", "trades", points=7)
    attack = PGD(ThreatModel("linf", 0.1), "kl", steps=2)
    p = EmpiricalRisk.attacked(given.model, given.loss, given.x, given.y, attack, micro_batch=2)
    gauss_newton = traces(p, group=2, max_probes=5)
    smooth = traces(make_risk("vit", points=7), group=2, max_probes=5)
    bounds = pac_bayes(p, gauss_newton.total.value, pairs=2)[0]
    gap = robust_gap(p.model, (p.x, p.y), (p.x[:3], p.y[:3]), attack, batch_size=2)
    numbers = [wci(p, "exact").index.value, bounds.catoni, bounds.noisy.value, gap.loss.value]
    tensors = {
        "adversarial": p.x_adv,
        "values": p.values(),
        "gradient": flatten(p.gradient()),
        "product": flatten(HessianProducts(p)(p.parameters)),
        "hessian": hessian(p),
        "gauss-newton": gauss_newton.values,
        "gauss-newton, errors": gauss_newton.errors,
        "hutchinson": smooth.values,
        "hutchinson, errors": smooth.errors,
        "diagonal": flatten(diagonal(p, probes=2, group=2)),
        "eigenvalues": torch.from_numpy(top_eigenvalues(p, 2, tolerance=1e-12).copy()),
        "density": torch.tensor(density(p, vectors=1, steps=3).moment(2)),
        "landscape": weight_landscape(p, steps=3).loss,
        "numbers": torch.tensor(numbers, dtype=torch.float64),
    }
    return {name: value.detach().contiguous() for name, value in tensors.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with process_group():
        results = measure()
    if is_main():
        save_file(results, Path(sys.argv[1]))
