"""Every method against its definition, computed another way."""

import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atoll.data import MemorySplit
from atoll.derivatives import elementary_operations
from atoll.errors import InputError
from atoll.losses import ALP, AT, MART, TRADES, Outputs, Standard, Term, WeightedKL
from atoll.losses.base import Loss
from atoll.models import MLP, ViT
from atoll.training.methods import AWP, AWPT, RAT, S2O, SAM, SWA, GaussianNoise, Method, Step, TrH
from atoll.training.methods.rat import head_row_sums, rat_targets, taylor_terms
from atoll.training.methods.s2o import correlation, second_order_targets
from atoll.training.methods.trh import full_trace, ramp, top_trace
from support import LOSSES, METHODS, first_batch, naive_loss, tiny_trainer, weights

VARIANTS = {
    "standard": Standard(),
    "at": AT(),
    "trades": TRADES(lambda_t=3.0),
    "trades-stopped": TRADES(stop_clean_gradient=True),
    "alp": ALP(),
    "alp-stopped": ALP(stop_clean_gradient=True),
    "mart": MART(),
    "mart-stopped": MART(stop_clean_gradient=True),
}


def small(seed=0, inputs=3, classes=3, hidden=(5, 4)):
    """A small ReLU net in float64, with clean and adversarial points and labels."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MLP((inputs,), classes, hidden=hidden).double()
        x = torch.rand(4, inputs, dtype=torch.float64)
        return model, x, x + 0.3 * torch.randn_like(x), torch.randint(classes, (4,))


def outputs(model, x, x_adv, loss):
    z, z_adv = model.features(x), model.features(x_adv)
    adversarial = loss.objective is not None
    return Outputs(
        model.head(z) if loss.uses_clean else None,
        z if loss.uses_clean else None,
        model.head(z_adv) if adversarial else None,
        z_adv if adversarial else None,
    )


def dense_trace(model, value, names):
    """Trace of the dense Hessian of a value with respect to the named parameters, by double backward."""
    parameters = [p for n, p in model.named_parameters() if n in names]
    gradients = torch.autograd.grad(value, parameters, create_graph=True)
    total = torch.zeros((), dtype=torch.float64)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        for i in range(gradient.numel()):
            (second,) = torch.autograd.grad(gradient.flatten()[i], parameter, create_graph=True)
            total = total + second.flatten()[i]
    return total


def naive_values(model, loss, x, x_adv, y, stop):
    """The loss of each example, written out, with the clean prediction constant in its pairing term or not."""
    return naive_loss(loss, model(x), model(x_adv), y, stop)


# --- TrH ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10**6), classes=st.integers(2, 5))
def test_top_trace_is_that_of_the_dense_hessian(name, stop, bias, seed, classes):
    """The switch of the trace decides, whatever the switch of the loss is."""
    loss = VARIANTS[name]
    model, x, x_adv, y = small(seed, classes=classes)
    out = outputs(model, x, x_adv, loss)
    mine = top_trace(loss.with_clean_stopped(stop).curvature(out, y), out, bias=bias)
    names = {"head.weight", "head.bias"} if bias else {"head.weight"}
    values = naive_values(model, loss, x, x_adv, y, stop)
    truth = torch.stack([dense_trace(model, value, names) for value in values])
    torch.testing.assert_close(mine, truth, rtol=1e-9, atol=1e-10)
    if stop and not name.startswith("alp") and not name.startswith("mart"):
        assert (mine >= 0).all()


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_full_trace_is_that_of_the_dense_hessian(name, stop):
    loss = VARIANTS[name]
    model, x, x_adv, y = small(3, inputs=2, hidden=(3, 2))
    mine = full_trace(model, loss.with_clean_stopped(stop), x, x_adv if loss.objective else None, y)
    names = {n for n, _ in model.named_parameters()}
    truth = torch.stack([dense_trace(model, value, names) for value in naive_values(model, loss, x, x_adv, y, stop)])
    torch.testing.assert_close(mine, truth, rtol=1e-9, atol=1e-10)
    gradients = torch.autograd.grad(mine.sum(), list(model.parameters()), allow_unused=True)  # it is trained through
    truths = torch.autograd.grad(truth.sum(), list(model.parameters()), allow_unused=True)
    for a, b in zip(gradients, truths, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_the_stopped_trace_of_trades_is_equation_6():
    loss, full = TRADES(lambda_t=3.0), []
    for seed in range(20):
        model, x, x_adv, y = small(seed)
        with torch.no_grad():
            for p in model.parameters():
                p *= 4  # far apart, where the full trace can be negative
        out = outputs(model, x, x_adv, loss)
        mine = top_trace(loss.with_clean_stopped(True).curvature(out, y), out)
        p, q = model(x).softmax(1), model(x_adv).softmax(1)
        z, z_adv = model.features(x), model.features(x_adv)
        first, second = ((a - a**2).sum(1) * (b**2).sum(1) for a, b in ((p, z), (q, z_adv)))
        torch.testing.assert_close(mine, first + 3 * second)
        kl = WeightedKL(stop_clean_gradient=True).curvature(out, y).adversarial  # MART's KL
        assert (kl >= 0).all()
        full.append(top_trace(loss.with_clean_stopped(False).curvature(out, y), out))
    assert (torch.stack(full) < 0).any()


def test_a_loss_of_ones_own_gets_its_trace_without_a_closed_form():
    class Focal(Term):
        def value(self, out, y):
            ce = F.cross_entropy(out.g_adv, y, reduction="none")
            return (1 - (-ce).exp()) ** 2 * ce

    class FocalAT(Loss):
        objective = "ce"
        uses_clean = False

    class Distance(Term):
        def value(self, out, y):
            return (out.g.sigmoid() - out.g_adv.tanh()).square().sum(1)

    class FocalPairs(FocalAT):
        uses_clean = True

    def focal(g_adv, y):
        ce = F.cross_entropy(g_adv, y, reduction="none")
        return (1 - (-ce).exp()) ** 2 * ce

    model, x, x_adv, y = small(1)
    for loss, weight in ((FocalAT(ce=(1.0, Focal())), 0.0), (FocalPairs(ce=(1.0, Focal()), pair=(2.0, Distance())), 2)):
        for stop in (False, True):
            g, g_adv = model(x).detach() if stop else model(x), model(x_adv)
            values = focal(g_adv, y) + weight * (g.sigmoid() - g_adv.tanh()).square().sum(1)
            twin, out = loss.with_clean_stopped(stop), outputs(model, x, x_adv, loss)
            truth = torch.stack([dense_trace(model, value, {"head.weight"}) for value in values])
            torch.testing.assert_close(top_trace(twin.curvature(out, y), out), truth, rtol=1e-10, atol=1e-10)
            names = {n for n, _ in model.named_parameters()}
            truth = torch.stack([dense_trace(model, value, names) for value in values])
            torch.testing.assert_close(full_trace(model, twin, x, x_adv, y), truth, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layers", ["top", "full"])
@pytest.mark.parametrize("trace_stopped", [True, False])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "alp-stopped"])
def test_trh_gradient_is_that_of_the_regularised_objective(name, trace_stopped, layers):
    """The step's gradient against loss + lambda * (dense trace) + gamma |theta|^2, all by autograd; two switches."""
    loss = VARIANTS[name]
    model, x, x_adv, y = small(8, inputs=2, hidden=(4,))
    trainer = tiny_trainer("standard", double=True)
    trainer.model = trainer.passes.model = model
    trainer.loss = loss
    trainer.methods = (TrH(lambda_=0.1, gamma=0.01, layers=layers, stop_clean_gradient=trace_stopped),)
    trainer.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = Step(x, y, torch.arange(4), 0, 0.0, x_adv if loss.objective else None)
    trainer.forward_backward(step)
    trainer.methods[0].before_step(trainer, step)
    mine = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    value = naive_values(model, loss, x, x_adv, y, stop=name.endswith("stopped")).mean()
    traced = naive_values(model, loss, x, x_adv, y, stop=trace_stopped).mean()
    names = {"head.weight"} if layers == "top" else {n for n, _ in model.named_parameters()}
    norm = sum(p.square().sum() for p in model.parameters())
    (value + 0.1 * dense_trace(model, traced, names) + 0.01 * norm).backward()
    for a, b in zip(mine, model.parameters(), strict=True):
        torch.testing.assert_close(a, b.grad, rtol=1e-8, atol=1e-10)


