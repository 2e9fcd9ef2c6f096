"""Forms of models: the same function and input gradients, an unchanged model, and the same verdicts of attacks."""

from __future__ import annotations

import copy
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atoll import frozen
from atoll.attacks import APGD, FAB, evaluate
from atoll.data import MemorySplit
from atoll.frozen import CompiledForm, FrozenForm, attack_form
from atoll.models import ConvNet4C3F, PreActResNet, SmallConvNet, ViT
from atoll.modules import PassCounts, count_passes
from attack_cases import THREAT, images, quick
from support import first_batch, tiny_trainer

EVALUATE = sys.modules["atoll.attacks.evaluate"]  # the package has a function of the same name


class Residual(nn.Module):
    """A block with functional activations, whose batch norm is not in a sequence, and whose skip is added in place."""

    def __init__(self, channels):
        super().__init__()
        self.one, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.two = nn.Sequential(nn.Conv2d(channels, channels, 1, bias=False), nn.BatchNorm2d(channels, affine=False))

    def forward(self, x):
        y = self.two(F.relu(self.norm(self.one(x)), inplace=True))
        y += x
        return F.relu(y)


def geometries():
    """Convolutions of every geometry, with few and with many input channels."""
    return nn.Sequential(
        nn.Conv2d(3, 8, (3, 2), stride=(2, 3), padding=(1, 0), dilation=(1, 2)),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=2, groups=4),
        nn.BatchNorm2d(12),
        nn.Conv2d(12, 4, 2, padding=1, dilation=2),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 1, stride=3, bias=False),
        nn.Dropout(),
        nn.Flatten(),
        nn.LazyLinear(17),
        nn.ReLU(),
        nn.Linear(17, 5, bias=False),
    )


def tied():
    """A network that uses one convolution, one activation and one dense layer twice."""
    layer, relu, dense = nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Linear(12, 12)
    return nn.Sequential(layer, relu, layer, relu, nn.AdaptiveMaxPool2d(2), nn.Flatten(), dense, relu, dense)


NETWORKS = {
    "small": lambda: SmallConvNet((3, 16, 16), 5, widths=(6, 8), hidden=9),
    "small, batch norm": lambda: SmallConvNet((3, 16, 16), 5, widths=(6, 8), hidden=9, batch_norm=True),
    "4C3F": lambda: ConvNet4C3F((3, 16, 16), 5),
    "ResNet": lambda: PreActResNet((3, 16, 16), 5, width=4),
    "ViT": lambda: ViT((3, 16, 16), 5, width=16, depth=2, heads=2),
    "geometries": geometries,
    "tied": tied,
    "LeNet": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(32, 9),
        nn.ReLU(),
        nn.Linear(9, 5),
    ),
    "flattened otherwise": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.Flatten(2), nn.Linear(144, 4), nn.Flatten(), nn.Linear(24, 5)
    ),
    "shuffled": lambda: nn.Sequential(nn.Conv2d(3, 8, 5), nn.PixelShuffle(2), nn.Flatten(), nn.Linear(1152, 5)),
    "foreign residual": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), Residual(4), nn.MaxPool2d(2), Residual(4), nn.Flatten(), nn.Linear(196, 5)
    ),
    "one channel": lambda: nn.Sequential(
        nn.Conv2d(3, 1, 1), nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(392, 5)
    ),
}


