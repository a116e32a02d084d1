"""Counter-based random numbers: a draw is a function of (seed, counter), whatever else runs in the batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_lite.types import Int32Array, Int64Array

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014), in place: every input bit reaches every output bit."""
    x ^= x >> np.uint64(30)
    x *= _FIRST
    x ^= x >> np.uint64(27)
    x *= _SECOND
    x ^= x >> np.uint64(31)
    return x


def exponentials(seed: Int64Array, counter: Int32Array, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """float64[S, K]: exponentially distributed numbers, a function of (seed, counter, token id) each.

    Args:
        seed: int64[S].
        counter: int32[S], index of the draw under that seed.
        token_ids: int64[S, K] or int64[1, K].
    """
    start = mix(mix(seed.astype(np.uint64) + _GOLDEN) + (counter.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    bits = mix(start[:, None] + (token_ids.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    bits >>= np.uint64(11)
    shares = bits.astype(np.float64)
    shares += 0.5  # never 0, whose logarithm is infinite
    shares *= 2.0**-53
    np.log(shares, out=shares)
    return np.negative(shares, out=shares)


class DrawSource:
    """Random numbers for rows without a seed, from the server's generator.

    Args:
        server_seed: makes draws repeatable as long as the batches are; None for a fresh one.
    """

    def __init__(self, server_seed: int | None) -> None:
        self._generator = np.random.default_rng(None if server_seed is None else abs(server_seed))

    def draw(self, count: int) -> npt.NDArray[np.float64]:
        """float64[count] in [0, 1)."""
        return self._generator.random(count)
