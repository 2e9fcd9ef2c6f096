"""Where the papers are wrong: the published value, the truth, and ours, side by side (docs/errata.md).

Each case is a function that returns (published, truth, ours); the truth comes from automatic differentiation or from
the definition.  The test asserts that ours is the truth, that the published value is not, and that the page states
both.  The first words of a docstring are the reference of its row on the page.
"""

import math
from pathlib import Path

import captum.attr
import numpy as np
import pytest
import torch
from torch import nn

from atoll.attacks import APGD, PGD
from atoll.attacks.evaluate import evaluate
from atoll.certify import GloRo, LipschitzEstimator, NearestCentroid
from atoll.certify.gloro import PairwiseLipschitz
from atoll.curvature import EmpiricalRisk, wci
from atoll.curvature.gap import robust_gap
from atoll.curvature.pac_bayes import Posterior, linear_form, square_root
from atoll.data import MemorySplit
from atoll.explain import (
    BoundaryNormal,
    BoundarySaliency,
    IntegratedGradients,
    Saliency,
    SmoothGrad,
    attribution_lipschitz,
    boundary_search,
)
from atoll.losses import (
    EMMA,
    KL,
    MART,
    Abstention,
    CrossEntropy,
    FixedMarginCE,
    Margin,
    Outputs,
    Pairing,
    Standard,
    WeightedKL,
)
from atoll.models import MLP, CentroidNet, LiResNet
from atoll.models.centroid import EtaLayer
from atoll.threat import ThreatModel
from atoll.training.methods.rat import head_row_sums
from attack_cases import images, plane
from explain_cases import SmoothedReLU, one_layer

K = 5
PAGE = Path(__file__).parents[1] / "docs" / "errata.md"


def point(seed: int = 0):
    """Logits and features of one clean and one adversarial input, and a label."""
    draw = torch.Generator().manual_seed(seed)
    g, g_adv = torch.randn(2, K, generator=draw, dtype=torch.float64)
    z, z_adv = torch.randn(2, 4, generator=draw, dtype=torch.float64)
    return g, g_adv, z, z_adv, torch.tensor([1])


def phi(p):
    return p.diag() - p[:, None] * p


def psi(p):
    return torch.eye(K, dtype=p.dtype) - p


def dense_trace(term, y):
    """Trace of the dense Hessian of a term with respect to the weight of a linear head, by autograd."""
    g, g_adv, z, z_adv, _ = point()

    def value(flat):  # the Hessian at weight 0 with the logits as offsets is that of a head which gives these logits
        weight = flat.view(K, 4)
        logits, adv_logits = weight @ z + g, weight @ z_adv + g_adv
        return term.value(Outputs(logits=logits[None], adv_logits=adv_logits[None]), y).sum()

    hessian = torch.autograd.functional.hessian(value, torch.zeros(K * 4, dtype=torch.float64))
    return float(hessian.trace())


def trace(term, y):
    """Ours: logit curvature times feature norms."""
    g, g_adv, z, z_adv, _ = point()
    c = term.curvature(Outputs(logits=g[None], adv_logits=g_adv[None]), y)
    parts = ((c.clean, z @ z), (c.cross, 2 * z @ z_adv), (c.adversarial, z_adv @ z_adv))
    return float(sum(part.sum() * norm for part, norm in parts if part is not None))


def softmax_jacobian():
    """TrH, App. A, Prop. 2, case II; thesis D.1.3: dPhi_ik/dg_k = Phi_kk Psi_ki."""
    g, *_ = point()
    p = g.softmax(0)
    third = torch.autograd.functional.jacobian(lambda g: phi(g.softmax(0)), g)  # (i, k, l)
    truth = torch.einsum("ikk->ik", third)
    published = phi(p).diag()[None, :] * psi(p).T
    return published, truth, phi(p) * (1 - 2 * p)


def full_kl():
    """TrH, App. A, G(x, x'): built on the wrong derivative, and one term listed twice."""
    g, g_adv, z, z_adv, y = point()
    p, q = g.softmax(0), g_adv.softmax(0)
    h, h_adv = p - p**2, q - q**2
    psi_log = psi(p) @ p.log(), psi(p) @ q.log()
    omega, omega_adv = (phi(p) * psi(p)).sum(0), (phi(p) * psi(q)).sum(0)
    extra = (
        -2 * (z_adv @ z) * h.sum()
        - (z @ z) * (psi_log[1] @ h)
        - (z_adv @ z) * omega_adv.sum()
        + (z @ z) * (psi_log[0] @ h + omega.sum())
    )
    published = float((z_adv @ z_adv) * h_adv.sum() + extra)
    return published, dense_trace(KL(), y), trace(KL(), y)