def network(name):
    """A network in evaluation mode, whose batch norm has statistics and weights, and inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = NETWORKS[name](), torch.rand(6, 3, 16, 16)
        model(x)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.2, 2)
                if module.affine:
                    nn.init.normal_(module.weight)  # of both signs
                    nn.init.normal_(module.bias)
        return model.eval(), x


def run(model, x):
    """Logits and the input gradient of a random combination of them."""
    x = x.detach().requires_grad_()
    logits = model(x)
    weights = torch.linspace(-1, 2, logits.numel(), dtype=logits.dtype).view_as(logits)
    return logits.detach(), torch.autograd.grad((logits * weights).sum(), x)[0]


@pytest.mark.parametrize("name", NETWORKS)
def test_logits_and_input_gradients_are_as_accurate_as_those_of_the_model(name):
    model, x = network(name)
    exact = run(copy.deepcopy(model).double(), x.double())
    plain = run(model, x)
    with FrozenForm(model, x) as form:
        assert len(form) > 1
        fast = run(model, x)
        with torch.inference_mode():
            quick_logits = model(x)
        for count in (1, 5):
            torch.testing.assert_close(model(x[:count]), plain[0][:count], atol=1e-5, rtol=1e-4)
    assert (quick_logits - fast[0]).abs().max() <= 1e-5 * fast[0].abs().max()
    for value, usual, truth in zip(fast, plain, exact, strict=True):
        error, known = (float((v - truth).norm() / truth.norm()) for v in (value, usual))
        assert error <= 10 * known + 1e-6


@pytest.mark.parametrize("name", ["small", "small, batch norm", "4C3F", "LeNet", "geometries"])
def test_images_are_flattened_without_a_copy(name):
    model, x = network(name)
    with FrozenForm(model, x):
        flat = [module for module in model.modules() if isinstance(module, frozen.FrozenFlatten)]
        same = []
        for module in flat:
            module.register_forward_hook(
                lambda _, inputs, output: same.append(inputs[0].data_ptr() == output.data_ptr())
            )
        model(x)
    assert same == [True]


def test_the_model_is_the_same_afterwards_even_if_a_pass_fails():
    model, x = network("small, batch norm")
    before = {name: id(module) for name, module in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    order, names = list(model.body._modules), repr(model)
    model.train()
    form = FrozenForm(model, x)
    assert model.training
    assert all(module.training for module in model.modules())
    model.eval()
    counts = PassCounts()
    with form, count_passes(model, counts):
        run(model, x)
    with pytest.raises(RuntimeError), form:
        model(x[:, :2])
    assert (counts.forward, counts.backward) == (6, 6)
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert (list(model.body._modules), repr(model)) == (order, names)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_new_weights_are_read_again():
    model, x = network("ResNet")
    form = FrozenForm(model, x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_var.mul_(1.3)
    form.refresh()
    with form:
        logits = model(x)
    torch.testing.assert_close(logits, model(x), rtol=1e-4, atol=1e-4)


class Custom(nn.Conv2d):
    """A convolution with another forward pass."""

    def forward(self, x):
        return super().forward(x) + 1


class Viewed(nn.Module):
    """A network that needs the usual order of memory."""

    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(400, 5)

    def forward(self, x):
        y = self.conv(x)
        return self.linear(y.view(len(y), -1))


class Reads(nn.Sequential):
    """A network that reads the weight of a layer."""

    def forward(self, x):
        return F.linear(x.flatten(1), self[0].weight)


class Taps(nn.Module):
    """A network that uses the value between a convolution and its batch norm."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x):
        total = 0
        for layer in self.body:
            x = layer(x)
            total = total + x.mean((2, 3))
        return total


class Noisy(nn.Sequential):
    """A randomized network."""

    def forward(self, x):
        return super().forward(x + torch.randn_like(x))


def hooked():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    return model


def overridden():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    model[0].forward = lambda x: F.avg_pool2d(x, 2)
    return model


LEFT = {
    "hooks": hooked,
    "forward of an instance": overridden,
    "subclass": lambda: nn.Sequential(Custom(3, 4, 3), nn.Flatten()),
    "parametrization": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)), nn.Flatten()),
    "old weight norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Conv2d(3, 4, 3)), nn.Flatten()),
    "padding": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), nn.Flatten()),
    "padding by name": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.Flatten()),
    "batch statistics": lambda: nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.Flatten()),
    "double precision": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).double(),
    "TorchScript": lambda: torch.jit.trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), torch.rand(1, 3, 12, 12)),
    "view": Viewed,
    "reads a weight": lambda: Reads(nn.Linear(432, 5)),
    "taps": Taps,
    "noise": lambda: Noisy(nn.Conv2d(3, 4, 3), nn.Flatten()),
    "root": lambda: nn.Linear(12, 5),
    "NaN": lambda: nn.Sequential(nn.Flatten(), nn.utils.skip_init(nn.Linear, 432, 5)).apply(
        lambda m: [p.data.fill_(torch.nan) for p in m.parameters()]
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LEFT)
def test_models_that_the_form_does_not_understand_are_left_as_they_are(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LEFT[name]().eval()
        dtype = next(model.parameters(), torch.zeros(())).dtype
        x = torch.rand(4, 3, 12, 12).to(dtype)
    state = torch.get_rng_state()
    with FrozenForm(model, x) as form:
        assert len(form) == 0
        torch.manual_seed(1)
        inside = model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(inside, model(x), rtol=0, atol=0, equal_nan=True)
    torch.set_rng_state(state)
    before = torch.get_rng_state()
    FrozenForm(model, x)
    assert torch.equal(torch.get_rng_state(), before)


def test_transformer_layers_that_read_weights_without_gradients_are_left_as_they_are():
    # Without gradients, PyTorch passes the weights of the dense layers to one fused operation.
    layer = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Flatten(1, 2), layer, nn.Flatten(), nn.Linear(432, 5)).eval()
    x = torch.rand(4, 3, 12, 12)
    with FrozenForm(model, x) as form, torch.no_grad():
        assert model(x).shape == (4, 5)
    assert len(form) == 0


