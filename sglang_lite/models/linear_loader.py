"""Linear layers of a checkpoint, split over the ranks of a parallel group and packed for the device.

A family says which projections share an input and how they are split; what the checkpoint stores for them, plain
matrices or quantized ones, is settled here and in the reader.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sglang_lite.adapters.base import Operations, PackedLinear
from sglang_lite.adapters.quantized import QuantizedWeight
from sglang_lite.layers.parallel import ParallelGroup, row_parallel, vocabulary_parallel
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.quantized_parts import join_rows, map_tensors, shard_of
from sglang_lite.models.weight_reader import Shard, WeightReader


class LinearLoader:
    """Makes the linear layers of one rank.

    Args:
        reader: of the checkpoint.
        ops: operations of the device; its packing takes the matrices over.
        parallel: the ranks that share the model; None for those of the reader.
    """

    def __init__(self, reader: WeightReader, ops: Operations, parallel: ParallelGroup | None = None) -> None:
        self._reader = reader
        self._ops = ops
        self._parallel = reader.parallel if parallel is None else parallel
        self._rank, self._size = self._parallel.rank, self._parallel.size

    def column(
        self,
        names: Sequence[str],
        *,
        bias_names: Sequence[str] | None = None,
        parts: Sequence[int] | None = None,
    ) -> PackedLinear:
        """Projections of one input, split by output: each rank computes its part of every one of them.

        Args:
            names: weight tensors [out, in]; merged by rows, in this order.
            bias_names: one bias tensor [out] for each of them, or None.
            parts: how many different parts each of them has at most, where that may be fewer than there are ranks:
                neighbouring ranks then hold the same part (key and value projections, with their number of heads).

        Raises:
            StartupError: a tensor cannot be read, or an output does not divide over the ranks.
        """
        shards = [self._part(count) for count in parts] if parts is not None else [self._shard(dim=0)] * len(names)
        return self._load(names, bias_names, shards, shards)

    def head_parts(self, description: ModelDescription) -> tuple[int, int, int]:
        """``parts`` of merged query, key and value projections, from this rank's share of a description."""
        heads = description.kv.total_heads or description.kv.num_kv_heads
        return self._size, heads, heads

    def row(self, name: str, *, bias_name: str | None = None, summed: bool = True) -> PackedLinear:
        """A projection split by input; its result is already the sum over all ranks.

        Without ``summed`` it is this rank's part of the sum, for a caller that adds up several such parts at once.

        The bias is added by the first rank alone, so that the sum holds it once.

        Raises:
            StartupError: a tensor cannot be read, or the input does not divide over the ranks.
        """
        bias_names = [bias_name] if bias_name is not None and self._rank == 0 else None
        part = self._load([name], bias_names, self._shard(dim=1), None)
        return row_parallel(part, self._parallel) if summed else part

    def replicated(self, names: Sequence[str], *, bias_names: Sequence[str] | None = None) -> PackedLinear:
        """Projections of one input, merged by rows and whole on every rank."""
        return self._load(names, bias_names, None, None)

    def vocabulary(self, name: str) -> PackedLinear:
        """The output projection [vocab, hidden], split by token; its result is already gathered from all ranks."""
        return self.tied_vocabulary(self._reader.read_vocabulary(name), self._reader.rows_of(name), shared=False)

    def tied_vocabulary(self, weight: Tensor, vocab_size: int, *, shared: bool = True) -> PackedLinear:
        """As ``vocabulary``, from rows that ``WeightReader.read_vocabulary`` gave (the embedding's, when shared)."""
        return vocabulary_parallel(self._ops.pack_linear(weight, None, shared=shared), self._parallel, vocab_size)

    def _shard(self, *, dim: int) -> Shard | None:
        return Shard(dim, self._rank, self._size) if self._size > 1 else None

    def _part(self, most: int) -> Shard | None:
        count = min(most, self._size)
        return Shard(0, self._rank * count // self._size, count) if count > 1 else None

    def _load(
        self,
        names: Sequence[str],
        bias_names: Sequence[str] | None,
        weight_shard: Shard | Sequence[Shard | None] | None,
        bias_shard: Shard | Sequence[Shard | None] | None,
    ) -> PackedLinear:
        bias = self._reader.read_merged(bias_names, bias_shard) if bias_names is not None else None
        linear: PackedLinear
        quantized = self._read_quantized(names, weight_shard)
        if quantized is not None:
            linear = self._ops.quantized.pack_linear(quantized, bias)
        else:
            linear = self._ops.pack_linear(self._reader.read_merged(names, weight_shard), bias)
        adapters = self._reader.adapters
        if adapters is None:
            return linear
        return adapters.wrap(linear, names, [self._reader.rows_of(name) for name in names], self._reader.dtype)

    def _read_quantized(
        self, names: Sequence[str], shard: Shard | Sequence[Shard | None] | None
    ) -> QuantizedWeight | None:
        """The matrices as one quantized weight, or None when they have to be read as plain values: they are stored
        plain, their format cannot be cut or joined there, or the device has no product for it."""
        shards = [shard] * len(names) if shard is None or isinstance(shard, Shard) else shard
        parts: list[QuantizedWeight] = []
        for name, part_of in zip(names, shards, strict=True):
            whole = self._reader.read_quantized(name)
            if whole is None or self._ops.quantized.refusal(whole) is not None:
                return None
            part = whole if part_of is None else shard_of(whole, part_of, self._reader.shape_of(name))
            if part is None:
                return None
            parts.append(part)
        joined = join_rows(parts)
        if joined is None or self._ops.quantized.refusal(joined) is not None:
            return None
        return map_tensors(joined, lambda tensor: tensor.to(self._ops.device))