def test_lambda_schedules():
    assert [ramp("multistep", p) for p in (0, 0.099, 0.1, 0.49, 0.5, 1)] == [0.01, 0.01, 0.1, 0.1, 1, 1]
    assert [ramp("linear", p) for p in (0, 0.5, 1)] == [0, 0.5, 1]
    assert ramp("constant", 0) == 1


def test_trh_works_with_a_transformer():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ViT((1, 8, 8), 3, patch_size=4, stride=2, width=8, depth=1, heads=2)
    trainer = tiny_trainer("trades")
    trainer.model = trainer.passes.model = model
    trainer.methods = (TrH(lambda_=0.1),)
    assert trainer.train_step(first_batch(trainer)).terms["trh"] > 0


def test_trh_refuses_what_it_cannot_do():
    trainer = tiny_trainer()
    trainer.model = nn.Linear(2, 2)
    with pytest.raises(InputError, match="linear head"):
        TrH().setup(trainer)
    with pytest.raises(InputError, match="a fixed function of one example, but the model contains BatchNorm2d"):
        TrH(layers="full").setup(tiny_trainer(batch_norm=True))
    with pytest.raises(InputError, match="lambda_"):
        TrH(lambda_=-1)


class Standardized(nn.Linear):
    def forward(self, x):
        rows = self.weight[None]
        return F.linear(x, F.batch_norm(rows, None, None, training=True)[0], self.bias)