def test_passes_with_autocast_and_with_hooks_of_all_modules_are_those_of_the_model():
    model, x = network("small")
    form = FrozenForm(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert len(FrozenForm(model, x)) == 0
        with form:
            assert type(model.head) is nn.Linear
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    try:
        with form:
            assert type(model.head) is nn.Linear
    finally:
        handle.remove()
    with form:
        assert type(model.head) is not nn.Linear
    assert type(model.head) is nn.Linear


@pytest.mark.parametrize("name", ["small, batch norm", "ResNet", "foreign residual", "geometries"])
def test_attacks_break_the_same_points_as_with_the_model_itself(name, monkeypatch):
    model, x = network(name)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        x = torch.rand(24, 3, 16, 16)
        y = model(x).argmax(1)
    split = MemorySplit(x, y)
    fast = evaluate(model, split, quick(), keep=True)
    monkeypatch.setattr(frozen, "FrozenForm", Empty)
    plain = evaluate(model, split, quick(), keep=True)
    assert torch.equal(fast.broken_by, plain.broken_by)
    assert [a.accuracy for a in fast.attacks] == [a.accuracy for a in plain.attacks]
    assert 0 < fast.robust.correct < 24 or fast.robust.correct == plain.robust.correct


class Empty(FrozenForm):
    """A form that replaces nothing."""

    def _find(self):
        pass


class Wrong(FrozenForm):
    """A form with negative logits, so that attacks stop at once and claim successes that do not hold."""

    def _find(self):
        self.other = nn.Linear(1, 1)

    def __len__(self):
        return 1

    def __enter__(self):
        self.hook = self.model.register_forward_hook(lambda module, inputs, logits: -logits)
        return self

    def __exit__(self, *error):
        self.hook.remove()


@pytest.mark.parametrize("cascade", [True, False])
def test_points_with_unconfirmed_successes_are_attacked_again_with_the_model_itself(cascade, monkeypatch, tmp_path):
    model, split = images()
    attacks = {"APGD-CE": APGD(THREAT, steps=4), "FAB-T": FAB(THREAT, steps=3, targets=2)}

    def result(**options):
        return evaluate(model, split, attacks, cascade=cascade, batch_size=8, check=False, keep=True, **options)

    monkeypatch.setattr(frozen, "FrozenForm", Empty)
    plain = result()
    monkeypatch.setattr(frozen, "FrozenForm", Wrong)
    again = result()
    assert 0 < plain.robust.correct < plain.clean.correct
    assert torch.equal(again.broken_by >= 0, plain.broken_by >= 0)
    assert again.robust == plain.robust
    assert [a.attacked for a in again.attacks] == [a.attacked for a in plain.attacks]

    # The second try also resumes.
    for stop in (9, 40):
        calls = iter(range(stop))

        def interrupt(*_, calls=calls):
            if next(calls, None) is None:
                raise KeyboardInterrupt

        monkeypatch.setattr(EVALUATE.time, "monotonic", iter(range(10**9)).__next__)
        folder = tmp_path / str(stop)
        with pytest.raises(KeyboardInterrupt):
            result(folder=folder, save_every=0, on_progress=interrupt)
        resumed = result(folder=folder)
        assert torch.equal(resumed.broken_by, again.broken_by)
        assert torch.equal(resumed.adversarial, again.adversarial)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_training_attacks_the_same_function_with_the_present_weights(batch_norm):
    trainer = tiny_trainer(batch_norm=batch_norm)
    assert trainer.form is not None
    assert len(trainer.form) > 0
    batch = first_batch(trainer)
    for _ in range(3):
        step = trainer.train_step(batch)
    before = copy.deepcopy(trainer.model)
    step = trainer.train_step(batch)
    usual = trainer.attack(before, batch.x, batch.y, seed=(trainer.seed, "train", 0), index=batch.index)
    assert (step.x_adv - usual).abs().max() < 1e-3 or (step.x_adv != usual).double().mean() < 0.02


# --- compiled forms; this backend needs no C++ compiler, and the slow tests use the usual one

BACKEND = "aot_eager"


@pytest.fixture
def compiled_in_python(monkeypatch):
    """Compile without a C++ compiler, and forget the code afterwards."""
    monkeypatch.setattr(frozen, "CompiledForm", partial(CompiledForm, backend=BACKEND))
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("small, batch norm", BACKEND),
        *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in ("small", "foreign residual", "ViT")),
    ],
)
def test_a_compiled_form_computes_the_same_and_leaves_the_model_as_it_was(name, backend):
    model, x = network(name)
    usual, counts = run(model, x), PassCounts()
    form = CompiledForm(model, x, dynamic=True, backend=backend)
    assert len(form) == 1, form.reason
    with form, count_passes(model, counts):
        assert "forward" in vars(model)
        fast = run(model, x)
        for count in (2, 5):
            torch.testing.assert_close(model(x[:count]), usual[0][:count], atol=1e-5, rtol=1e-4)
    assert "forward" not in vars(model)
    assert (counts.forward, counts.backward) == (len(x) + 7, len(x))
    for value, expected in zip(fast, usual, strict=True):
        torch.testing.assert_close(value, expected, atol=1e-5, rtol=1e-3)
    with form, torch.no_grad():  # compiled code reads the present weights
        for parameter in model.parameters():
            parameter.mul_(1.1)
        fast = model(x)
    torch.testing.assert_close(fast, model(x), atol=1e-5, rtol=1e-4)
    torch.compiler.reset()