def alp_pairing():
    """TrH, App. G.1 (ALP): the pairing term with stopped clean gradient."""
    g, g_adv, _, z_adv, y = point()
    p, q = g.softmax(0), g_adv.softmax(0)
    published = 2 * (z_adv @ z_adv) * (phi(q).square().sum() - (phi(q).diag() * (psi(q) @ (p - q))).sum())
    term = Pairing(stop_clean_gradient=True)
    return float(published), dense_trace(term, y), trace(term, y)


def mart_margin():
    """TrH, App. G.2 (MART): the margin term."""
    _, g_adv, _, z_adv, y = point()
    q = g_adv.softmax(0)
    m = q.masked_fill(torch.arange(K) == y, 0).argmax()
    row = phi(q)[m]
    published = (z_adv @ z_adv) * (row * row / (1 - q[m]) + row**2 / (1 - q[m]) ** 2).sum()
    return float(published), dense_trace(Margin(), y), trace(Margin(), y)


def mart_weight():
    """TrH, App. G.2 (MART): the weighted KL with stopped clean gradient loses its weight."""
    _, g_adv, _, z_adv, y = point()
    q = g_adv.softmax(0)
    term = WeightedKL(stop_clean_gradient=True)
    return float((z_adv @ z_adv) * (q - q**2).sum()), dense_trace(term, y), trace(term, y)


def mart_cross_entropy():
    """TrH, App. G.2 (MART): it takes the cross-entropy at the clean input; Wang et al. (2020): the adversarial one."""
    g, g_adv, _, _, y = point()
    published = CrossEntropy("clean").value(Outputs(logits=g[None]), y)
    truth = -g_adv.log_softmax(0)[y]
    ours = MART().values(Outputs(logits=g[None], adv_logits=g_adv[None]), y)["ce"]
    return float(published), float(truth), float(ours)


def hidden_layer_trace():
    """TrH, Theorem 4; thesis, Theorem 5: the trace of a hidden layer as the sum of h_k (dg_k/dI)^2."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, last = torch.randn(6, 4, dtype=torch.float64), torch.randn(K, 6, dtype=torch.float64)
        x, y = torch.randn(4, dtype=torch.float64), torch.tensor(1)

    def loss(flat):
        return -(last @ torch.relu(flat.view(6, 4) @ x)).log_softmax(0)[y]

    truth = float(torch.autograd.functional.hessian(loss, first.flatten()).trace())
    p = (last @ torch.relu(first @ x)).softmax(0)
    a = last[:, first @ x > 0]  # dg_k / dI over active units
    published = (x @ x) * ((p - p**2)[:, None] * a**2).sum()
    exact = (x @ x) * (p @ a**2 - (p @ a) ** 2).sum()
    return float(published), truth, float(exact)


def awp_projection():
    """TrH, App. D (AWP): it projects ||xi + W|| / ||W|| <= delta; what is bounded is ||xi|| / ||W||."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        weight, gradient = torch.randn(2, 6, 4, dtype=torch.float64)
    xi = 0.005 * weight.norm() * gradient / gradient.norm()
    return float((xi + weight).norm() / weight.norm()), 0.005, float(xi.norm() / weight.norm())


def spherical_posterior():
    """TrH, App. A, case I: K/(2 beta) log(1 + sigma0^2 beta Tr/K) is sigma0^2/(2 beta) Tr to first order.

    The logarithm itself is right (tests/curvature/test_pac_bayes.py minimizes numerically).
    """
    k, beta, trace = 50, 100.0, 6.0
    squared = torch.zeros((), dtype=torch.float64, requires_grad=True)  # sigma0^2
    (k / (2 * beta) * torch.log(1 + squared * beta * trace / k)).backward()
    return trace / (2 * beta), squared.grad, linear_form(0.0, 0.0, trace, sigma0=1.0, beta=beta)


