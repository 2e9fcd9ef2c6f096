"""Random numbers that depend on their purpose, not on the order or the batch in which they are drawn.

Every point of a batch has its own stream, keyed by names such as ``(seed, "pgd", point index)``.  A point therefore
gets the same augmentation and the same attack for any batch size, order and number of processes, and after resuming.
Nothing here touches PyTorch's global generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from atoll.errors import InputError

# SplitMix64 (Steele, Lea & Flood, 2014), as signed 64-bit integers: PyTorch's int64 wraps around like uint64.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def key(*names: object) -> int:
    """Return a 63-bit key for a sequence of names, the same on every machine and in every process.

    Names are numbers, strings, bytes, None, and tuples or lists of names.  Other objects, such as sets, are not allowed
    because their representation may differ between processes.

    >>> key(0, "pgd") == key(0, "pgd"), key(0, "pgd") == key(1, "pgd")
    (True, False)
    >>> key({"a", "b"})
    Traceback (most recent call last):
    atoll.errors.InputError: seed: expected numbers, strings or tuples of them, got set
    """
    _check_names(names)
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _check_names(names: tuple[object, ...] | list[object]) -> None:
    for name in names:
        if isinstance(name, tuple | list):
            _check_names(name)
        elif type(name) not in (int, float, bool, str, bytes, type(None)):
            raise InputError(f"seed: expected numbers, strings or tuples of them, got {type(name).__name__}")


def content_hash(point: Tensor) -> int:
    """Return a key for the values of an input.

    >>> one, same, other = (content_hash(x) for x in (torch.ones(3), torch.ones(3).double(), torch.zeros(3)))
    >>> one == same, one == other
    (True, False)
    """
    return key(point.double().cpu().numpy().tobytes())


def generator(*names: object, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a PyTorch generator seeded by names, for draws that are not per point (weights, order)."""
    return torch.Generator(device).manual_seed(key(*names))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift, because PyTorch's is arithmetic."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's output function, in place because a batch of images takes millions of draws."""
    x.bitwise_xor_(_shift(x, 30)).mul_(_MIX_1)
    x.bitwise_xor_(_shift(x, 27)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift(x, 31))


class PointRNG:
    """One independent random stream per row of a batch.

    The generator is counter-based: draw ``n`` of a row is ``mix(key + n * golden)``, so a row's numbers depend on its
    key and on how many it has drawn before, never on other rows.  ``streams[rows]`` selects rows with their counters;
    attacks use it to drop finished points.

    >>> index = torch.tensor([5, 9])
    >>> both = PointRNG(0, "pgd", index=index).uniform(3)
    >>> alone = PointRNG(0, "pgd", index=index[1:]).uniform(3)
    >>> torch.equal(both[1:], alone)
    True
    """

    def __init__(self, *names: object, index: Tensor) -> None:
        self._keys = _mix(_mix(index.to(torch.int64) + key(*names)) + key("row", *names))
        self._drawn = torch.zeros_like(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, rows: Tensor | slice) -> PointRNG:
        return PointRNG.from_tensors({name: value[rows] for name, value in self.tensors().items()})

    def put(self, rows: Tensor, part: PointRNG) -> None:
        """Copy back the counters of ``part = streams[rows]`` after drawing from it."""
        self._drawn = self._drawn.index_put((rows,), part._drawn)

    def put_where(self, mask: Tensor, part: PointRNG) -> None:
        """Copy back the counters of the rows in ``mask`` from ``part``, which has drawn for all rows."""
        self._drawn = torch.where(mask, part._drawn, self._drawn)

    def tensors(self) -> dict[str, Tensor]:
        """Return keys and counters by name, to save or concatenate them."""
        return {"keys": self._keys, "drawn": self._drawn}

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor]) -> PointRNG:
        """Restore streams from ``tensors``; they continue where they were."""
        streams = object.__new__(PointRNG)
        streams._keys, streams._drawn = tensors["keys"], tensors["drawn"]
        return streams

    def bits(self, *shape: int) -> Tensor:
        """Draw uniform 64-bit integers of shape ``(rows, *shape)``, the basis of all other draws."""
        count = torch.Size(shape).numel()
        steps = torch.arange(1, count + 1, device=self._keys.device) + self._drawn[:, None]
        self._drawn = self._drawn + count
        return _mix(steps.mul_(_GOLDEN).add_(self._keys[:, None])).view(len(self), *shape)

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw uniform numbers strictly inside (0, 1)."""
        bits = 52 if dtype == torch.float64 else 23  # one less than the mantissa, so that 1 is never drawn
        return _shift(self.bits(*shape), 64 - bits).to(dtype).add_(0.5).mul_(2.0**-bits)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw standard normal numbers by inverting the normal distribution function."""
        # In float64, because 23 bits would cut off the tails at 5.3 standard deviations.
        normal: Tensor = torch.special.ndtri(self.uniform(*shape, dtype=torch.float64))
        return normal.to(dtype)

    def rademacher(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Draw -1 or +1 with equal probability."""
        return (self.bits(*shape) >= 0).to(dtype) * 2 - 1

    def integers(self, high: int, *shape: int) -> Tensor:
        """Draw integers in ``[0, high)``; the modulo bias is below ``high / 2**63``."""
        return _shift(self.bits(*shape), 1) % high