def test_a_forward_set_on_the_instance_is_compiled_and_restored():
    model, x = network("small")
    model.forward = own = lambda inputs, forward=model.forward: -forward(inputs)
    usual = model(x)
    with CompiledForm(model, x, backend=BACKEND) as form:
        torch.testing.assert_close(model(x), usual)
    assert len(form) == 1
    assert vars(model)["forward"] is own
    torch.compiler.reset()


def no_compiler(graph, inputs):
    raise RuntimeError("no compiler")


def wrong_compiler(graph, inputs):
    return lambda *args: [-value for value in graph(*args)]


@pytest.mark.parametrize(
    ("backend", "reason"),
    [(no_compiler, "RuntimeError: no compiler"), (wrong_compiler, "its logits differ by more than rounding")],
)
def test_a_compiler_that_fails_or_computes_something_else_is_not_used(backend, reason, monkeypatch):
    monkeypatch.setattr(frozen, "CompiledForm", partial(CompiledForm, backend=backend))
    model, x = network("small")
    with pytest.warns(UserWarning, match=f"attacks run without torch.compile: .*{reason}$"):
        form = attack_form(model, x, compile=True)
    assert type(form) is FrozenForm
    assert len(form) > 1
    assert "forward" not in vars(model)
    torch.compiler.reset()


def test_a_compiler_that_fails_later_is_not_used_from_then_on():
    model, x = network("small")
    calls = []

    def once(graph, inputs):
        calls.append(1)
        if len(calls) > 2:  # one function with gradients, and one without
            raise RuntimeError("this size is too large")
        return graph

    form = CompiledForm(model, x, dynamic=False, backend=once)
    assert len(form) == 1, form.reason
    with form:
        torch.testing.assert_close(model(x[:3]), model(x)[:3])
    assert len(calls) > 2
    torch.compiler.reset()


def test_attacks_on_a_compiled_model_break_the_same_points(compiled_in_python):
    model, split = images()
    attacks = {"APGD-CE": APGD(THREAT, steps=4), "FAB-T": FAB(THREAT, steps=3, targets=2)}
    plain, fast = (evaluate(model, split, attacks, batch_size=8, compile=compile) for compile in (False, True))
    assert torch.equal(fast.broken_by, plain.broken_by)
    assert 0 < plain.robust.correct < plain.clean.correct


def test_training_compiles_attacks_on_request(compiled_in_python):
    updates = []
    for compile in (False, True):
        trainer = tiny_trainer(compile=compile)
        assert isinstance(trainer.form, CompiledForm if compile else FrozenForm)
        before = nn.utils.parameters_to_vector(trainer.model.parameters()).detach().clone()
        for _ in range(2):
            trainer.train_step(first_batch(trainer))
        updates.append(nn.utils.parameters_to_vector(trainer.model.parameters()).detach() - before)
    # Gradients near zero may change their sign, and with it some pixels of the attack.
    assert float((updates[1] - updates[0]).norm() / updates[0].norm()) < 0.05
