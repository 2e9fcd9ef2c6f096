"""Random streams: the numbers are good, and they belong to their point alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from atoll.errors import InputError
from atoll.rng import PointRNG, generator, key


def test_distributions():
    index = torch.arange(500)
    uniform = PointRNG(0, "u", index=index).uniform(200).flatten().numpy()
    normal = PointRNG(0, "n", index=index).normal(200).flatten().numpy()
    sign = PointRNG(0, "r", index=index).rademacher(200)
    whole = PointRNG(0, "i", index=index).integers(7, 200).flatten().numpy()
    assert stats.kstest(uniform, "uniform").pvalue > 1e-3
    assert stats.kstest(normal, "norm").pvalue > 1e-3
    assert abs(float(sign.mean())) < 4 / 100_000**0.5
    assert set(sign.unique().tolist()) == {-1.0, 1.0}
    assert stats.chisquare([(whole == k).sum() for k in range(7)]).pvalue > 1e-3


def test_uniform_never_reaches_its_ends():
    for dtype in (torch.float32, torch.float64):
        draw = PointRNG(1, index=torch.arange(2000)).uniform(500, dtype=dtype)
        assert draw.min() > 0
        assert draw.max() < 1


def test_rows_draws_and_names_are_uncorrelated():
    index = torch.arange(2000)
    first = PointRNG(0, "a", index=index).normal(50)
    neighbors = torch.corrcoef(torch.stack([first[:-1].flatten(), first[1:].flatten()]))[0, 1]
    draws = torch.corrcoef(torch.stack([first[:, :-1].flatten(), first[:, 1:].flatten()]))[0, 1]
    names = torch.corrcoef(torch.stack([first.flatten(), PointRNG(0, "b", index=index).normal(50).flatten()]))[0, 1]
    seeds = torch.corrcoef(torch.stack([first.flatten(), PointRNG(1, "a", index=index).normal(50).flatten()]))[0, 1]
    assert max(abs(float(c)) for c in (neighbors, draws, names, seeds)) < 4 / 100_000**0.5


@settings(deadline=None, max_examples=50)
@given(rows=st.lists(st.integers(0, 2**40), min_size=1, max_size=8, unique=True), data=st.data())
def test_a_row_does_not_depend_on_the_others(rows, data):
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
    index = torch.tensor(rows)
    together, alone = PointRNG(3, index=index), PointRNG(3, index=index[keep])
    assert torch.equal(together.uniform(3)[keep], alone.uniform(3))
    # Dropping rows in the middle keeps the counters of the rest.
    assert torch.equal(together[keep].normal(2, 2), alone.normal(2, 2))


def test_rows_can_be_refilled():
    old, new = PointRNG(0, index=torch.tensor([1, 2])), PointRNG(0, index=torch.tensor([7]))
    old.bits(5)
    one, other = old[torch.tensor([1])].tensors(), new.tensors()
    mixed = PointRNG.from_tensors({name: torch.cat([one[name], other[name]]) for name in one})
    expected = PointRNG(0, index=torch.tensor([2, 7]))
    assert torch.equal(mixed.bits(1)[1], expected.bits(1)[1])
    fresh = PointRNG(0, index=torch.tensor([2])).bits(7)
    assert torch.equal(mixed.bits(1)[0], fresh[0, 6:7])


def test_global_generator_is_left_alone():
    before = torch.get_rng_state()
    PointRNG(0, index=torch.arange(3)).normal(3)
    generator("x")
    assert torch.equal(before, torch.get_rng_state())


def splitmix(x: int) -> int:
    """SplitMix64's output function on Python's own integers."""
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_bits_are_splitmix64():
    mask = (1 << 64) - 1
    # Published first outputs of SplitMix64 for seed 1234567.
    assert splitmix((1234567 + 0x9E3779B97F4A7C15) & mask) == 6457827717110365317
    assert splitmix((1234567 + 2 * 0x9E3779B97F4A7C15) & mask) == 3203168211198807973
    mine = PointRNG(0, "pgd", index=torch.tensor([5])).bits(4)[0]
    start = splitmix((splitmix((5 + key(0, "pgd")) & mask) + key("row", 0, "pgd")) & mask)
    expected = [splitmix((start + n * 0x9E3779B97F4A7C15) & mask) for n in range(1, 5)]
    assert [int(b) & mask for b in mine] == expected


class Given(PointRNG):
    """Streams whose bits are given: none, the lowest, all but the sign, and all."""

    def __init__(self):
        super().__init__(index=torch.zeros(1, dtype=torch.int64))

    def bits(self, *shape):
        return torch.tensor([[0, 1, (1 << 63) - 1, -1]])


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 23), (torch.float64, 52)])
def test_uniform_numbers_are_the_middle_of_their_cells(dtype, digits):
    half = 2.0 ** -(digits + 1)
    assert Given().uniform(4, dtype=dtype).tolist() == [[half, half, 0.5 - half, 1 - half]]


def test_signs_and_integers_of_given_bits():
    assert Given().rademacher(4).tolist() == [[1, 1, 1, -1]]
    assert Given().integers(1000, 4).tolist() == [[0, 0, (2**62 - 1) % 1000, (2**63 - 1) % 1000]]


@pytest.mark.parametrize("seed", [frozenset("ab"), {"a"}, {"a": 1}, object(), torch.ones(2), (0, [frozenset("ab")])])
def test_names_that_differ_between_processes_are_refused(seed):
    for draw in (lambda: key(seed), lambda: generator(0, seed), lambda: PointRNG(seed, index=torch.arange(2))):
        with pytest.raises(InputError, match="seed: expected numbers, strings or tuples of them, got"):
            draw()


def test_keys_are_stable_across_versions():
    """A changed key would silently change every result."""
    assert key(0, "pgd") == 2564971327060249616
