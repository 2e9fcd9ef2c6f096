"""Every loss and term against dense autograd in float64."""

import math
from decimal import Decimal, localcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import InputError
from atoll.losses import (
    ALP,
    AT,
    KL,
    MART,
    TRADES,
    AbstainCrossEntropy,
    Abstention,
    AnnealedCrossEntropy,
    CrossEntropy,
    DynamicMargin,
    FixedMargin,
    GlobalMargin,
    GloRoTRADES,
    LogitAnnealing,
    Loss,
    Margin,
    Outputs,
    Pairing,
    Standard,
    Term,
    WeightedKL,
    autograd_curvature,
)
from support import naive_loss

# A new loss or term joins every test below by one line.
LOSSES = {
    "standard": Standard(),
    "at": AT(),
    "trades": TRADES(),
    "trades-stopped": TRADES(lambda_t=3.0, stop_clean_gradient=True),
    "alp": ALP(lambda_a=0.7),
    "alp-stopped": ALP(stop_clean_gradient=True),
    "mart": MART(lambda_m=5.0),
    "mart-stopped": MART(stop_clean_gradient=True),
    "logit-annealing": LogitAnnealing(),
    "logit-annealing-cross-entropy": LogitAnnealing(temperature=2.0, offset=0.0, beta=0.0),
}
TERMS = {
    "ce-clean": CrossEntropy("clean"),
    "ce-adversarial": CrossEntropy("adversarial"),
    "kl": KL(),
    "kl-stopped": KL(stop_clean_gradient=True),
    "pairing": Pairing(),
    "pairing-stopped": Pairing(stop_clean_gradient=True),
    "margin": Margin(),
    "wkl": WeightedKL(),
    "wkl-stopped": WeightedKL(stop_clean_gradient=True),
    "annealed-ce": AnnealedCrossEntropy(temperature=0.5, offset=1.0, beta=3.0),
}

shapes = st.tuples(st.integers(1, 4), st.integers(2, 7), st.floats(0.1, 6.0), st.integers(0, 10**6))


def logits(batch: int, classes: int, scale: float, seed: int):
    draw = torch.Generator().manual_seed(seed)
    g, g_adv = (scale * torch.randn(2, batch, classes, generator=draw, dtype=torch.float64)).unbind()
    return g, g_adv, torch.randint(classes, (batch,), generator=draw)


def dense(term: Term | Loss, g, g_adv, y):
    """All second derivatives of one example's loss by torch.func, then the three diagonals."""

    def value(both):
        out = Outputs(logits=both[None, 0], adv_logits=both[None, 1])
        result = term.value(out, y[None]) if isinstance(term, Term) else sum(term.values(out, y[None]).values())
        return result.squeeze()

    hessian = torch.autograd.functional.hessian(value, torch.stack([g, g_adv]))
    return torch.stack([hessian[0, :, 0].diagonal(), hessian[0, :, 1].diagonal(), hessian[1, :, 1].diagonal()])


def stack(curvature, like):
    parts = (curvature.clean, curvature.cross, curvature.adversarial)
    return torch.stack([torch.zeros_like(like) if part is None else part for part in parts], dim=1)