def full_trace_net(*layers):
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 3)).double()


def twice():
    return nn.Sequential(layer := nn.Linear(4, 4), nn.ReLU(), layer, nn.Linear(4, 3)).double()


class StraightThrough(torch.autograd.Function):
    """ReLU with the gradient of the identity."""

    @staticmethod
    def forward(x):
        return x.relu()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g

    generate_vmap_rule = True


class InTraining(nn.Module):
    """Another function, or another gradient, in training mode."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x) if self.training else x.relu()


class Apply(nn.Module):
    def forward(self, x):
        return StraightThrough.apply(x)


# Nets that full TrH is exact for, and nets that it refuses.
LINEAR_NETS = {
    "relu": lambda: full_trace_net(nn.ReLU()),
    "leaky": lambda: full_trace_net(nn.LeakyReLU(0.3), nn.Linear(6, 6), nn.Hardtanh()),
    "layer norm of the input": lambda: nn.Sequential(nn.LayerNorm(4), full_trace_net(nn.ReLU())).double(),
    "RMS norm of the input": lambda: nn.Sequential(nn.RMSNorm(4), full_trace_net(nn.ReLU())).double(),
    "max": lambda: full_trace_net(nn.Unflatten(1, (1, 6)), nn.MaxPool1d(3, 1, 1), nn.Flatten()),
}
REFUSED = {
    "gelu": (lambda: full_trace_net(nn.GELU()), r"piecewise linear in 0\.weight, but gelu"),
    "tanh": (lambda: full_trace_net(nn.Tanh()), r"piecewise linear in 0\.weight, but tanh"),
    "tied": (twice, r"piecewise linear in 0\.weight, but linear: 0\.weight is in more than one factor"),
    "RMS norm": (lambda: full_trace_net(nn.RMSNorm(6)), r"piecewise linear in 0\.weight, but rms_norm"),
    "layer norm": (lambda: full_trace_net(nn.LayerNorm(6)), r"in 0\.weight, but native_layer_norm"),
    "instance norm": (
        lambda: full_trace_net(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2), nn.Flatten()),
        r"piecewise linear in 0\.weight, but",
    ),
    "group norm": (lambda: full_trace_net(nn.GroupNorm(2, 6)), r"in 0\.weight, but native_group_norm"),
    "standardized": (lambda: nn.Sequential(Standardized(4, 6), nn.Linear(6, 3)).double(), r"in 0\.weight, but"),
    "running statistics": (
        lambda: full_trace_net(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()),
        "the model contains InstanceNorm1d",
    ),
    "PReLU": (lambda: full_trace_net(nn.PReLU()), "requires per-example gradients"),
    "straight-through": (
        lambda: full_trace_net(Apply()),
        "the trace with layers=full would not be exact: Gauss-Newton",
    ),
    "another function in training": (lambda: full_trace_net(InTraining(torch.tanh)), "the same logits in training and"),
    "another gradient in training": (
        lambda: full_trace_net(InTraining(StraightThrough.apply)),
        r"per-example gradients, which are wrong in training mode for 0\.weight",
    ),
    "dropout": (lambda: full_trace_net(nn.Dropout(0.1)), "the model contains Dropout"),
}


def full_trace_case(build, shape=(4,)):
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model, x = build(), torch.randn(3, *shape, dtype=torch.float64)
        trainer = tiny_trainer(double=True)
        points = torch.randn(64, *shape, dtype=torch.float64)
        split = MemorySplit(points, torch.arange(64) % 3)
        trainer.model, trainer.data = model, SimpleNamespace(shape=shape, train=split)
        return trainer, model, x, x + 0.5 * torch.randn_like(x), torch.tensor([0, 2, 1])


@pytest.mark.parametrize("name", LINEAR_NETS)
def test_full_trace_of_nets_that_are_accepted(name):
    trainer, model, x, x_adv, y = full_trace_case(LINEAR_NETS[name])
    TrH(layers="full").setup(trainer)
    for stop in (False, True):
        mine = full_trace(model, TRADES().with_clean_stopped(stop), x, x_adv, y)
        names = {n for n, _ in model.named_parameters()}
        values = naive_values(model, TRADES(), x, x_adv, y, stop)
        truth = torch.stack([dense_trace(model, value, names) for value in values])
        torch.testing.assert_close(mine, truth, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", REFUSED)
def test_full_trace_is_refused_where_it_would_be_wrong(name):
    build, sentence = REFUSED[name]
    trainer, model, x, x_adv, y = full_trace_case(build)
    with pytest.raises(InputError, match=sentence):
        TrH(layers="full").setup(trainer)
    if name in ("dropout", "running statistics", "PReLU") or "training" in name or "through" in name:
        return
    with elementary_operations():
        value = naive_values(model, TRADES(), x, x_adv, y, stop=True).sum()
        truth = dense_trace(model, value, {n for n, _ in model.named_parameters()})
    mine = full_trace(model, TRADES().with_clean_stopped(True), x, x_adv, y).sum()
    assert abs(float(mine - truth)) > 1e-3 * abs(float(truth))  # the refusal is not for nothing


def test_full_trace_refuses_a_model_that_cannot_be_captured():
    class Branches(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else -super().forward(x)

    trainer, *_ = full_trace_case(lambda: Branches(4, 3).double())
    with pytest.raises(InputError, match="TrH: layers=full requires a model that can be captured"):
        TrH(layers="full").setup(trainer)


# --- perturbed weights ----------------------------------------------------------------------------------------------


class Watch(Method):
    """Keeps the weights at which gradients are computed."""

    @contextmanager
    def around_step(self, trainer, step):
        self.seen = [p.detach().clone() for p in trainer.model.parameters()]
        yield
        self.gradients = [p.grad.clone() for p in trainer.model.parameters()]


def perturbed(method, loss="at", batch_norm=False):
    """Weights before, weights during the step, the trainer."""
    trainer, watch = tiny_trainer(loss, batch_norm=batch_norm), Watch()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.methods = (method, watch)
    step = trainer.train_step(first_batch(trainer))
    return before, watch, trainer, step


@pytest.mark.parametrize("loss", LOSSES)
def test_awp_moves_each_matrix_by_gamma_times_its_norm_along_the_gradient(loss):
    before, watch, _, step = perturbed(AWP(gamma=0.01), loss)
    fresh = tiny_trainer(loss)
    out = outputs(fresh.model, step.x, step.x_adv if step.x_adv is not None else step.x, fresh.loss)
    sum(fresh.loss.values(out, step.y).values()).mean().backward()
    for old, new, parameter in zip(before, watch.seen, fresh.model.parameters(), strict=True):
        moved = new - old
        if old.dim() == 1:
            assert moved.abs().max() == 0
            continue
        assert float(moved.norm() / old.norm()) == pytest.approx(0.01, rel=1e-3)
        assert float(F.cosine_similarity(moved.flatten(), parameter.grad.flatten(), dim=0)) > 0.999


@pytest.mark.parametrize("method", [AWP(gamma=0.1), AWPT(gamma=0.1), SAM(rho=0.1), RAT(sigma=0.1, reading="paper")])
def test_the_step_starts_from_exactly_the_weights_as_they_were(method):
    """theta - lr * gradient at the perturbed point, to the bit."""
    trainer, watch = tiny_trainer("trades", optimizer=lambda p: torch.optim.SGD(p, lr=0.1)), Watch()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.methods = (method, watch)
    trainer.train_step(first_batch(trainer))
    for old, new, gradient in zip(before, trainer.model.parameters(), watch.gradients, strict=True):
        assert torch.equal(new.detach(), old.add(gradient, alpha=-0.1))


def test_awpt_is_awp_of_the_head():
    before, whole, *_ = perturbed(AWP(gamma=0.01), "trades")
    _, top, trainer, _ = perturbed(AWPT(gamma=0.01), "trades")
    names = [name for name, _ in trainer.model.named_parameters()]
    for name, old, a, b in zip(names, before, whole.seen, top.seen, strict=True):
        if name == "head.weight":
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(b, old)


def test_awp_waits_for_its_warm_up():
    before, watch, *_ = perturbed(AWP(gamma=0.01, warmup=1))
    assert all(torch.equal(a, b) for a, b in zip(before, watch.seen, strict=True))


def test_sam_moves_all_parameters_by_rho_in_all():
    before, watch, *_ = perturbed(SAM(rho=0.3))
    moved = torch.cat([(a - b).flatten() for a, b in zip(watch.seen, before, strict=True)])
    assert float(moved.norm()) == pytest.approx(0.3, rel=1e-3)


@pytest.mark.parametrize(
    ("method", "passes"),
    [
        (AWP(), 2 * 2 + 4),
        (AWPT(), 2 * 2 + 4),
        (SAM(), 2 * 2 + 4),
        (RAT(), 2 + 4),
        (S2O(), 2 + 4),
        (TrH(), 2 + 4),
        (SWA(), 2 + 4),
    ],
)
def test_methods_make_no_more_passes_than_they_must(method, passes):
    """TRADES with PGD-3: four passes for the attack, two for the step."""
    trainer, count = tiny_trainer("trades"), []
    trainer.methods = (method,)
    method.setup(trainer)
    trainer.model.body.register_forward_hook(lambda *_: count.append(1))
    trainer.train_step(first_batch(trainer))
    assert len(count) == passes


@pytest.mark.parametrize("method", [AWP(), AWPT(), SAM(), RAT(terms="exact")])
def test_the_extra_passes_leave_batch_norm_alone(method):
    _, _, trainer, _ = perturbed(method, "trades", batch_norm=True)
    counts = {m.num_batches_tracked.item() for m in trainer.model.modules() if isinstance(m, nn.BatchNorm2d)}
    assert counts == {2}


# --- SWA ------------------------------------------------------------------------------------------------------------


def test_swa_is_the_moving_average_of_torch():
    trainer = tiny_trainer(batch_norm=True)
    theirs = torch.optim.swa_utils.AveragedModel(
        trainer.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8), use_buffers=True
    )
    theirs.n_averaged += 1  # the average starts at the initial weights

    class Both(Method):
        def after_step(self, trainer, step):
            theirs.update_parameters(trainer.model)

    trainer.methods = (swa := SWA(alpha=0.8), Both())
    swa.setup(trainer)
    for batch in trainer._rest_of_epoch():
        trainer.train_step(batch)
    for name, value in theirs.module.state_dict().items():
        if value.is_floating_point():  # torch averages batch norm's counters as well, which is of no use
            torch.testing.assert_close(swa.averages()["swa"][name], value)


def test_swa_is_evaluated_saved_and_loaded_beside_the_raw_weights(tmp_path):
    trainer = tiny_trainer(methods=["swa"], folder=tmp_path)
    trainer.fit()
    assert trainer.best["swa"].step > 0
    from atoll.training.checkpoint import load_checkpoint

    saved = load_checkpoint(trainer.checkpoints.path(trainer.step))
    for name, value in trainer.averages["swa"].items():
        assert torch.equal(saved.weights("swa")[name], value)
    raw = weights(trainer.model)
    with trainer.using("swa"):
        assert torch.equal(trainer.model.head.weight, saved.weights("swa")["head.weight"])
    assert torch.equal(trainer.model.head.weight, raw["head.weight"])


# --- S2O ------------------------------------------------------------------------------------------------------------


def naive_targets(scores, share):
    """Row by row, without any vector operation."""
    classes = len(scores)
    result = torch.zeros_like(scores)
    for i in range(classes):
        others = [float(scores[i, j]) for j in range(classes) if j != i]
        for j in range(classes):
            if j == i:
                result[i, j] = share
            elif sum(others) == 0:
                result[i, j] = (1 - share) / (classes - 1)
            else:
                result[i, j] = (1 - share) * float(scores[i, j]) / sum(others)
    return result


@pytest.mark.parametrize(("classes", "share"), [(5, 0.4), (10, 0.2), (40, 0.2)])
def test_s2o_targets_row_by_row(classes, share):
    g = torch.randn(7, classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a = sum(row[:, None] * row for row in g)
    m = -a.abs()
    m = m - m.min(1, keepdim=True).values
    m.fill_diagonal_(0)
    mine = second_order_targets(g, share)
    torch.testing.assert_close(mine, naive_targets(m, share))
    torch.testing.assert_close(mine.sum(1), torch.ones(classes, dtype=torch.float64))


@pytest.mark.parametrize("loss", ["at", "trades"])
def test_s2o_replaces_a_share_of_the_cross_entropy(loss):
    trainer = tiny_trainer(loss)
    trainer.methods = (S2O(weight=0.3),)
    step = trainer.train_step(first_batch(trainer))
    values = trainer.loss.values(step.out, step.y)
    assert float(step.terms["ce"]) == pytest.approx(0.7 * float(values["ce"].detach().mean()), rel=1e-5)
    both = []
    for g in (step.out.logits, step.out.adv_logits):
        target = second_order_targets(g, 0.2)[step.y]
        both.append(F.kl_div(g.log_softmax(1), target, reduction="batchmean"))
    assert float(step.terms["s2o"]) == pytest.approx(0.3 * float(sum(both).detach() / 2), rel=1e-5)


def test_s2o_as_written_is_the_norm_of_the_correlation():
    g = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    columns = g / g.norm(dim=0)
    assert float(correlation(g, g, 1)) == pytest.approx(float((columns.T @ columns).norm()))


# --- RAT ------------------------------------------------------------------------------------------------------------


def test_row_sums_of_the_head_gradient_need_no_backward_pass():
    model, x, _, y = small(2)
    F.cross_entropy(model(x), y).backward()
    mine = head_row_sums(model(x), model.features(x), y)
    torch.testing.assert_close(mine, model.head.weight.grad.sum(1))


def test_rat_targets_row_by_row():
    values = torch.tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64)
    shifted = values - values.min()
    normal = shifted / shifted.sum()
    for share in (0.5, 0.2):
        torch.testing.assert_close(rat_targets(values, share), naive_targets(normal.expand(4, 4), share))
    assert rat_targets(torch.zeros(4), 0.5).isfinite().all()  # the guard for 0/0
    assert rat_targets(torch.zeros(2), 1.0).equal(torch.eye(2))


@pytest.mark.parametrize("share", [None, 0.2])
@pytest.mark.parametrize("reading", ["code", "paper"])
@pytest.mark.parametrize("methods", [(), (AWP(gamma=0.1),)], ids=["alone", "awp"])
def test_rat_surrogate_by_hand(reading, share, methods):
    """Both terms from the gradient of the cross-entropy by autograd, class by class, at the weights of the step."""
    trainer, watch = tiny_trainer("trades", double=True), Watch()
    trainer.methods = (RAT(reading=reading, share=share, eta=0.4, second=0.3), *methods, watch)
    step = trainer.train_step(first_batch(trainer))
    model = tiny_trainer("trades", double=True).model
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), watch.seen, strict=True):
            parameter.copy_(value)
    sums, logits = [], []
    for inputs in (step.x, step.x_adv):
        g = model(inputs)
        (gradient,) = torch.autograd.grad(F.cross_entropy(g, step.y), model.head.weight)
        sums.append(gradient.sum(1))
        logits.append(g.detach())
    (clean, adversarial), (g, g_adv) = sums, logits

    def kl(scores, g):
        targets = naive_targets((scores - scores.min()).expand(3, 3), 2 / 3 if share is None else share)[step.y]
        return F.kl_div(g.log_softmax(1), targets, reduction="batchmean")

    one, two = clean.abs() - adversarial.abs(), clean**2 - adversarial**2
    first = 0.5 * (kl(one, g_adv) + kl(-one, g))
    second = 0.5 * (kl(-two if reading == "code" else two, g_adv) + kl(-two, g))
    torch.testing.assert_close(step.terms["first"], 0.4 * first)
    torch.testing.assert_close(step.terms["second"], 0.4 * 0.3 * second)
    torch.testing.assert_close(step.terms["ce"], 0.6 * F.cross_entropy(g, step.y))


def test_taylor_terms_against_dense_jacobian_and_hessian():
    model, x, *_ = small(4, inputs=2, hidden=(3,))
    names = [n for n, _ in model.named_parameters()]
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    sizes = [p.numel() for p in model.parameters()]
    shapes = [p.shape for p in model.parameters()]

    def logits(vector):
        parts = [v.view(s) for v, s in zip(vector.split(sizes), shapes, strict=True)]
        return torch.func.functional_call(model, dict(zip(names, parts, strict=True)), (x,))

    u = torch.randn(len(flat), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    jacobian = torch.autograd.functional.jacobian(logits, flat)
    hessian = torch.stack(
        [
            torch.stack(
                [torch.autograd.functional.hessian(lambda v, b=b, k=k: logits(v)[b, k], flat) for k in range(3)]
            )
            for b in range(len(x))
        ]
    )
    tangents = {n: v.view(s) for n, v, s in zip(names, u.split(sizes), shapes, strict=True)}
    first, second = taylor_terms(model, x, tangents, 2)
    torch.testing.assert_close(first, jacobian @ u)
    torch.testing.assert_close(second, torch.einsum("bkij,i,j->bk", hessian, u, u))


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


def random_net(seed):
    """A random chain of blocks on 4 x 6 numbers, and a head; one linear layer may occur several times."""
    draw = random.Random(seed)
    shared = nn.Linear(6, 6)
    blocks = [
        lambda: nn.Linear(6, 6), lambda: shared, Attend, lambda: nn.LayerNorm(6), lambda: nn.LayerNorm((4, 6)),
        lambda: nn.RMSNorm(6), lambda: nn.GroupNorm(2, 4), lambda: nn.InstanceNorm1d(4, affine=True),
        lambda: nn.BatchNorm1d(4), nn.GELU, nn.Tanh, nn.ReLU, nn.SiLU,
        lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
    ]  # fmt: skip
    chosen = [draw.choice(blocks)() for _ in range(5)]
    return nn.Sequential(shared, *chosen, nn.Tanh(), shared, nn.Flatten(), nn.Linear(24, 3)).double().eval()


@pytest.mark.parametrize("seed", range(40))
def test_taylor_terms_of_any_net(seed):
    """Values against differences of logits, gradients against differences of values, along random directions."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, x = random_net(seed), torch.randn(2, 4, 6, dtype=torch.float64)
        own = {n: p.detach().clone() for n, p in model.named_parameters()}
        u, v = ({n: torch.randn_like(p) for n, p in own.items()} for _ in range(2))
        weight = torch.randn(2, 2, 3, dtype=torch.float64)

    def moved(function, step, direction):
        for name, parameter in model.named_parameters():
            parameter.data.copy_(own[name] + step * direction[name])
        value = function().detach()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(own[name])
        return value

    def total():
        return (torch.stack(taylor_terms(model, x, u, 2)) * weight).sum()

    first, second = taylor_terms(model, x, u, 2)
    up, here, down = (moved(lambda: model(x), h, u) for h in (1e-4, 0.0, -1e-4))
    torch.testing.assert_close(first, (up - down) / 2e-4, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second, (up - 2 * here + down) / 1e-8, rtol=1e-4, atol=1e-4 * float(second.abs().max()))
    torch.testing.assert_close(taylor_terms(model, x, u, 1)[0], first)
    gradients = torch.autograd.grad(total(), list(model.parameters()), allow_unused=True)
    names = [n for n, _ in model.named_parameters()]
    slope = sum((g * v[n]).sum() for n, g in zip(names, gradients, strict=True) if g is not None)
    truth = (moved(total, 1e-5, v) - moved(total, -1e-5, v)) / 2e-5
    assert float(slope) == pytest.approx(float(truth), rel=1e-4, abs=1e-5)
    assert all(torch.equal(p, own[n]) for n, p in model.named_parameters())


