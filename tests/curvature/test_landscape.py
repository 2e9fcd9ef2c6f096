"""Landscapes against direct evaluation; weights as they were."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from atoll.curvature import input_landscape, weight_landscape
from atoll.curvature.landscape import Landscape, filter_normalized
from atoll.errors import DataError, InputError
from curvature.cases import make_risk, mean_loss, weights


@pytest.mark.parametrize("model", ["conv-bn", "vit"])
def test_inputs(model):
    p = make_risk(model)
    p.model.train()
    result = input_landscape(p.model, p.x, p.y, radius=0.1, steps=5, micro_batch=7)
    assert p.model.training
    p.model.eval()
    x = p.x.clone().requires_grad_()
    F.cross_entropy(p.model(x), p.y).backward()
    row = result.loss[:, 2]  # along the gradient alone
    for a, value in zip(result.a, row, strict=True):
        with torch.no_grad():
            assert float(F.cross_entropy(p.model(p.x + a * x.grad.sign()), p.y)) == pytest.approx(float(value))
    assert row[2] < row[3]  # uphill
    # Along the other direction every pixel moves by b, up or down, each point in its own way.
    seen = []
    p.model.normalize.register_forward_hook(lambda module, inputs, output: seen.append(output))
    again = input_landscape(p.model, p.x, p.y, radius=0.1, steps=5)
    torch.testing.assert_close(again.loss, result.loss, rtol=1e-12, atol=0)
    moved = seen[3].view(5, *p.x.shape)[4] - p.x  # the first pass is for the gradient; row 2 has a = 0
    torch.testing.assert_close(moved.abs(), torch.full_like(moved, 0.1))
    assert abs(float(moved.mean())) < 0.06
    assert not torch.equal(moved[0], moved[1])


@pytest.mark.parametrize("model", ["mlp", "conv-bn"])
def test_weights(model):
    p = make_risk(model, "trades", micro_batch=3)
    before = weights(p).clone()
    result = weight_landscape(p, radius=0.5, steps=3)
    assert torch.equal(weights(p), before)
    first, second = (torch.cat([d.flatten() for d in filter_normalized(p, (0, k))]) for k in (0, 1))
    value = mean_loss(p)
    for i, a in enumerate(result.a):
        for j, b in enumerate(result.b):
            assert float(result.loss[i, j]) == pytest.approx(float(value(before + a * first + b * second)))


def test_directions_are_as_long_as_the_net_filter_by_filter():
    p = make_risk("conv-bn")
    first, second = filter_normalized(p, 0), filter_normalized(p, 1)
    for w, d in zip(p.parameters, first, strict=True):
        if w.dim() > 1:
            torch.testing.assert_close(d.flatten(1).norm(dim=1), w.detach().flatten(1).norm(dim=1))
        else:
            assert not d.any()
    assert not torch.equal(first[0], second[0])


def test_weights_come_back_after_a_failure():
    p = make_risk("mlp")
    before = weights(p).clone()

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weight_landscape(p, steps=3, on_progress=stop)
    assert torch.equal(weights(p), before)


@pytest.mark.pictures
def test_data_and_picture(tmp_path):
    result = weight_landscape(make_risk("mlp"), steps=3)
    result.save(tmp_path / "landscape.npz")
    with np.load(tmp_path / "landscape.npz") as data:
        np.testing.assert_array_equal(data["loss"], result.loss.numpy())
        np.testing.assert_array_equal(data["a"], result.a.numpy())
        assert list(data["axes"]) == ["first random direction", "second random direction"]
    figure = result.plot()
    figure.savefig(tmp_path / "landscape.png")
    assert len(figure.axes) == 3  # surface, contour, scale


def test_progress_counts_rows_of_the_grid():
    p, steps = make_risk("mlp"), []
    input_landscape(p.model, p.x, p.y, radius=0.1, steps=3, on_progress=lambda *step: steps.append(step))
    weight_landscape(p, steps=3, on_progress=lambda *step: steps.append(step))
    assert steps == 2 * [(1, 3), (2, 3), (3, 3)]


def test_a_pass_over_inputs_has_at_most_128_rows():
    p, rows = make_risk("mlp", points=8), []
    p.model.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    input_landscape(p.model, p.x, p.y, radius=0.1, steps=17)  # a row of the grid has 17 * 8 inputs
    assert rows == [8, *17 * [128, 8]]


@pytest.mark.parametrize(
    "changes",
    [
        {"a": np.zeros((3, 1))},
        {"b": np.zeros((3, 1))},
        {"loss": np.zeros((2, 3))},
        {"loss": np.zeros(3)},
        {"a": np.full(3, "left")},
        {"axes": np.array(["only one"])},
    ],
)
def test_a_damaged_file_is_one_sentence(changes, tmp_path):
    sound = {"a": np.arange(3), "b": np.arange(3), "loss": np.eye(3), "axes": np.array(["up", "down"])}
    np.savez(tmp_path / "sound.npz", **sound)
    assert Landscape.load(tmp_path / "sound.npz").loss.shape == (3, 3)
    np.savez(tmp_path / "damaged.npz", **sound | changes)
    with pytest.raises(DataError, match=r"damaged.npz: expected"):
        Landscape.load(tmp_path / "damaged.npz")


def test_nonsense_is_refused():
    p = make_risk("mlp")
    for options in ({"radius": 0.0}, {"radius": 1.0, "steps": 4}, {"radius": 1.0, "steps": 1}):
        with pytest.raises(InputError, match=r"radius: expected a number > 0|steps: expected"):
            weight_landscape(p, **options)
        with pytest.raises(InputError, match=r"radius: expected a number > 0|steps: expected"):
            input_landscape(p.model, p.x, p.y, **options)
    with pytest.raises(InputError, match="labels: expected one per point"):
        input_landscape(p.model, p.x, p.y[:2], radius=1.0)
