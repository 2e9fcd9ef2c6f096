"""Random networks: whatever is certified withstands attacks within the radius, and no slope is above its bound."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest

from atoll.certify import GloRo, NearestCentroid
from certify.break_certificates import Refusal, attempt, find_breaks, in_double, largest_slopes, points
from certify.random_graphs import random_centroid_net, random_net

CHUNK = 10  # networks in one test
FAST, SLOW = range(2), range(2, 400)
ROUNDING = 1e-6  # of slopes that are computed in float64, relative


@dataclass(frozen=True)
class Outcome:
    """What happened to a random network.

    Args:
        refusal: the reason if there is no certifier, else "".
        problems: broken certificates, and slopes above their bounds.
        certified: points with a positive radius.
        detected: factors that radii were multiplied by, for which the attack broke a certificate.
    """

    refusal: str = ""
    problems: tuple[str, ...] = ()
    certified: int = 0
    detected: tuple[float, ...] = ()


@functools.cache
def examine(seed: int) -> Outcome:
    """Certify and attack the network of a seed."""
    net = random_net(seed)
    certifier = attempt(lambda: GloRo.proven(net, net.shape))
    if isinstance(certifier, Refusal):
        return Outcome(refusal=certifier.message)
    x = points(certifier.model, net.shape, net.dtype, seed)
    problems = [str(problem) for problem in find_breaks(certifier, net, x, seed=seed)]
    slopes = largest_slopes(in_double(net), x[:10].double())
    bounds = certifier.constants.lipschitz
    if (slopes > bounds * (1 + ROUNDING)).any():
        problems.append(f"slopes {slopes.tolist()} are above the bounds {bounds.tolist()}")
    certified = int((certifier(x).radius > 0).sum())
    detected = [factor for factor in (1.5, 3.0) if find_breaks(certifier, net, x, factor=factor, seed=seed)]
    return Outcome("", tuple(problems), certified, tuple(detected))


@pytest.mark.parametrize("chunk", [*FAST, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in SLOW)])
def test_certificates_hold(chunk):
    for seed in range(CHUNK * chunk, CHUNK * (chunk + 1)):
        outcome = examine(seed)
        assert not outcome.problems, f"seed {seed}, {random_net(seed)}: {outcome.problems[0]}"


def examine_centroids(seed: int) -> Outcome:
    """Certify and attack the Centroid Net of a seed."""
    net = random_centroid_net(seed)
    certifier = attempt(lambda: NearestCentroid.proven(net, radii=(0.1, 1.0), eta=(seed % 3) / 50))
    if isinstance(certifier, Refusal):
        return Outcome(refusal=certifier.message)
    x = points(certifier.model, net.input_shape, net.head.centroids.dtype, seed)
    x = x if net.bounds is None else x.clamp(*net.bounds)
    breaks = find_breaks(certifier, net, x, bounds=net.bounds, seed=seed)
    return Outcome("", tuple(map(str, breaks)), int((certifier(x).radius > 0).sum()))


@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(1, 40))])
def test_certificates_of_centroid_nets_hold(chunk):
    outcomes = {seed: examine_centroids(seed) for seed in range(CHUNK * chunk, CHUNK * (chunk + 1))}
    for seed, outcome in outcomes.items():
        assert not outcome.problems, f"seed {seed}: {outcome.problems[0]}"
    # About half of the nets certify something; one chunk of slow seeds has a single such net.
    assert any(outcome.certified for outcome in outcomes.values())


def test_attacks_detect_radii_that_are_too_large():
    outcomes = [examine(seed) for seed in range(CHUNK * len(FAST))]
    certified = [outcome for outcome in outcomes if outcome.certified]
    assert len(certified) >= 0.35 * len(outcomes)
    for factor, share in ((1.5, 0.2), (3.0, 0.4)):
        assert sum(factor in outcome.detected for outcome in certified) >= share * len(certified)