def test_exact_terms_are_unbiased():
    """E |(J - J')u|^2 / sigma^2 = |J - J'|_F^2; E |u^T dH u|^2 / sigma^4 = sum_k 2 |dH_k|_F^2 + tr(dH_k)^2."""
    model, x, x_adv, _ = small(5, inputs=2, classes=2, hidden=(3,))
    x, x_adv = x[:1], x_adv[:1]
    parameters = [p for p in model.parameters() if p.dim() > 1]
    names = [n for n, p in model.named_parameters() if p.dim() > 1]
    sizes, shapes = [p.numel() for p in parameters], [p.shape for p in parameters]
    flat = torch.cat([p.detach().flatten() for p in parameters])

    def difference(vector):
        parts = [v.view(s) for v, s in zip(vector.split(sizes), shapes, strict=True)]
        weights = dict(model.named_parameters()) | dict(zip(names, parts, strict=True))
        both = torch.func.functional_call(model, weights, (torch.cat([x, x_adv]),))
        return both[0] - both[1]

    jacobian = torch.autograd.functional.jacobian(difference, flat)
    hessians = [torch.autograd.functional.hessian(lambda v, k=k: difference(v)[k], flat) for k in range(2)]
    truth = [
        float(jacobian.square().sum()),
        float(sum(2 * h.square().sum() + h.trace() ** 2 for h in hessians)),
    ]
    method, count = RAT(terms="exact", reading="paper", eta=1.0, second=1.0), 500
    trainer = SimpleNamespace(model=model, seed=0, device=torch.device("cpu"))
    samples = torch.zeros(count, 2, dtype=torch.float64)
    for i in range(count):
        step = Step(x, torch.zeros(1).long(), torch.zeros(1).long(), i, 0.0, x_adv)
        with torch.no_grad():
            method.on_loss(trainer, step)
        samples[i] = torch.cat([step.terms["first"], step.terms["second"]])
    error = samples.std(0) / count**0.5
    assert ((samples.mean(0) - torch.tensor(truth)).abs() < 4 * error).all()


