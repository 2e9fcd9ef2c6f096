"""The checker of proofs, against singular values, exact distances, attacks and broken files."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize

import atoll.checker
from atoll.checker import ProofError, check
from proof_cases import Graph, convolution_matrix, encode, with_digest

SOURCE = Path(atoll.checker.__file__)


def proven(path):
    return check(path).proven.tolist()


def test_it_is_short_and_independent():
    assert len(SOURCE.read_text().splitlines()) <= 500
    loaded = "import sys, atoll.checker; print(*sorted(m for m in sys.modules if m.startswith(('torch', 'atoll'))))"
    names = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout.split()
    assert names == ["atoll", "atoll.checker"]


# --- norms of layers

LAYERS = [
    # out, in, kernel, size, stride, padding
    (5, 7, (1, 1), (1, 1), (1, 1), (0, 0)),
    (7, 5, (1, 1), (1, 1), (1, 1), (0, 0)),
    (3, 2, (3, 3), (6, 5), (1, 1), (1, 1)),
    (2, 3, (3, 3), (5, 6), (1, 1), (0, 0)),
    (2, 2, (4, 4), (7, 6), (2, 2), (1, 1)),
    (3, 1, (5, 5), (8, 8), (2, 2), (2, 2)),
    (2, 2, (3, 2), (6, 7), (2, 1), (1, 0)),
    (4, 2, (4, 4), (8, 8), (4, 4), (0, 0)),
    (3, 2, (3, 3), (3, 3), (1, 1), (0, 0)),
    (2, 2, (2, 2), (7, 7), (3, 3), (1, 1)),
]


@pytest.mark.parametrize(("out", "channels", "kernel", "size", "stride", "padding"), LAYERS)
def test_norms_are_proven_down_to_the_largest_singular_value(out, channels, kernel, size, stride, padding, tmp_path):
    rng = np.random.default_rng([out, channels, *kernel, *size])
    weight = rng.normal(size=(out, channels, *kernel))
    matrix = convolution_matrix(weight, size, stride, padding)
    largest = np.linalg.norm(matrix, 2)
    x = rng.uniform(size=(1, channels, *size))
    head = rng.normal(size=(2, len(matrix)))
    bias = [1 + np.abs(head).sum() * np.abs(matrix @ x.ravel()).max(), 0.0]  # the first class wins

    def holds(norm, method):
        graph = Graph()
        graph.convolution(weight, stride, padding, norm=norm, method=method)
        graph.relu()
        graph.view(len(matrix))
        graph.linear(head, bias)
        return proven(graph.write(tmp_path / "f", x, [0], [1e-9]))[0]

    assert holds(largest * (1 + 1e-6), "exact")
    assert not holds(largest * (1 - 1e-6), "exact")
    for method in ("strip", "torus"):  # upper bounds: never below the truth, and no more than the sum of all taps
        assert not holds(largest * (1 - 1e-6), method)
        assert holds(sum(np.linalg.norm(weight[:, :, a, b], 2) for a, b in np.ndindex(*kernel)) * 1.001, method)


def test_a_ring_is_tight_for_a_long_strip(tmp_path):
    """Two equal taps have the norm 2 cos(pi / (2 n + 2)) on n places with padding, and 2 on every ring."""
    weight, x = np.ones((1, 1, 1, 2)), np.full((1, 1, 1, 30), 0.5)
    for norm, method, expected in [(1.997, "exact", False), (1.998, "exact", True), (1.999, "strip", False),
                                   (2.001, "strip", True), (2.001, "torus", True)]:  # fmt: skip
        graph = Graph()
        graph.convolution(weight, padding=(0, 1), norm=norm, method=method)
        graph.relu()
        graph.view(31)
        graph.linear(np.stack([np.ones(31), np.zeros(31)]))
        assert proven(graph.write(tmp_path / "f", x, [0], [1e-6])) == [expected], (norm, method)


def test_a_linear_residual_is_one_convolution(tmp_path):
    """x + scale * conv(x) may have a smaller norm than 1 + its norm: a negative kernel cancels."""
    rng = np.random.default_rng(0)
    weight, scale = rng.normal(size=(2, 2, 3, 3)), np.array([-0.5, 0.7])
    matrix = convolution_matrix(weight, (5, 5), (1, 1), (1, 1))
    whole = np.eye(50) + np.repeat(scale, 25)[:, None] * matrix
    largest, x = np.linalg.norm(whole, 2), rng.uniform(size=(4, 2, 5, 5))
    head = rng.normal(size=(3, 50))
    logits = np.maximum(x.reshape(4, -1) @ whole.T, 0) @ head.T
    label = logits.argmax(1)
    margin = np.partition(logits, -2)[:, -1] - np.partition(logits, -2)[:, -2]
    least = margin / (largest * max(np.linalg.norm(a - b) for a in head for b in head))  # a radius that must be proven

    def claims(norm, factor):
        graph = Graph()
        branch = graph.convolution(weight, padding=(1, 1))
        scaled = graph.call("mul.Tensor", self=branch, other=graph.constant(scale[:, None, None]))
        graph.call("add.Tensor", norm=norm, self={"node": 0}, other=scaled, alpha=1)
        graph.relu()
        graph.view(50)
        graph.linear(head)
        return proven(graph.write(tmp_path / "f", x, label, factor * least))

    assert all(claims(largest * (1 + 1e-7), 1 - 1e-6))
    assert not any(claims(largest * (1 - 1e-5), 1e-3))
    assert not any(claims(largest * (1 + 1e-7), 100))


# --- radii


def test_a_linear_classifier_has_the_distance_to_its_nearest_plane(tmp_path):
    rng = np.random.default_rng(1)
    weight, bias, x = rng.normal(size=(4, 6)), rng.normal(size=4), rng.uniform(size=(20, 6))
    logits = x @ weight.T + bias
    label = logits.argmax(1)
    distance = np.full(20, np.inf)
    for i, (row, j) in enumerate(zip(logits, label, strict=True)):
        for k in set(range(4)) - {j}:
            distance[i] = min(distance[i], (row[j] - row[k]) / np.linalg.norm(weight[j] - weight[k]))
    graph = Graph()
    graph.linear(weight, bias)
    assert all(proven(graph.write(tmp_path / "f", x, label, distance * (1 - 1e-9))))
    assert not any(proven(graph.write(tmp_path / "f", x, label, distance * (1 + 1e-9))))
    assert not any(proven(graph.write(tmp_path / "f", x, (label + 1) % 4, 0 * distance)))


def minmax_net(rng):
    """A net of two layers with MinMax, its function, and the norms of its layers."""
    first, second = rng.normal(size=(4, 1, 3, 3)), rng.normal(size=(3, 64))
    matrix = convolution_matrix(first, (4, 4), (1, 1), (1, 1))

    def function(x):
        pairs = (x.reshape(len(x), -1) @ matrix.T).reshape(len(x), 2, 2, 16)
        return np.sort(pairs, 2).reshape(len(x), -1) @ second.T

    def graph(norm=None, precision="float64"):
        graph = Graph(precision)
        graph.convolution(first, padding=(1, 1), norm=np.linalg.norm(matrix, 2) * (1 + 1e-9) if norm is None else norm)
        graph.minmax(4, 4, 4)
        graph.view(64)
        graph.linear(second)
        return graph

    return graph, function, np.linalg.norm(matrix, 2), second


def test_minmax_is_evaluated_and_does_not_stretch(tmp_path):
    rng = np.random.default_rng(2)
    graph, function, norm, head = minmax_net(rng)
    x = rng.uniform(size=(70, 1, 4, 4))  # more than are evaluated together
    logits = function(x)
    label = logits.argmax(1)
    lengths = np.linalg.norm(head[label][:, None] - head, axis=2)
    margin = np.take_along_axis(logits, label[:, None], 1) - logits
    ratio = np.where(lengths > 0, margin / np.where(lengths > 0, lengths * norm, 1), np.inf).min(1)
    assert all(proven(graph().write(tmp_path / "f", x, label, ratio * (1 - 1e-6))))
    assert not any(proven(graph().write(tmp_path / "f", x, label, ratio * (1 + 1e-6))))
    assert not any(proven(graph(0.99 * norm).write(tmp_path / "f", x, label, ratio * 0.01)))
    # The largest proven radii withstand steps in all directions and along the steepest ones.
    for point, j, radius in zip(x[:10], label, ratio, strict=False):
        slope = np.array(
            [function(point[None] + 1e-6 * e.reshape(1, 1, 4, 4)) - function(point[None]) for e in np.eye(16)]
        )
        steps = np.concatenate([rng.normal(size=(200, 16)), (slope[:, 0] - slope[:, 0, [j]]).T[np.arange(3) != j]])
        steps *= radius / np.linalg.norm(steps, axis=1, keepdims=True)
        assert (function(point[None] + steps.reshape(-1, 1, 4, 4)).argmax(1) == j).all()


def test_entries_that_are_used_twice_are_not_minmax(tmp_path):
    graph = Graph()
    graph.linear(np.eye(4), norm=1.001)
    first = graph.call("slice.Tensor", self=graph.last, dim=1, start=0, end=2, step=1)
    graph.call("cat.default", tensors=[first, first], dim=1)
    graph.linear(np.eye(4))
    proof = check(graph.write(tmp_path / "f", np.arange(4.0)[None], [0], [0.0]))
    assert not proof.proven.any()
    assert "each entry used once" in proof.problems[0]


@pytest.mark.parametrize(("gap", "expected"), [(1e-3, [True, True]), (1e-7, [False, True])])
def test_rounding_of_the_deployed_precision_is_counted(gap, expected, tmp_path):
    """Sums of 1000 products near 1 are off by about 1e-4 in float32 at worst, and next to nothing in float64."""
    weight = np.ones((2, 1000), np.float32)
    x = np.full((1, 1000), 0.001, np.float32)
    results = []
    for precision in ("float32", "float64"):
        graph = Graph(precision)
        graph.linear(weight, [gap, 0])
        results += proven(graph.write(tmp_path / "f", x, [0], [0.0]))
    assert results == expected


@pytest.mark.parametrize(("size", "expected"), [(1e20, [True, True]), (1e38, [False, True])])
def test_claims_that_may_overflow_are_not_proven(size, expected, tmp_path):
    results = []
    for precision in ("float32", "float64"):
        graph = Graph(precision)
        graph.linear(np.array([[size, size], [0, 0]]))
        results += proven(graph.write(tmp_path / "f", [[1.0, 1.0]], [0], [0.1]))
    assert results == expected


def test_other_operations_are_refused_by_name(tmp_path):
    graph = Graph()
    graph.linear(np.eye(2), norm=1.1)
    graph.call("sigmoid.default", self=graph.last)
    proof = check(graph.write(tmp_path / "f", [[1.0, 0.0]], [0], [0.0]))
    assert (proof.proven.tolist(), proof.problems) == (
        [False],
        ["aten.sigmoid.default is not supported (net.py, line 1)"],
    )


# --- Centroid Nets


def region_distance(z, own, other, low, high):
    """How far z is from where ``other`` is at least as close as all ``own``, within a box."""
    constraints = [{"type": "ineq", "fun": lambda y, p=p: np.sum((y - p) ** 2) - np.sum((y - other) ** 2)} for p in own]
    result = minimize(lambda y: np.sum((y - z) ** 2), other, constraints=constraints, bounds=[(low, high)] * len(z),
                      options={"ftol": 1e-12, "maxiter": 500})  # fmt: skip
    return np.sqrt(result.fun)


def best_multipliers(z, own, other, low, high):
    """The multipliers of the dual, by a search on a grid around the best ones so far."""
    margin = np.sum((z - other) ** 2) - np.sum((z - own) ** 2, 1)

    def dual(weights):
        v = 2 * (weights @ own - weights.sum() * other)
        move = np.clip(-v, low - z, high - z)
        return weights @ margin + np.sum(move**2 / 2 + v * move)

    result = minimize(lambda w: -dual(np.abs(w)), np.full(len(own), 0.1), method="Nelder-Mead",
                      options={"maxiter": 4000, "xatol": 1e-10, "fatol": 1e-14})  # fmt: skip
    return np.abs(result.x)


def corner():
    """Two own centroids whose planes meet in a corner, far from which either plane alone is closer."""
    centers = np.array([[[0.6, 0.0], [0.0, 0.6]], [[0.9, 0.9], [5.0, 5.0]]])
    return centers, np.array([0.1, 0.1])


def test_one_centroid_per_class_has_the_distance_to_the_plane_between(tmp_path):
    rng = np.random.default_rng(3)
    centers, x = rng.uniform(size=(2, 1, 5)), rng.uniform(size=(30, 5))
    square = ((x[:, None] - centers[:, 0]) ** 2).sum(2)
    label = square.argmin(1)
    distance = np.abs(square[:, 0] - square[:, 1]) / (2 * np.linalg.norm(centers[0, 0] - centers[1, 0]))
    graph = Graph()
    graph.centroids(centers)
    assert all(proven(graph.write(tmp_path / "f", x, label, distance * (1 - 1e-8))))
    assert not any(proven(graph.write(tmp_path / "f", x, label, distance * (1 + 1e-8))))
    assert not any(proven(graph.write(tmp_path / "f", x, 1 - label, 0 * distance)))


def test_multipliers_prove_the_distance_to_a_polyhedron_and_no_more(tmp_path):
    centers, z = corner()
    truth = region_distance(z, centers[0], centers[1, 0], -10, 10)
    weights = best_multipliers(z, centers[0], centers[1, 0], -10, 10)
    graph = Graph()
    graph.centroids(centers)

    def holds(radius, weights):
        weights = np.atleast_2d(weights)
        count = len(weights)
        dual = {"dual.point": np.zeros(count, int), "dual.other": np.full(count, 2), "dual.multiplier": weights,
                "dual.own": np.tile([0, 1], (count, 1))}  # fmt: skip
        return proven(graph.write(tmp_path / "f", z[None], [0], [radius], bounds=None, **dual))[0]

    assert not holds(truth * (1 - 1e-4), [0.0, 0.0])  # a single plane does not prove it
    assert holds(truth * (1 - 1e-4), weights)
    rng = np.random.default_rng(4)
    assert not holds(truth * (1 + 1e-4), np.concatenate([weights[None], rng.exponential(size=(2000, 2))]))


def test_bounds_of_inputs_count_if_centroids_are_compared_with_inputs(tmp_path):
    """Beyond the box the other centroid would be close; within it, it is further away."""
    centers, z = np.array([[[0.5, 0.0]], [[0.5, 1.5]]]), np.array([0.95, 0.7])
    centers[1, 0] = [2.5, 0.0]
    truth = region_distance(z, centers[0], centers[1, 0], -10, 10)  # the plane is at 1.5
    assert truth == pytest.approx(0.55, abs=1e-6)
    graph = Graph()
    graph.centroids(centers)
    dual = {"dual.point": np.array([0]), "dual.other": np.array([1]), "dual.own": np.array([[0]]),
            "dual.multiplier": np.array([[50.0]])}  # fmt: skip
    assert proven(graph.write(tmp_path / "f", z[None], [0], [5.0], bounds=[0, 1], **dual)) == [True]
    assert proven(graph.write(tmp_path / "f", z[None], [0], [5.0], **dual)) == [False]


def test_moves_to_the_other_side_count_within_bounds(tmp_path):
    """The plane is at 0.1, within the box; no multiplier proves more than the way there."""
    graph = Graph()
    graph.centroids(np.array([[[0.5, 0.0]], [[-0.3, 0.0]]]))
    dual = {"dual.point": np.array([0]), "dual.other": np.array([1]), "dual.own": np.array([[0]])}

    def holds(radius, weight):
        more = dual | {"dual.multiplier": np.array([[weight]])}
        return proven(graph.write(tmp_path / "f", [[0.95, 0.7]], [0], [radius], bounds=[0, 1], **more))[0]

    assert holds(0.8499, 0.0)
    assert not any(holds(0.8501, weight) for weight in np.linspace(0, 5, 50))


def test_multipliers_belong_to_centroids_of_the_claimed_class(tmp_path):
    centers, z = corner()
    graph = Graph()
    graph.centroids(centers)
    dual = {"dual.point": np.array([0]), "dual.other": np.array([2]), "dual.own": np.array([[3]])}
    graph.write(tmp_path / "f", z[None], [0], [9.0], **dual, **{"dual.multiplier": np.array([[9.0]])})
    with pytest.raises(ProofError, match="expected centroids of the class"):
        check(tmp_path / "f")
    graph.write(tmp_path / "f", z[None], [0], [9.0], **dual, **{"dual.multiplier": np.array([[-9.0]])})
    with pytest.raises(ProofError, match="non-negative"):
        check(tmp_path / "f")


def test_rounding_of_distances_is_counted(tmp_path):
    """Squared distances of about 100 that differ by 1e-4 may be a tie in float32, but not in float64."""
    centers, results = np.zeros((2, 1, 400), np.float32), []
    centers[0, 0, 0], centers[1, 0, 0] = 1.0, -1.0
    z = np.full((1, 400), 0.5, np.float32)
    z[0, 0] = 2**-15
    for precision in ("float32", "float64"):
        graph = Graph(precision)
        graph.centroids(centers)
        results += proven(graph.write(tmp_path / "f", z, [0], [0.0]))
    assert results == [False, True]


def test_stretched_pixels_cost_extra_moves(tmp_path):
    """From 0.95, which counts as 1, to 0.5, where the two centroids are equally close."""
    centers, z = np.array([[[1.0, 0.5]], [[0.0, 0.5]]]), np.array([[0.95, 0.5]])
    graph = Graph()
    graph.centroids(centers, stretch=0.1)

    def holds(radius, weight):
        dual = {"dual.point": np.array([0]), "dual.other": np.array([1]), "dual.own": np.array([[0]])}
        return proven(
            graph.write(tmp_path / "f", z, [0], [radius], **dual, **{"dual.multiplier": np.array([[weight]])})
        )[0]

    assert holds(0.39, 0.0)  # the plane alone: 0.5 / 1.25
    assert not holds(0.41, 0.0)
    assert holds(0.4499, 0.18)
    assert not any(holds(0.4501, weight) for weight in np.linspace(0.01, 2, 100))


def test_a_head_with_other_centroids_than_it_selects_is_refused(tmp_path):
    centers, z = corner()
    graph = Graph()
    graph.centroids(centers)
    graph.arrays["constant_1"] = graph.arrays["constant_1"] + 0.1
    proof = check(graph.write(tmp_path / "f", z[None], [0], [0.0]))
    assert (proof.proven.tolist(), proof.problems) == (
        [False],
        ["the head computes distances to other centroids than it selects"],
    )


def test_a_residual_with_a_stride_is_no_single_convolution(tmp_path):
    """The last pixel counts twice, so the norm is 2; a kernel with both taps would have the norm 1."""
    graph = Graph()
    branch = graph.convolution(np.array([[[[1.0, 0.0], [0.0, 0.0]]]]), (2, 2), (1, 1))
    graph.call("add.Tensor", norm=1.0001, self={"node": 0}, other=branch, alpha=1)
    graph.view(4)
    graph.linear(np.array([[0, 0, 0, 1.0], [0, 0, 0, 0]]), np.array([0.0, 1.0]), norm=1.0001)
    path = tmp_path / "f"
    path.write_bytes(encode(*graph.parts(np.zeros((1, 1, 2, 2)), [1], [0.6])))
    assert proven(path) == [False]
    graph.norms.pop("node_2")  # two parts, whose norms are added
    graph.norms["node_1"] = [1.0001, "exact"]
    for radius, holds in ((0.2, True), (0.6, False)):
        path.write_bytes(encode(*graph.parts(np.zeros((1, 1, 2, 2)), [1], [radius])))
        assert proven(path) == [holds]


# --- files


def small_file():
    graph, function, _, _ = minmax_net(np.random.default_rng(5))
    x = np.random.default_rng(6).uniform(size=(3, 1, 4, 4))
    return graph().parts(x, function(x).argmax(1), np.full(3, 1e-6))


def test_an_altered_file_is_refused_unless_its_digest_is_new_and_its_claims_hold(tmp_path):
    path = tmp_path / "f"
    header, arrays = small_file()
    path.write_bytes(encode(header, arrays))
    assert proven(path) == [True] * 3
    raw = path.read_bytes()
    arrays["radius"] = arrays["radius"] / 2
    at = raw.index(small_file()[1]["radius"].tobytes())
    path.write_bytes(raw[:at] + arrays["radius"].tobytes() + raw[at + 24 :])
    with pytest.raises(ProofError, match="the digest does not match"):
        check(path)
    path.write_bytes(encode(header, arrays))
    assert proven(path) == [True] * 3
    arrays["radius"] = np.array([1e-7, 10.0, 1e-7])
    path.write_bytes(encode(header, arrays))
    assert proven(path) == [True, False, True]


EDITS = {
    "missing: radius": lambda h, a: a.pop("radius"),
    "missing: nodes": lambda h, a: h.pop("nodes"),
    "format: expected 1, got 2": lambda h, a: h.update(format=2),
    "precision: expected float32 or float64, got 'int8'": lambda h, a: h.update(precision="int8"),
    "input: expected float32, got float64": lambda h, a: h.update(precision="float32"),
    "expected a class and a radius for each input": lambda h, a: a.update({"radius": a["radius"][:2]}),
    "non-negative": lambda h, a: a.update({"radius": -a["radius"]}),
    "radius: expected finite numbers": lambda h, a: a.update({"radius": a["radius"] * np.nan}),
    "constant_0: expected finite numbers": lambda h, a: a.update({"constant_0": a["constant_0"] * np.inf}),
    "inputs: the digests do not match": lambda h, a: a.update({"input": a["input"] + 1}),
    "bounds: expected null or low < high": lambda h, a: h.update(bounds=[1, 0]),
    "node_1: expected a norm": lambda h, a: h["norms"].update(node_1=[-1.0, "exact"]),
    "expected nodes with different names": lambda h, a: h["nodes"][2].update(name=h["nodes"][1]["name"]),
    "the constant 'nothing' is missing": lambda h, a: h["nodes"][1]["args"].update(weight={"constant": "nothing"}),
    "node 1 refers ahead": lambda h, a: h["nodes"][1]["args"].update(input={"node": 2}),
    "malformed": lambda h, a: h.update(output=99),
    "malformed \\(IndexError": lambda h, a: a.update({"class": a["class"] + 7}),
    "malformed \\(ValueError": lambda h, a: a.update({"constant_1": a["constant_1"][:, :5]}),
    "invalid padding or stride": lambda h, a: h["nodes"][1]["args"].update(padding=[10**9, 0]),
}


@pytest.mark.parametrize("message", EDITS)
def test_malformed_files_are_refused_with_one_sentence(message, tmp_path):
    header, arrays = small_file()
    EDITS[message](header, arrays)
    (tmp_path / "f").write_bytes(encode(header, arrays))
    with pytest.raises(ProofError, match=message) as error:
        check(tmp_path / "f")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("raw", [b"", b"1234567", b"\xff" * 100, b"\2" + b"\0" * 7 + b"{}", b"\x80\x04}." * 20])
def test_other_files_are_refused(raw, tmp_path):
    (tmp_path / "f").write_bytes(raw)
    with pytest.raises(ProofError, match="malformed"):
        check(tmp_path / "f")
    with pytest.raises(ProofError, match="cannot read the file: No such file"):
        check(tmp_path / "nothing")
    deep = b'{"__metadata__":{"digest":"' + b"0" * 64 + b'","proof":"' + b"[" * 100_000 + b'"}}'
    (tmp_path / "f").write_bytes(with_digest(len(deep).to_bytes(8, "little") + deep))
    with pytest.raises(ProofError, match="malformed"):
        check(tmp_path / "f")


def test_random_damage_raises_nothing_else(tmp_path):
    rng, path = np.random.default_rng(7), tmp_path / "f"
    raw = encode(*small_file())
    for _ in range(300):
        damaged = bytearray(raw)
        for _ in range(rng.integers(1, 4)):
            damaged[rng.integers(len(raw))] ^= 1 << rng.integers(8)
        path.write_bytes(bytes(damaged[: rng.integers(1, len(raw)) if rng.random() < 0.2 else None]))
        with pytest.raises(ProofError):
            check(path)


VALUES = [
    None,
    -1,
    0,
    1,
    2,
    10**30,
    1e300,
    float("nan"),
    "x",
    [],
    {},
    [1, 2],
    {"node": 0},
    {"constant": "radius"},
    True,
]


def places(value, path=()):
    """All places in nested lists and dictionaries."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


@pytest.mark.parametrize("seed", range(4))
def test_random_edits_prove_nothing_that_is_false(seed, tmp_path):
    """Edits of the header or of arrays, with a new digest: refused, or a result; and never a proof of a false claim."""
    rng, path = np.random.default_rng([8, seed]), tmp_path / "f"
    header, arrays = small_file()
    arrays["radius"] = np.full(3, 1e6)
    for _ in range(75):
        h, a = copy.deepcopy(header), dict(arrays)
        if rng.random() < 0.7:
            *parents, last = (spots := list(places(h)))[rng.integers(len(spots))]
            target = h
            for key in parents:
                target = target[key]
            target[last] = VALUES[rng.integers(len(VALUES))]
        else:
            name = str(rng.choice(sorted(set(a) - {"radius"})))
            a[name] = [a[name][:1], a[name].ravel(), a[name] * 0, a[name].astype("int64"), a[name].T][rng.integers(5)]
        path.write_bytes(encode(h, a))
        try:
            proof = check(path)
        except ProofError:
            continue
        # Zero weights are constant functions, whose claims are true or ties.
        assert not proof.proven.any() or any(not v.any() for v in a.values()), json.dumps(h)[:300]
