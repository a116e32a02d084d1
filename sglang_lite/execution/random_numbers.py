"""Counter-based random numbers: a draw is a function of (seed, counter), whatever else runs in the batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_lite.types import NO_SEED, Int32Array, Int64Array

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): uint64 -> uint64, every input bit reaches every output."""
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def uniform(seed: Int64Array, counter: Int32Array) -> npt.NDArray[np.float64]:
    """float64[S] in [0, 1), 53 random bits each.

    Args:
        seed: int64[S].
        counter: int32[S], index of the draw under that seed.
    """
    start = mix(seed.astype(np.uint64) + _GOLDEN)
    bits = mix(start + (counter.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


class DrawSource:
    """Random numbers for the rows of a step: seeded rows by their seed, the others from the server's generator.

    Args:
        server_seed: makes unseeded draws repeatable as long as the batches are; None for a fresh one.
    """

    def __init__(self, server_seed: int | None) -> None:
        self._generator = np.random.default_rng(None if server_seed is None else abs(server_seed))

    def draw(self, seed: Int64Array, counter: Int32Array) -> npt.NDArray[np.float64]:
        """float64[S] in [0, 1); ``seed`` is ``NO_SEED`` where the request gave none."""
        return np.where(seed == NO_SEED, self._generator.random(len(seed)), uniform(seed, counter))