@pytest.mark.parametrize(
    ("method", "sigma"),
    [(RAT(), 1e-4), (RAT(reading="paper"), 0.01), (RAT(sigma=0.05), 0.05), (RAT(reading="paper", sigma=0.2), 0.2)],
)
def test_rat_attacks_noisy_weights_and_trains_clean_ones(method, sigma):
    seen = {}

    class Spy(Method):
        @contextmanager
        def around_attack(self, trainer, step):
            seen["attack"] = [p.detach().clone() for p in trainer.model.parameters()]
            yield

    noises = []
    for seed in range(5):
        trainer, watch = tiny_trainer("trades", double=True), Watch()
        trainer.seed = seed
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.methods = (method, Spy(), watch)
        trainer.train_step(first_batch(trainer))
        assert all(torch.equal(a, b) for a, b in zip(watch.seen, before, strict=True))
        moved = [p.dim() > 1 if method.reading == "paper" else p.dim() == 4 for p in before]
        noise = [a - b for a, b in zip(seen["attack"], before, strict=True)]
        assert [bool(n.abs().max() > 0) for n in noise] == moved
        noises.append(torch.cat([n.flatten() for n, m in zip(noise, moved, strict=True) if m]) / sigma)
    noise = torch.cat(noises)
    margin = 6 / len(noise) ** 0.5  # six standard errors
    assert abs(float(noise.mean())) < margin
    assert abs(float(noise.square().mean()) - 1) < margin * 2**0.5
    assert not torch.equal(noises[0], noises[1])