def gloro_trades():
    """Thesis, Definition 20: KL(softmax f^eps, softmax f), of vectors of different length.

    With a zero for the abstain class in softmax f it is infinite in the printed order; in the other it is what trains.
    """
    g, _, _, _, y = point()
    w = torch.randn(K, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    margin = 0.1 * torch.cdist(w, w)
    top = g.argmax()
    abstain = (g + margin[top])[torch.arange(K) != top].max()
    q = torch.cat([g, abstain[None]]).softmax(0)
    p = torch.cat([g.softmax(0), torch.zeros(1)])
    published = (q * (q / p).log()).sum()
    truth = torch.special.xlogy(p, p / q).sum()
    value = Abstention().value(Outputs(logits=g[None], certified_margin=margin), y)
    return float(published), float(truth), float(value)


def fixed_margin():
    """Thesis, section 5.1.3 (fixed margin): -log f_y / sum_i (f_i + eps K_yi), without exponentials.

    It has no value for negative logits, so here the smallest is 1; the same number added to all logits changes it.
    """
    g, _, _, _, y = point()
    g = g - g.min() + 1
    w = torch.randn(K, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    margin = 0.1 * torch.cdist(w, w)
    published = -(g[y] / (g + margin[y[0]]).sum()).log()
    truth = -(g[y].exp() / (g + margin[y[0]]).exp().sum()).log()
    ours = FixedMarginCE().values(Outputs(logits=g[None], certified_margin=margin), y)["ce"]
    return float(published), float(truth), float(ours)


def gaussian_kl():
    """TrH, App. A, Eq. 8; thesis, Eq. D.1: log(sigma0^2 / det Sigma) of N weights needs sigma0^(2N)."""
    draw, n, sigma0 = torch.Generator().manual_seed(0), 10, 0.3
    theta = torch.randn(n, generator=draw, dtype=torch.float64)
    variances = 0.1 * torch.rand(n, generator=draw, dtype=torch.float64)
    rest = -n + theta @ theta / sigma0**2 + variances.sum() / sigma0**2
    published = (math.log(sigma0**2) - variances.log().sum() + rest) / 2
    q, p = torch.distributions.Normal(theta, variances.sqrt()), torch.distributions.Normal(0 * theta, sigma0)
    truth = torch.distributions.kl_divergence(q, p).sum()
    ours = Posterior(variances, torch.zeros(n), torch.ones(n), float(theta @ theta), sigma0).kl
    return float(published), float(truth), ours


def boundary_normal():
    """Thesis, Definition 6 (BSM): the gradient of one logit is the normal of the boundary.

    The cosine with the shortest way to the boundary of a linear model, which is along the difference of two weights;
    tests/explain/test_attributions.py has other models.
    """
    draw = torch.Generator().manual_seed(0)
    model = nn.Linear(4, K).double()
    model.weight.data = w = torch.randn(K, 4, generator=draw, dtype=torch.float64)
    model.bias.data = torch.randn(K, generator=draw, dtype=torch.float64)
    x = torch.randn(1, 4, generator=draw, dtype=torch.float64)
    y = int(model(x).argmax())
    distance = ((model(x)[0, y] - model(x)[0]) / (w[y] - w).norm(dim=1).clamp_min(1e-300)).detach()
    distance[y] = math.inf
    shortest = (w[y] - w[distance.argmin()])[None]
    boundary = boundary_search(model, x, bounds=None)
    published, ours = (
        torch.cosine_similarity(method(model).attribute(x, boundary=boundary), shortest)
        for method in (BoundarySaliency, BoundaryNormal)
    )
    return float(published), 1.0, float(ours)


def robustness_gap():
    """WCI, App. B.3 and C.1: the generalization gap is the difference between standard and robust error.

    In the main text (Lemma 2.2) it is the robust error on test points minus that on training points.
    """
    model, split = images(80)
    attack, wrong = PGD(ThreatModel("linf", 0.1), steps=10), {}
    halves = {"train": (split.images[:40], split.labels[:40]), "test": (split.images[40:], split.labels[40:])}
    for name, (x, y) in halves.items():
        wrong[name] = [(model(inputs).argmax(1) != y).double().mean() for inputs in (x, attack(model, x, y, seed=0))]
    published, truth = wrong["test"][1] - wrong["test"][0], wrong["test"][1] - wrong["train"][1]
    return float(published), float(truth), robust_gap(model, halves["train"], halves["test"], attack).error.value


ERRATA = [
    fixed_margin,
    gaussian_kl,
    boundary_normal,
    robustness_gap,
    spherical_posterior,
    gloro_trades,
    hidden_layer_trace,
    awp_projection,
    softmax_jacobian,
    full_kl,
    alp_pairing,
    mart_margin,
    mart_weight,
    mart_cross_entropy,
]


def rows():
    """Reference, published and true value of each row of the table of formulas."""
    table = PAGE.read_text().split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return [(line[0].split(";")[0], *line[-2:]) for line in lines[2:]]


def rounds_to(value, cell):
    """Whether a cell of the table states a value, to all the digits that it has."""
    number = float(cell.removeprefix("<= ").replace("infinite", "inf"))
    return number == value or abs(number - value) <= 0.51 * 10 ** -len(cell.partition(".")[2])


def check_row(docstring, published, truth):
    """The page states the two values of one of the pairs, in a row with the reference of the docstring."""
    pairs = list(
        zip(torch.as_tensor(published).flatten().tolist(), torch.as_tensor(truth).flatten().tolist(), strict=True)
    )
    cells = [values for reference, *values in rows() if docstring.startswith(reference)]
    assert any(rounds_to(p, left) and rounds_to(t, right) for left, right in cells for p, t in pairs), (cells, pairs)


@pytest.mark.parametrize("erratum", ERRATA, ids=lambda f: f.__name__)
def test_ours_is_the_truth_and_the_published_value_is_not(erratum):
    published, truth, ours = (torch.as_tensor(value, dtype=torch.float64) for value in erratum())
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-10)
    assert float((published - truth).abs().max()) > 0.01
    check_row(erratum.__doc__, published, truth)


def test_every_row_has_a_test():
    tests = Path(__file__).read_text()
    assert len(rows()) > 25
    assert [reference for reference, *_ in rows() if f'"""{reference}' not in tests] == []


def test_rat_equation_17_says_nothing_about_classes():
    """RAT, App. D, Eq. 17: row sums of d(g - g')/dW at a linear head are the same number for every class.

    The authors' code, and Atoll, take the gradient of the cross-entropy instead, whose row sums differ.
    """
    _, _, z, z_adv, y = point()
    weight = torch.randn(K, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    jacobian = torch.autograd.functional.jacobian(lambda w: w @ z - w @ z_adv, weight)  # (class, K, 4)
    published = torch.stack([jacobian[k, k].sum() for k in range(K)])
    torch.testing.assert_close(published, published[0].expand(K))
    ours = head_row_sums((weight @ z)[None], z[None], y) - head_row_sums((weight @ z_adv)[None], z_adv[None], y)
    assert float(ours.max() - ours.min()) > 0.1


def test_rat_equation_7_is_no_bound():
    """RAT, Eq. 7: L(sum x, sum y) <= sum L(x, y) for the KL between softmaxes; two equal pairs are a counterexample."""
    x, y = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)

    def divergence(a, b):
        return float((a.softmax(0) * (a.log_softmax(0) - b.log_softmax(0))).sum())

    assert divergence(x + x, y + y) > divergence(x, y) + divergence(x, y)
    check_row("RAT, Eq. 7", 2 * divergence(x, y), divergence(x + x, y + y))


def test_trh_theorem_1_says_nothing_and_ours_does():
    """TrH, Theorem 1; thesis, Theorem 2: 4 sqrt(KL/m + log(2m/tau)) is more than any loss in [0, 1], for all m.

    With the logarithm divided by m as well it shrinks, and holds: seven classifiers on coin flips, a Gibbs posterior.
    """
    tau, sizes = 0.05, [10**k for k in range(1, 9)]
    published = [4 * math.sqrt(2.0 / m + math.log(2 * m / tau)) for m in sizes]
    ours = [square_root(0.0, 2.0, n=m, clip=1.0, alpha=tau) for m in sizes]
    assert min(published) > 1
    assert published == sorted(published)
    assert ours == sorted(ours, reverse=True)
    assert ours[-1] < 0.01
    check_row("TrH, Theorem 1", published[-1], ours[-1])
    draw, m, mean = np.random.default_rng(0), 2000, np.linspace(0.2, 0.8, 7)
    for _ in range(400):
        empirical = draw.binomial(m, mean) / m
        q = np.exp(-10 * empirical) / np.exp(-10 * empirical).sum()
        kl = float((q * np.log(q * 7)).sum())
        bound = square_root(float(q @ empirical), kl, n=m, clip=1.0, alpha=tau)
        assert float(q @ mean) <= bound < 1


def test_wci_equation_5_has_no_value_where_a_trace_is_negative():
    """WCI, Eq. 5: the root of norm squared times trace; one unit that is sure of the wrong class curves downwards."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 2, bias=False)).double().eval()
    first, last = torch.ones(1, 1, dtype=torch.float64), torch.tensor([[2.0], [-2.0]], dtype=torch.float64)
    model.load_state_dict({"0.weight": first, "2.weight": last})

    def loss(first, last):
        return -(last @ torch.tanh(first)).flatten().log_softmax(0)[1]

    (upper, _), (_, lower) = torch.autograd.functional.hessian(loss, (first, last))
    terms = [first.norm() ** 2 * upper.sum(), last.norm() ** 2 * lower.reshape(2, 2).trace()]
    assert terms[0] < 0 < terms[1]
    assert sum(term.sqrt() for term in terms).isnan()
    result = wci(EmpiricalRisk(model, Standard(), torch.ones(1, 1).double(), torch.tensor([1])), "exact")
    assert result.index.value == pytest.approx(float(terms[1].sqrt()))
    assert result.negative == 1


def test_definition_21_needs_kappa():
    """Thesis, Definition 21: kappa_i is left undefined; it is (f_y - f_i) / K_yi, the radius at which i may reach y.

    With it, and eps large, every class that does not lead already is lifted exactly to f_y.
    """
    g, *_ = point()
    w = torch.randn(K, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    eps, k, y = 1e3, torch.cdist(w, w), int(g.argmax())
    others = torch.arange(K) != y
    kappa = (g[y] - g) / k[y].clamp_min(1e-300)
    torch.testing.assert_close((g + kappa * k[y])[others], g[y].expand(K - 1))
    value = EMMA().values(Outputs(logits=g[None], certified_margin=eps * k), torch.tensor([y]))["ce"]
    torch.testing.assert_close(value, torch.tensor([float(K)], dtype=torch.float64).log())


def test_power_iteration_is_no_bound():
    """Thesis, Algorithm 2: it comes from below, so a certificate built on it can be false; here it is.

    A linear net, whose true radius is the distance to a plane: the claim is beyond the plane.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MLP((20,), 2, hidden=(20,), bounds=None).double()
        model.body[2] = torch.nn.Identity()
        x = torch.rand(1, 20, dtype=torch.float64)
    w = (model.head.weight[1] - model.head.weight[0]).detach()
    model.head.weight.data = torch.stack([-w, w]) / 2
    model.body[1].weight.data += 3 * torch.outer(w, w) / (w @ w)  # the top direction, which the head looks along
    published = LipschitzEstimator(model, iterations=1)()[0].detach()  # one step
    proven = GloRo.proven(model)
    normal = model.body[1].weight.detach().T @ w
    truth = float((model(x)[0, 0] - model(x)[0, 1]).abs().detach() / normal.norm())
    claim = float(GloRo(model, PairwiseLipschitz.estimated(published))(x).radius)
    assert float(proven(x).radius) <= truth < claim
    assert float(published[0, 1]) < 0.9 * float(proven.constants.lipschitz[0, 1])


def test_size_classes_of_table_5_1():
    """Thesis, table 5.1: L6W128 is said to have less than 5 M parameters, L18W256 less than 10 M."""
    with torch.device("meta"):
        small, large = (LiResNet((3, 32, 32), 10, depth=d, width=w).num_parameters for d, w in ((6, 128), (18, 256)))
        blocks = sum(p.numel() for n, p in LiResNet((3, 32, 32), 10, depth=18).named_parameters() if "conv.weight" in n)
    assert small > 9.8e6
    assert large > 29.5e6
    assert blocks > 10e6  # the 3x3 kernels alone


def two_centroids(eta):
    """One centroid for each of two classes, at distance 1 on a line, and its certifier with an eta-layer."""
    model = CentroidNet((1,), 2, per_class=1, bounds=(-0.5, 1.5)).double()
    model.head.centroids.data = torch.tensor([[[0.0]], [[1.0]]], dtype=torch.float64)
    return NearestCentroid.proven(model, eta=eta)


def test_theorem_8_is_unsound():
    """Thesis, Theorem 8: no two inputs within (1 + eta) d_min / K are accepted in different classes.

    On the line between two centroids all is rejected from (1 - eta) / 2 to (1 + eta) / 2, so the truth is
    eta d_min / K, which is reached; already the two centroids, both accepted, are only d_min apart.
    """
    eta = 0.2
    certifier = two_centroids(eta)
    line = torch.linspace(-0.5, 1.5, 20001, dtype=torch.float64)[:, None]
    result = certifier(line)
    accepted = [line[(result.radius > 0) & (result.prediction == j), 0] for j in (0, 1)]
    truth = float(accepted[1].min() - accepted[0].max())
    published = (1 + eta) * certifier.separation / certifier.lipschitz
    assert certifier.global_radius <= truth < certifier.global_radius + 3e-4
    assert published > 5 * truth
    check_row("Thesis, Theorem 8", published, truth)
    assert (certifier(torch.tensor([[0.0], [1.0]])).radius > 0).all()


def test_theorem_9_is_unsound():
    """Thesis, Theorem 9: without rejection the net is locally robust within (1 + eta) d_min / (2 K).

    It does not even say at which inputs.  Accepted ones have eta d_min / (2 K), and those at the edge no more.
    """
    eta = 0.2
    certifier = two_centroids(eta)
    line = torch.linspace(-0.5, 1.5, 20001, dtype=torch.float64)[:, None]
    result = certifier(line)
    accepted = (result.radius > 0) & (result.prediction == 0)
    other = line[certifier.model(line).argmax(1) == 1]
    truth = float((other - line[accepted].max()).min())
    published = (1 + eta) * certifier.separation / (2 * certifier.lipschitz)
    assert certifier.local_radius <= truth < certifier.local_radius + 3e-4
    assert published > 5 * truth
    check_row("Thesis, Theorem 9", published, truth)
    assert float(result.radius[accepted].min()) >= certifier.local_radius * (1 - 1e-9)


def test_definition_12_is_about_the_wrong_ball():
    """Thesis, Definition 12: the premise bounds the change of the attribution, not the distance.

    The slope of 10 ReLU(x) is 0 at x = -0.01 and jumps to 10 at 0.  Within 1 of x the ratio comes to 10 / 0.01; of the
    points where the slope changes by at most 1, as printed, every one has ratio 0.
    """

    class Kink(nn.Module):
        def forward(self, x):
            return torch.cat([10 * x.relu(), 0 * x], 1)

    eps, x = 1.0, torch.tensor([[-0.01]], dtype=torch.float64)
    saliency = Saliency(Kink())
    line = torch.linspace(-1.01, 0.99, 200_001, dtype=torch.float64)[:, None]
    change = (saliency.attribute(line, 0) - saliency.attribute(x, 0)).abs()
    ratio = change / (line - x).abs().clamp_min(1e-9)
    published, truth = float(ratio[change <= eps].max()), float(ratio.max())
    ours = float(attribution_lipschitz(saliency, x, 0, eps=eps, bounds=None, steps=100).value)
    assert published == 0
    assert truth == pytest.approx(1000, rel=0.01)
    assert 0.8 * truth < ours <= 1000 * (1 + 1e-9)


def test_captums_trapezoid_is_not_complete():
    """Thesis, B.3 and table 2.2: IG by ``riemann_trapezoid`` with 20 points.

    Should this fail one day, Captum has changed.
    """
    model = nn.Linear(6, 3).double()
    x = torch.rand(4, 6, dtype=torch.float64)
    change = (model(x) - model(0 * x))[:, 1].detach()
    theirs = captum.attr.IntegratedGradients(model).attribute(x, target=1, n_steps=20, method="riemann_trapezoid")
    torch.testing.assert_close(theirs.sum(1), 0.95 * change, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(IntegratedGradients(model).attribute(x, 1).sum(1), change)


def test_equation_3_1_is_the_accuracy_of_the_luckiest_inputs():
    """Thesis, Eq. 3.1: robust accuracy as the mean of the most that is right in the ball; it is the least.

    By brute force on a fine grid in the ball.  As printed it is above clean accuracy, and no attack lowers it.
    """
    model, x, _ = plane(200, torch.float64)
    noise = 0.05 * torch.randn(200, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, eps = model(x + noise).argmax(1), 0.05  # labels with some noise, so that the model gets some points wrong
    side = torch.linspace(-eps, eps, 41, dtype=torch.float64)
    ball = (x[:, None] + torch.cartesian_prod(side, side)).clamp(0, 1)
    right = model(ball).argmax(2) == y[:, None]
    published, truth = float(right.any(1).double().mean()), float(right.all(1).double().mean())
    result = evaluate(model, MemorySplit(x, y), {"APGD": APGD(ThreatModel("linf", eps), steps=50, targets=3)})
    assert published > result.accuracy["clean"].value > truth
    assert result.accuracy["APGD"].value == pytest.approx(truth)
    check_row("Thesis, Eq. 3.1", published, truth)


def test_definition_7_has_no_solution():
    """Thesis, Definition 7 (BIG): all points closer to x_adv than x are in the class of x; but x_adv itself is not.

    The ball has to be centered at x, as in Definition 6.  On a grid in the plane no point meets the printed condition,
    and one meets the other: what boundary search returns is as close.
    """
    model, x, y = plane(8, torch.float64)
    side = torch.linspace(0, 1, 41, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    classes, apart = model(grid).argmax(1), torch.cdist(grid, grid)
    boundary = boundary_search(model, x)
    for point, label, ours in zip(x, y, boundary.distance, strict=True):
        across, distance = classes != label, (grid - point).norm(dim=1)
        printed = across & ~((apart < distance[:, None]) & across).any(1)
        centered = across & ~((distance < distance[:, None]) & across).any(1)
        assert not printed.any()
        nearest = float(distance[centered].max())
        assert nearest - math.sqrt(2) / 40 <= ours <= nearest * 1.01


def test_rejection_is_not_closed_in_input_space():
    """Thesis, section 6.3.2: a region of acceptance that is closed in latent space is closed in input space.

    Far from the centroids all features are rejected.  But an encoder that loses a direction, such as any linear layer
    to fewer dimensions, gives inputs however far apart the same features.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = CentroidNet((3,), 2, per_class=2, encoder=lambda *shape: MLP(*shape, hidden=(2,), bounds=None)).double()
        x, z = torch.randn(2, 500, 3, dtype=torch.float64)
    accepts = EtaLayer(0.2)
    far = 1e3 * z[:, :2] / z[:, :2].norm(dim=1, keepdim=True)
    assert (accepts(model.head(far)).argmax(1) == 2).all()
    lost = torch.linalg.svd(model.body[1].weight.detach()).Vh[2]
    near, away = (accepts(model(inputs)).argmax(1) for inputs in (x, x + 1e6 * lost))
    assert (near < 2).any()
    assert torch.equal(near, away)


def test_a_class_has_no_saliency():
    """Thesis, Theorem 1 with Definition 13: the saliency map of m_sigma, which Definition 13 makes a class.

    The gradient of a class is 0 wherever it exists, so Theorem 1 would say nothing.  It is about mean logits
    (tests/explain/test_attributions.py proves it for those).
    """
    w, x = one_layer(0)
    noise = torch.randn(2000, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def smoothed_class(x):
        votes = torch.relu((x[:, None] + noise) @ w.T).argmax(2)
        return nn.functional.one_hot(votes, 4).sum(1).argmax(1)

    step = 1e-6 * torch.eye(6, dtype=torch.float64)
    slopes = [(smoothed_class(x + one) - smoothed_class(x - one)).abs().max() / 2e-6 for one in step]
    assert max(slopes) == 0
    model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.ReLU()).double()
    model[0].weight.data = w
    assert SmoothGrad(model, sigma=1.0, samples=200).attribute(x).norm(dim=1).min() > 0


def test_smoothing_need_not_bring_saliency_closer_to_the_boundary():
    """Thesis, Corollary 1: the more noise, the more similar are SM and BSM of the smoothed model.

    Only the bound falls.  The distance itself rises from sigma 0.05 to 1 on four random one-layer nets of four, in the
    mean over 50 points: with little noise, most points and their boundary points are in the same linear region.
    """
    means = []
    for seed in range(4):
        w, x = one_layer(seed)
        for sigma in (0.05, 1.0):
            model = SmoothedReLU(w, sigma)
            boundary = boundary_search(model, x, bounds=None)
            maps = [method(model).attribute(x, **more) for method, more in saliencies(boundary)]
            means.append(float((maps[0] - maps[1]).norm(dim=1).mean()))
    little, much = means[::2], means[1::2]
    assert all(a < b for a, b in zip(little, much, strict=True))
    check_row("Thesis, Corollary 1", little[3], much[3])


def saliencies(boundary):
    """SM and BSM, with what they need."""
    return (Saliency, {}), (BoundarySaliency, {"boundary": boundary})


def layer_terms(weights, x):
    """For each layer of a ReLU net from the second on: its input, dg_k / dI, and the probabilities."""
    inputs, jacobians = [x], []
    for weight in weights[:-1]:
        inputs.append(torch.relu(weight @ inputs[-1]))

    def top(value, start):
        for number, weight in enumerate(weights[start:], start + 1):
            value = weight @ value if number == len(weights) else torch.relu(weight @ value)
        return value

    for start in range(1, len(weights)):
        jacobians.append(torch.autograd.functional.jacobian(lambda v, start=start: top(v, start), inputs[start]))
    return inputs, jacobians, top(x, 0).softmax(0)


@pytest.mark.parametrize("seed", range(3))
def test_the_inequality_of_theorem_4_holds_though_its_proof_does_not(seed):
    """TrH, App. A, Eq. 19; thesis, Eq. D.12: H^(i)_kd = (sum_e sqrt(H^(i+1)_ke) dI_e/dI_d)^2.

    A root drops the sign of dg_k/dI_e.  The inequality that follows (TrH, Eq. 7; thesis, Eq. 4.8),
    max H^(i) <= max H^(i+1) ||W^(i)||_1^2, is true: for H as printed, and for the exact terms of the trace.  The norm
    is the largest sum over outputs; with that over inputs it fails.
    """
    draw, sizes = torch.Generator().manual_seed(seed), (5, 9, 7, 8, K)
    shapes = list(zip(sizes[1:], sizes, strict=False))
    weights = [torch.randn(shape, generator=draw, dtype=torch.float64) / math.sqrt(shape[1]) for shape in shapes]
    x = torch.randn(5, generator=draw, dtype=torch.float64)
    inputs, jacobians, p = layer_terms(weights, x)
    h = p - p**2
    printed = [h[:, None] * a**2 for a in jacobians]
    exact = [p @ a**2 - (p @ a) ** 2 for a in jacobians]

    def loss(flat):
        value = x
        for number, weight in enumerate(weights):
            value = (flat.view_as(weight) if number == 1 else weight) @ value
            value = value if number == len(weights) - 1 else torch.relu(value)
        return -value.log_softmax(0)[1]

    trace = torch.autograd.functional.hessian(loss, weights[1].flatten()).trace()
    torch.testing.assert_close(trace, (inputs[1] @ inputs[1]) * exact[1][inputs[2] > 0].sum())
    for number, weight in enumerate(weights[1:-1]):
        norm = torch.linalg.matrix_norm(weight, 1)
        for terms in (printed, exact):
            assert terms[number].max() <= terms[number + 1].max() * norm**2 * (1 + 1e-12)
    slope = weights[1] * (inputs[2] > 0)[:, None]
    torch.testing.assert_close(printed[0], h[:, None] * (jacobians[1] @ slope) ** 2)
    unsigned = (printed[1].sqrt() @ slope) ** 2
    assert float((printed[0] - unsigned).abs().max()) > 0.1 * float(printed[0].max())
    if seed == 1:
        check_row("TrH, App. A, Eq. 19", unsigned, printed[0])


def test_the_inequality_of_theorem_4_needs_the_sum_over_outputs():
    """Eq. 7 with the largest sum over inputs fails, here by a factor of 100: ten units that all look at one."""
    last, weight = torch.ones(2, 10, dtype=torch.float64), torch.ones(10, 1, dtype=torch.float64)
    last[1] = -1
    _, (below, above), p = layer_terms([torch.ones(1, 1, dtype=torch.float64), weight, last], torch.ones(1).double())
    h = (p - p**2)[:, None]
    left, right = (h * below**2).max(), (h * above**2).max()
    torch.testing.assert_close(left, right * torch.linalg.matrix_norm(weight, 1) ** 2)
    torch.testing.assert_close(left, 100 * right * torch.linalg.matrix_norm(weight, math.inf) ** 2)