@pytest.mark.parametrize("name", [*LOSSES, *TERMS])
@settings(deadline=None, max_examples=25)
@given(shape=shapes)
def test_curvature_is_the_diagonal_of_the_dense_hessian(name, shape):
    term = LOSSES.get(name) or TERMS[name]
    g, g_adv, y = logits(*shape)
    truth = torch.stack([dense(term, *example) for example in zip(g, g_adv, y, strict=True)])
    closed = stack(term.curvature(Outputs(logits=g, adv_logits=g_adv), y), g)
    torch.testing.assert_close(closed, truth, rtol=1e-10, atol=1e-10)
    if isinstance(term, Term):
        automatic = stack(autograd_curvature(term, Outputs(logits=g, adv_logits=g_adv), y), g)
        torch.testing.assert_close(automatic, truth, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", TERMS)
def test_closed_and_automatic_curvature_have_the_same_gradient(name):
    """TrH trains through the curvature, so its own derivative has to be right as well."""
    term = TERMS[name]
    gradients = []
    for curvature in (term.curvature, lambda out, y, term=term: autograd_curvature(term, out, y)):
        g, g_adv, y = logits(3, 5, 1.5, 0)
        g.requires_grad_(), g_adv.requires_grad_()
        total = stack(curvature(Outputs(logits=g, adv_logits=g_adv), y), g).square().sum()
        grads = torch.autograd.grad(total, (g, g_adv), allow_unused=True)
        gradients.append(torch.stack([torch.zeros_like(g) if d is None else d for d in grads]))
    if "stopped" in name:  # "stopped" holds p constant in the closed form's derivative only where the term does
        gradients = [d[1] for d in gradients]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", LOSSES)
@settings(deadline=None, max_examples=25)
@given(shape=shapes)
def test_value_is_the_formula_of_the_paper(name, shape):
    g, g_adv, y = logits(*shape)
    value = sum(LOSSES[name].values(Outputs(logits=g, adv_logits=g_adv), y).values())
    torch.testing.assert_close(value, naive_loss(LOSSES[name], g, g_adv, y), rtol=1e-8, atol=1e-9)


# The same terms without a thought for rounding, for numbers with hundreds of digits.


def softmax(logits):
    powers = [(g - max(logits)).exp() for g in logits]
    return [power / sum(powers) for power in powers]


def divergence(g, g_adv):
    return sum(p * (p / q).ln() for p, q in zip(softmax(g), softmax(g_adv), strict=True))


def abstain(g):
    return max(other + 1 for k, other in enumerate(g) if k != g.index(max(g)))


def annealed(g, y):
    p = softmax([2 * (f - (k == y)) for k, f in enumerate(g)])[y]
    return -((1 - p) ** 3) * p.ln() / 2


DECIMAL = {
    "ce-clean": lambda g, g_adv, y: -softmax(g)[y].ln(),
    "ce-adversarial": lambda g, g_adv, y: -softmax(g_adv)[y].ln(),
    "kl": lambda g, g_adv, y: divergence(g, g_adv),
    "pairing": lambda g, g_adv, y: sum((p - q) ** 2 for p, q in zip(softmax(g), softmax(g_adv), strict=True)),
    "margin": lambda g, g_adv, y: -(1 - max(q for k, q in enumerate(softmax(g_adv)) if k != y)).ln(),
    "wkl": lambda g, g_adv, y: (1 - softmax(g)[y]) * divergence(g, g_adv),
    "annealed-ce": lambda g, g_adv, y: annealed(g, y),
    "abstain-ce": lambda g, g_adv, y: -softmax([*g, abstain(g)])[y].ln(),
    "abstention": lambda g, g_adv, y: -(1 - softmax([*g, abstain(g)])[-1]).ln(),
    "fixed-margin": lambda g, g_adv, y: -softmax([f + (k != y) for k, f in enumerate(g)])[y].ln(),
    "global-margin": lambda g, g_adv, y: -softmax([f + (k != y) for k, f in enumerate(g)])[y].ln(),
}
CERTIFIED = {
    "abstain-ce": AbstainCrossEntropy(),
    "abstention": Abstention(),
    "fixed-margin": FixedMargin(),
    "global-margin": GlobalMargin(),
}


def decimal_curvatures(term, both, y, h):
    """Sums over classes of the three diagonals, by differences; both is one list, clean logits first."""
    classes = len(both) // 2

    def value(*moves):
        moved = list(both)
        for k, move in moves:
            moved[k] += move
        return term(moved[:classes], moved[classes:], y)

    here = value()
    second = [(value((k, h)) - 2 * here + value((k, -h))) / h**2 for k in range(2 * classes)]
    pairs = [(k, classes + k) for k in range(classes)]
    mixed = [sum(s * t * value((i, s * h), (j, t * h)) for s in (1, -1) for t in (1, -1)) for i, j in pairs]
    return sum(second[:classes]), sum(mixed) / (4 * h**2), sum(second[classes:])


def check_lead(name, lead):
    """Value, curvature and a directional derivative of the curvature, for logits with this lead."""
    weights, term = (Decimal(2), Decimal(1), Decimal(3)), DECIMAL[name]
    for clean, adversarial in ((0, 1), (1, 0), (2, 1), (0, 0)):  # classes that lead; the label is 0
        draw = torch.Generator().manual_seed(7)
        g = torch.randn(2, 3, generator=draw).double()  # in float32, so that both precisions have the same input
        g[0, clean] += lead
        g[1, adversarial] += lead
        g, v = g.float(), torch.randn(2, 3, generator=draw)
        with localcontext() as context:
            context.prec = 140 + lead
            h = Decimal("1e-30")
            numbers = [Decimal(x) for x in g.double().flatten().tolist()]
            direction = [Decimal(x) for x in v.double().flatten().tolist()]
            truth = term(numbers[:3], numbers[3:], 0)
            parts = decimal_curvatures(term, numbers, 0, h)
            ends = []
            for sign in (1, -1):
                moved = [x + sign * h * d for x, d in zip(numbers, direction, strict=True)]
                ends.append(sum(w * c for w, c in zip(weights, decimal_curvatures(term, moved, 0, h), strict=True)))
            slope = (ends[0] - ends[1]) / (2 * h)
            truths = [float(number) for number in (truth, *parts, slope)]
        for dtype in (torch.float32, torch.float64):
            both = g.to(dtype).requires_grad_()
            margin = 1 - torch.eye(3, dtype=dtype)
            out = Outputs(both[:1], None, both[1:], None, margin, torch.tensor(2**-0.5, dtype=dtype))
            y = torch.tensor([0])
            value = (TERMS | CERTIFIED)[name].value(out, y).sum()
            curvature = (TERMS | CERTIFIED)[name].curvature(out, y)
            sums = stack(curvature, both[:1]).sum((0, 2))
            total = (sums * torch.tensor([2, 1, 3])).sum()
            gradients = [torch.autograd.grad(t, both, retain_graph=True)[0] for t in (value, total) if t.requires_grad]
            assert all(gradient.isfinite().all() for gradient in gradients)
            mine = torch.stack([value, *sums, (gradients[-1] * v).sum()]).double()
            tolerance = torch.finfo(dtype).eps * max(1, lead)
            torch.testing.assert_close(
                mine.detach(), torch.tensor(truths, dtype=torch.float64), rtol=50 * tolerance, atol=50 * tolerance
            )


@pytest.mark.parametrize("name", DECIMAL)
def test_values_and_curvature_with_a_lead_of_60(name):
    check_lead(name, 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECIMAL)
@pytest.mark.parametrize("lead", [1, 48, 300])
def test_values_and_curvature_with_a_long_lead(name, lead):
    check_lead(name, lead)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*TERMS, *CERTIFIED, "dynamic-margin"])