@pytest.mark.parametrize(("reading", "noisy"), [("code", False), ("paper", True)])
@pytest.mark.parametrize("awp", [AWP(), AWPT()])
def test_rat_as_in_the_code_has_no_noise_with_awp(reading, noisy, awp):
    class Spy(Method):
        @contextmanager
        def around_attack(self, trainer, step):
            self.seen = weights(trainer.model)
            yield

    for methods in ([RAT(reading=reading), awp], [awp, RAT(reading=reading)]):
        trainer, spy = tiny_trainer("trades"), Spy()
        trainer.methods, before = (*methods, spy), weights(trainer.model)
        trainer.train_step(first_batch(trainer))
        assert any(not torch.equal(before[name], value) for name, value in spy.seen.items()) == noisy


def test_rat_terms_carry_their_coefficients():
    for order, eta, names in ((1, 0.3, ["ce", "kl", "first"]), (2, 0.2, ["ce", "kl", "first", "second"])):
        trainer = tiny_trainer("trades")
        trainer.methods = (RAT(order=order),)
        step = trainer.train_step(first_batch(trainer))
        assert list(step.terms) == names
        ce = trainer.loss.values(step.out, step.y)["ce"].detach().mean()
        assert float(step.terms["ce"]) == pytest.approx((1 - eta) * float(ce), rel=1e-5)


