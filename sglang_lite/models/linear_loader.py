"""Linear layers of a checkpoint, split over the ranks of a parallel group and packed for the device.

A family says which projections share an input and how they are split; what the checkpoint stores for them, plain
matrices or quantized ones, is settled here and in the reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sglang_lite.adapters.base import Operations, PackedLinear
from sglang_lite.models.weight_reader import Shard, WeightReader


class Ranks(Protocol):
    """This rank's place among those that share the model; a ``ParallelGroup`` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


class LinearLoader:
    """Makes the linear layers of one rank.

    Args:
        reader: of the checkpoint.
        ops: operations of the device; its packing takes the matrices over.
        parallel: the ranks that share the model; None for one that has it all.
    """

    def __init__(self, reader: WeightReader, ops: Operations, parallel: Ranks | None = None) -> None:
        self._reader = reader
        self._ops = ops
        self._rank, self._size = (parallel.rank, parallel.size) if parallel is not None else (0, 1)

    def column(self, names: Sequence[str], *, bias_names: Sequence[str] | None = None) -> PackedLinear:
        """Projections of one input, split by output: each rank computes its part of every one of them.

        Args:
            names: weight tensors [out, in]; merged by rows, in this order.
            bias_names: one bias tensor [out] for each of them, or None.

        Raises:
            StartupError: a tensor cannot be read, or an output does not divide over the ranks.
        """
        shard = self._shard(dim=0)
        return self._load(names, bias_names, shard, shard)

    def row(self, name: str, *, bias_name: str | None = None) -> PackedLinear:
        """A projection split by input: the caller adds up the results of all ranks.

        The bias is added by the first rank alone, so that the sum holds it once.

        Raises:
            StartupError: a tensor cannot be read, or the input does not divide over the ranks.
        """
        bias_names = [bias_name] if bias_name is not None and self._rank == 0 else None
        return self._load([name], bias_names, self._shard(dim=1), None)

    def replicated(self, names: Sequence[str], *, bias_names: Sequence[str] | None = None) -> PackedLinear:
        """Projections of one input, merged by rows and whole on every rank."""
        return self._load(names, bias_names, None, None)

    def vocabulary(self, name: str) -> PackedLinear:
        """The output projection [vocab, hidden], split by token: ranks gather the logits."""
        return self._load([name], None, self._shard(dim=0), None)

    def _shard(self, *, dim: int) -> Shard | None:
        return Shard(dim, self._rank, self._size) if self._size > 1 else None

    def _load(
        self,
        names: Sequence[str],
        bias_names: Sequence[str] | None,
        weight_shard: Shard | None,
        bias_shard: Shard | None,
    ) -> PackedLinear:
        weight = self._reader.read_merged(names, weight_shard)
        bias = self._reader.read_merged(bias_names, bias_shard) if bias_names is not None else None
        return self._ops.pack_linear(weight, bias)