def test_logits_of_any_size_give_finite_numbers(name, dtype):
    """Also the derivatives of the curvature, which TrH trains through."""
    term = (TERMS | CERTIFIED | {"dynamic-margin": DynamicMargin()})[name]
    draw = torch.Generator().manual_seed(3)
    for scale in (30, 88, 300, 1000):
        both = (scale * (2 * torch.rand(2, 40, 5, generator=draw, dtype=dtype) - 1)).requires_grad_()
        y = torch.randint(5, (40,), generator=draw)
        out = Outputs(both[0], None, both[1], None, 1 - torch.eye(5, dtype=dtype), torch.tensor(1.0, dtype=dtype))
        value, curvature = term.value(out, y), stack(term.curvature(out, y), both[0])
        assert value.isfinite().all()
        assert curvature.isfinite().all()
        for total in (value.sum(), curvature.square().sum(), curvature.sum()):
            if total.requires_grad:
                assert torch.autograd.grad(total, both, retain_graph=True)[0].isfinite().all()


def test_the_margin_of_a_long_lead_is_its_limit():
    """A wrong class with a lead that no other class matters for: only the softmax of the others is left."""
    for dtype in (torch.float32, torch.float64):
        for lead in (48, 200, 1000):
            others = torch.tensor([0.3, -0.4, 1.1], dtype=dtype)
            g = torch.cat([others, others[:1] + lead])[None].requires_grad_()
            term, y = Margin(), torch.tensor([0])
            s = others.softmax(0)
            torch.testing.assert_close(term.value(Outputs(adv_logits=g), y)[0], g[0, 3] - others.logsumexp(0))
            curvature = term.curvature(Outputs(adv_logits=g), y).adversarial[0]
            torch.testing.assert_close(curvature, torch.cat([s.square() - s, s.new_zeros(1)]), atol=1e-6, rtol=1e-5)
            (slope,) = torch.autograd.grad(curvature[1], g)
            truth = (2 * s[1] - 1) * s[1] * (torch.eye(3, dtype=dtype)[1] - s)
            torch.testing.assert_close(slope[0], torch.cat([truth, s.new_zeros(1)]), atol=1e-6, rtol=1e-5)


class Weighted(Term):
    """A term of one's own: the squared difference of logits, weighted by the clean prediction."""

    def value(self, out, y):
        return (out.g.softmax(1) * (out.g - out.g_adv) ** 2).sum(1)


class Entropy(Term):
    """Another one, of the clean prediction alone."""

    def value(self, out, y):
        return -(out.g.softmax(1) * out.g.log_softmax(1)).sum(1)