# --- noise ----------------------------------------------------------------------------------------------------------


class Inputs(Method):
    """Remembers what a step computes its gradient on."""

    @contextmanager
    def around_step(self, trainer, step):
        self.seen = step.x.clone(), step.x_adv.clone()
        yield


def test_gaussian_noise_is_the_same_on_both_passes_and_new_in_every_step():
    trainer, inputs = tiny_trainer("trades"), Inputs()
    trainer.methods = (GaussianNoise(sigma=0.3), inputs)
    batch, noises = first_batch(trainer), []
    for _ in range(5):
        step = trainer.train_step(batch)
        x, x_adv = inputs.seen
        torch.testing.assert_close(x - step.x, x_adv - step.x_adv)
        assert torch.equal(step.x, batch.x)  # only the gradient is computed with noise
        noises.append(x - step.x)
        trainer.step += 1
    noise = torch.stack(noises)
    assert float(noise.std()) == pytest.approx(0.3, rel=0.04)
    assert abs(float(noise.mean())) < 0.02
    assert (noise.flatten(2).std(0) > 0).all()  # neither the same in every step
    assert (noise.flatten(2).std(1) > 0).all()  # nor for every point


# --- all of them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "standard"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_with_every_robust_loss(loss, method):
    if loss == "mart" and method in ("mixup", "cutmix"):
        trainer = tiny_trainer(loss, methods=[method])
        batch = first_batch(trainer)
        with pytest.raises(InputError, match="disable mixup and cutmix"):
            trainer.train_step(batch)
        return
    trainer = tiny_trainer(loss, methods=[method], batch_norm=True)
    for m in trainer.methods:
        m.setup(trainer)
    before = weights(trainer.model)
    step = trainer.train_step(first_batch(trainer))
    assert all(value.isfinite() for value in step.terms.values())
    assert any(not torch.equal(before[k], v) for k, v in trainer.model.state_dict().items())


@pytest.mark.parametrize(
    "build",
    [
        lambda: AWP(gamma=-1),
        lambda: SAM(rho=-1),
        lambda: SWA(alpha=1),
        lambda: GaussianNoise(sigma=0),
        lambda: S2O(weight=2),
        lambda: RAT(eta=2),
        lambda: RAT(share=2),
        lambda: RAT(second=-1),
        lambda: S2O(share=-0.1),
        lambda: RAT(terms="exact", sigma=0),
    ],
)
def test_nonsense_is_refused(build):
    with pytest.raises(InputError, match=r"expected|need"):
        build()
