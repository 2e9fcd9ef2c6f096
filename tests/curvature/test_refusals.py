"""What cannot be measured is refused in one sentence."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from atoll.curvature import (
    EmpiricalRisk,
    density,
    gibbs_risk,
    hessian,
    pac_bayes,
    top_eigenvalues,
    traces,
    wci,
    weight_landscape,
)
from atoll.curvature.ggn import diagonal
from atoll.curvature.pac_bayes import pac_bayes_proof
from atoll.errors import InputError
from atoll.losses import Loss, Outputs, Standard, Term


def make_risk(model: nn.Module | None = None, y: Tensor | None = None, loss: Loss | None = None) -> EmpiricalRisk:
    model = nn.Linear(2, 3) if model is None else model
    y = torch.arange(4) % 3 if y is None else y
    return EmpiricalRisk(model.eval(), loss or Standard(), torch.rand(4, 2), y)


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 3, sparse=True)

    def forward(self, x):
        return self.table(x[:, 0].long())


class Expanded(nn.Linear):
    def __init__(self):
        super().__init__(2, 3)
        self.bias = nn.Parameter(torch.zeros(1).expand(3))


class Kink(nn.Linear):
    """Finite logits and gradients; the second derivative of |z|^1.5 is infinite at zero."""

    def forward(self, x):
        z = super().forward(x)
        return z + (0 * z).abs().pow(1.5)


class Negative(Term):
    def value(self, out: Outputs, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.g, y, reduction="none") - 5


class NegativeLoss(Loss):
    def __init__(self) -> None:
        super().__init__(ce=(1.0, Negative()))


WHOLE = "expected an integer >="
NOT_FINITE = "the loss or its derivatives are not finite"
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "float labels": (
        lambda: make_risk(y=torch.rand(4)),
        r"labels: expected one int64 class .* float32 of shape \(4,\)",
    ),
    "int32 labels": (lambda: make_risk(y=torch.zeros(4).int()), "labels: expected one int64 class .* got int32"),
    "labels in a column": (
        lambda: make_risk(y=torch.zeros(4, 1).long()),
        r"labels: expected one int64 class per point or 3 probabilities, got int64 of shape \(4, 1\)",
    ),
    "labels of other classes": (lambda: make_risk(y=torch.rand(4, 5)), r"or 3 probabilities, got float32 of shape"),
    "tuple of outputs": (lambda: make_risk(Pair(2, 3)), r"model: expected logits of shape .*, got tuple"),
    "bfloat16": (lambda: make_risk(nn.Linear(2, 3).bfloat16()), "expected float32 or .*, but weight is bfloat16"),
    "float16": (lambda: make_risk(nn.Linear(2, 3).half()), "expected float32 or float64 .*, but weight is float16"),
    "expanded parameters": (lambda: make_risk(Expanded()), "parameters with their own memory, but bias is an exp"),
    "sparse gradients": (lambda: traces(make_risk(Sparse())), "model: expected dense gradients, got sparse ones"),
    "sparse gradients, eigenvalues": (lambda: top_eigenvalues(make_risk(Sparse()), 1), "expected dense gradients"),
    "sparse gradients, Hessian": (lambda: hessian(make_risk(Sparse())), "model: expected dense gradients"),
    "group": (lambda: traces(make_risk(), group=2.5), f"group: {WHOLE} 1, got 2.5"),
    "group of wci": (lambda: wci(make_risk(), group="2"), f"group: {WHOLE} 1, got '2'"),
    "max_probes": (lambda: traces(make_risk(), max_probes=2.5), f"max_probes: {WHOLE} 2, got 2.5"),
    "micro_batch": (
        lambda: EmpiricalRisk(nn.Linear(2, 3).eval(), Standard(), torch.rand(1, 2), torch.tensor([0]), micro_batch=1.5),
        f"micro_batch: {WHOLE} 1, got 1.5",
    ),
    "count": (lambda: top_eigenvalues(make_risk(), 1.5), f"count: {WHOLE} 1, got 1.5"),
    "steps": (lambda: density(make_risk(), steps=2.5), f"steps: {WHOLE} 1, got 2.5"),
    "steps of a landscape": (lambda: weight_landscape(make_risk(), steps=3.0), f"steps: {WHOLE} 3, got 3.0"),
    "even steps": (lambda: weight_landscape(make_risk(), steps=4), "steps: expected an odd number, .* got 4"),
    "probes": (lambda: diagonal(make_risk(), probes=1.5), f"probes: {WHOLE} 1, got 1.5"),
    "draws": (lambda: pac_bayes_proof(make_risk(), 1.0, draws=2.5), f"draws: {WHOLE} 1, got 2.5"),
    "pairs": (lambda: pac_bayes(make_risk(), 1.0, pairs=2.5), f"pairs: {WHOLE} 2, got 2.5"),
    "eigenvalues": (lambda: top_eigenvalues(make_risk(Kink(2, 3)), 1), NOT_FINITE),
    "density": (lambda: density(make_risk(Kink(2, 3))), NOT_FINITE),
    "rows": (lambda: hessian(make_risk(), rows=[99]), r"rows: expected integers in \[0, 8\], got \[99\]"),
    "negative rows": (lambda: hessian(make_risk(), rows=[-1]), r"rows: expected integers in \[0, 8\], got \[-1\]"),
    "rows that are not whole": (lambda: hessian(make_risk(), rows=[0.5]), r"rows: expected integers"),
    "negative loss": (
        lambda: pac_bayes(make_risk(loss=NegativeLoss()), 1.0),
        r"loss: PAC-Bayes bounds require a loss >= 0, got -\d",
    ),
    "proof with a negative loss": (
        lambda: pac_bayes_proof(make_risk(loss=NegativeLoss()), 1.0),
        "loss: PAC-Bayes bounds require a loss >= 0",
    ),
    "diagonal": (
        lambda: pac_bayes(make_risk(), 1.0, [torch.ones(2)]),
        "diagonal: expected one tensor per parameter, of the same shape",
    ),
    "diagonal of a proof": (
        lambda: pac_bayes_proof(make_risk(), 1.0, [torch.ones(3, 2), torch.ones(2)]),
        "diagonal: expected one tensor per parameter, of the same shape",
    ),
    "deviations": (lambda: gibbs_risk(make_risk(), [torch.ones(1)]), "deviations: expected one tensor per parameter"),
    "seed": (lambda: traces(make_risk(), seed=frozenset("ab")), "seed: expected numbers, strings or tuples of them"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    attempt, sentence = REFUSED[name]
    with pytest.raises(InputError, match=sentence):
        attempt()