@settings(deadline=None, max_examples=25)
@given(shape=shapes)
def test_stopping_the_clean_gradient_of_a_term_without_closed_form(shape):
    g, g_adv, y = logits(*shape)
    g.requires_grad_(), g_adv.requires_grad_()
    out = Outputs(logits=g, adv_logits=g_adv)
    stopped = Weighted().with_clean_stopped(True)
    truth = Weighted().value(Outputs(logits=g.detach(), adv_logits=g_adv), y)
    torch.testing.assert_close(stopped.value(out, y), truth)
    assert torch.autograd.grad(stopped.value(out, y).sum(), (g, g_adv), allow_unused=True)[0] is None
    curvature = stopped.curvature(out, y)
    assert curvature.clean is None
    assert curvature.cross is None
    torch.testing.assert_close(curvature.adversarial, 2 * g.softmax(1))
    assert torch.autograd.grad(curvature.adversarial.sum(), (g, g_adv), allow_unused=True)[0] is None  # p is constant
    assert Weighted().with_clean_stopped(False).curvature(out, y).cross is not None
    for alone in (Entropy(), CrossEntropy("clean"), CrossEntropy("adversarial"), Margin()):  # nothing to stop
        same = stack(alone.with_clean_stopped(True).curvature(out, y), g)
        torch.testing.assert_close(same, stack(alone.curvature(out, y), g))


def test_stopping_the_clean_gradient_only_removes_gradient():
    g, g_adv, y = logits(4, 3, 1.0, 1)
    for on, off in (("trades", "trades-stopped"), ("mart", "mart-stopped"), ("alp", "alp-stopped")):
        g.requires_grad_()
        names = [n for n in LOSSES[off].terms if n in ("kl", "pairing", "wkl")]
        stopped = LOSSES[off].values(Outputs(logits=g, adv_logits=g_adv), y)[names[0]]
        full = LOSSES[on].values(Outputs(logits=g, adv_logits=g_adv), y)[names[0]]
        assert not stopped.requires_grad
        assert full.requires_grad


def test_cross_entropy_takes_mixed_labels_and_mart_refuses_them():
    g, g_adv, y = logits(4, 3, 1.0, 1)
    mixed = F.one_hot(y, 3).double() * 0.7 + 0.1
    value = AT().values(Outputs(logits=g, adv_logits=g_adv), mixed)["ce"]
    torch.testing.assert_close(value, -(mixed * g_adv.log_softmax(1)).sum(1))
    with pytest.raises(InputError, match="mixup"):
        MART().values(Outputs(logits=g, adv_logits=g_adv), mixed)


def test_weights_are_checked():
    for build in (
        lambda: TRADES(lambda_t=-1),
        lambda: ALP(lambda_a=math.nan),
        lambda: MART(lambda_m=math.inf),
        lambda: GloRoTRADES(lambda_t=-1.0),
        lambda: LogitAnnealing(offset=-1.0),
        lambda: LogitAnnealing(beta=math.nan),
    ):
        with pytest.raises(InputError, match=r"expected (at least 0|a finite number)"):
            build()
    with pytest.raises(InputError, match="temperature: expected a number > 0, got 0"):
        LogitAnnealing(temperature=0.0)


class Focal(CrossEntropy):
    """Inherits a closed form that is not its own."""

    def value(self, out, y):
        ce = super().value(out, y)
        return (1 - (-ce).exp()).square() * ce


class HotKL(KL):
    def value(self, out, y):
        return super().value(Outputs(logits=out.g / 2, adv_logits=out.g_adv / 2), y)


@pytest.mark.parametrize("term", [Focal("clean"), Focal("adversarial"), HotKL(), HotKL(stop_clean_gradient=True)])
def test_a_term_that_overrides_the_value_does_not_inherit_a_closed_form(term):
    g, g_adv, y = (*torch.randn(2, 4, 3, dtype=torch.float64), torch.tensor([0, 2, 1, 0]))
    out = Outputs(logits=g, adv_logits=g_adv)
    mine, truth = term.curvature(out, y), autograd_curvature(term, out, y)
    for name, expected in vars(truth).items():
        assert (getattr(mine, name) is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(getattr(mine, name), expected)


def test_a_loss_that_overrides_values_needs_a_curvature():
    class Sharper(TRADES):
        def values(self, out, y):
            return {name: 3 * value for name, value in super().values(out, y).items()}

    class WithCurvature(Sharper):
        def curvature(self, out, y):
            return 3 * TRADES.curvature(self, out, y)

    class Again(WithCurvature):
        def values(self, out, y):
            return super().values(out, y)

    out, y = Outputs(logits=torch.randn(2, 3), adv_logits=torch.randn(2, 3)), torch.tensor([0, 1])
    for kind in (Sharper, Again):
        with pytest.raises(InputError, match=f"{kind.__name__}: overrides values but not curvature"):
            kind().with_clean_stopped(True).curvature(out, y)
    torch.testing.assert_close(WithCurvature().curvature(out, y).clean, 3 * TRADES().curvature(out, y).clean)
