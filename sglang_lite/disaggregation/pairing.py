"""Which ranks of a prefill and a decode server of different tensor-parallel sizes exchange what.

Ranks hold consecutive key/value heads; where there are fewer heads than ranks, neighbouring ranks hold the same one.
One size divides the other, so that each rank of the smaller side deals with as many neighbouring ranks of the larger
one. Of several prefill ranks that hold the same, one sends and the others only count.
"""

from __future__ import annotations

from dataclasses import dataclass


class PairingError(ValueError):
    """Sizes that no ranks can be paired for."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Key/value heads [first, first + count) of a model."""

    first: int
    count: int

    def common(self, other: Heads) -> Heads:
        """Those of both; count 0 for none."""
        first = max(self.first, other.first)
        return Heads(first, max(0, min(self.first + self.count, other.first + other.count) - first))


@dataclass(frozen=True, slots=True)
class PrefillRank:
    """One that a decode rank deals with.

    Attributes:
        sends: it has pages for the decode rank; else it only has to know that the decode rank is there.
    """

    rank: int
    sends: bool


def heads_of(total: int, size: int, rank: int) -> Heads:
    """What one of ``size`` ranks holds of ``total`` heads.

    Raises:
        PairingError: they cannot be split so.
    """
    if total % size and size % total:
        raise PairingError(f"{total} key/value heads cannot be split over {size} ranks")
    count = max(1, total // size)
    return Heads(rank * total // size, count)


def num_decode_ranks(prefill_size: int, decode_size: int) -> int:
    """Decode ranks that each prefill rank hears from.

    Raises:
        PairingError: neither size divides the other, or one is no size.
    """
    if min(prefill_size, decode_size) < 1:
        raise PairingError(f"a tensor-parallel size of {min(prefill_size, decode_size)} is not possible")
    if decode_size % prefill_size and prefill_size % decode_size:
        raise PairingError(
            f"tensor-parallel size mismatch: prefill server has {prefill_size}, decode server {decode_size}; "
            f"one must divide the other"
        )
    return max(1, decode_size // prefill_size)


def prefill_ranks(prefill_size: int, decode_size: int, decode_rank: int, total_heads: int) -> list[PrefillRank]:
    """The prefill ranks that a decode rank deals with.

    Args:
        total_heads: of the model; 0 where every rank holds everything.

    Raises:
        PairingError: the sizes do not fit to one another, or to the heads.
    """
    each = num_decode_ranks(prefill_size, decode_size)
    count = max(1, prefill_size // decode_size)
    first = decode_rank // each if count == 1 else decode_rank * count
    ranks, seen = [], set[Heads]()
    for rank in range(first, first + count):
        heads = heads_of(total_heads, prefill_size, rank) if total_heads else Heads(0, 0)
        ranks.append(PrefillRank(rank, heads not in seen))
        seen.add(heads)
    return ranks
