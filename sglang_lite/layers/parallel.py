"""The group of ranks that hold one model between them, as the layers see it.

A linear layer is split by its outputs ("column") or by its inputs ("row"). Two such layers in a row need one
communication: the first one's outputs are the second one's inputs, and what the ranks compute is added up behind it.
The vocabulary is split by rows of its matrix: looked-up rows are added up, logits are gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from sglang_lite.adapters.base import Operations, PackedLinear


class ParallelGroup(Protocol):
    """Ranks that run the same steps at the same time. Every rank calls the same operations in the same order."""

    @property
    def rank(self) -> int:
        """Of this process, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def expert_parts(self) -> int:
        """Into how many parts the experts of a layer are split (``--ep-size``); divides the size.

        Each part is held by ``size / expert_parts`` neighbouring ranks, which split the width of its experts.
        """

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, written into ``tensor``, which must be contiguous; returns it."""

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensors of all ranks, which have one shape, joined along ``dim`` in the order of the ranks."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """What rank 0 has in ``tensor``, written into everyone's (contiguous, one shape and type); returns it."""


class SingleRank:
    """A group of one: nothing is communicated."""

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    @property
    def expert_parts(self) -> int:
        """Always 1."""
        return 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensor itself."""
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor


SINGLE = SingleRank()


def part_of(extent: int, group: ParallelGroup, parts: int | None = None) -> slice:
    """The rows (or columns) of this rank when ``extent`` of them are cut into equal parts.

    Args:
        parts: how many different parts there are; None for one a rank. Fewer parts than ranks (key/value heads, when
            there are fewer of them) means that neighbouring ranks hold the same part; it must divide the group's size.

    Raises:
        ValueError: the extent does not divide into the parts, or the parts do not divide the ranks.
    """
    parts = group.size if parts is None else parts
    if extent % parts or group.size % parts:
        raise ValueError(f"{extent} rows cannot be cut into {parts} equal parts for {group.size} ranks")
    length = extent // parts
    start = group.rank * parts // group.size * length
    return slice(start, start + length)


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Which routed experts of a layer this rank holds, and which part of their width.

    Attributes:
        first, count: the experts.
        width_index, width_parts: the part of each expert's intermediate size.
    """

    first: int
    count: int
    width_index: int
    width_parts: int


def expert_part(num_experts: int, group: ParallelGroup) -> ExpertPart:
    """This rank's part of the experts: ``expert_parts`` parts, each split by width over the ranks that share it.

    Raises:
        ValueError: the experts do not divide into the parts.
    """
    parts = group.expert_parts
    if num_experts % parts or group.size % parts:
        raise ValueError(f"{num_experts} experts cannot be split into {parts} parts over {group.size} ranks")
    sharing = group.size // parts
    count = num_experts // parts
    return ExpertPart(group.rank // sharing * count, count, group.rank % sharing, sharing)


class SummedLinear:
    """A linear layer split by its inputs: every rank multiplies its part, and the products are added up.

    Args:
        linear: this rank's part; a bias belongs to rank 0's alone, or it would be added once a rank.
    """

    __slots__ = ("_group", "_linear", "in_features", "out_features")

    def __init__(self, linear: PackedLinear, group: ParallelGroup) -> None:
        self._linear = linear
        self._group = group
        self.in_features = linear.in_features
        self.out_features = linear.out_features

    def __call__(self, x: Tensor) -> Tensor:
        """[..., this rank's in_features] -> [..., out_features], whole on every rank."""
        return self._group.all_reduce(self._linear(x))


def row_parallel(linear: PackedLinear, group: ParallelGroup) -> PackedLinear:
    """``linear`` with the sum behind it where there is more than one rank."""
    return linear if group.size == 1 else SummedLinear(linear, group)


class VocabularyRows:
    """Which rows of the vocabulary's matrix this rank holds: equal parts, the last one padded with zeros.

    Attributes:
        start, stop: rows of the checkpoint's matrix; ``stop - start`` may be less than ``length``, even 0.
        length: rows of the part in memory.
    """

    __slots__ = ("length", "start", "stop")

    def __init__(self, vocab_size: int, group: ParallelGroup) -> None:
        self.length = -(-vocab_size // group.size)
        self.start = min(vocab_size, group.rank * self.length)
        self.stop = min(vocab_size, self.start + self.length)

    def pad(self, weight: Tensor) -> Tensor:
        """[stop - start, hidden] -> [length, hidden]."""
        missing = self.length - weight.shape[0]
        return functional.pad(weight, (0, 0, 0, missing)) if missing else weight


class ParallelEmbedding:
    """Token embeddings whose matrix is split over the ranks.

    Args:
        weight: [length, hidden], this rank's rows (``VocabularyRows``); the whole matrix in a group of one.
    """

    __slots__ = ("_group", "_length", "_ops", "_start", "_weight")

    def __init__(self, ops: Operations, weight: Tensor, group: ParallelGroup) -> None:
        self._ops = ops
        self._weight = weight
        self._group = group
        self._length = weight.shape[0]
        self._start = group.rank * self._length

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64[T] -> [T, hidden], whole on every rank."""
        if self._group.size == 1:
            return self._ops.embedding(token_ids, self._weight)
        local = token_ids - self._start
        foreign = (local < 0) | (local >= self._length)
        rows = self._ops.embedding(local.masked_fill(foreign, 0), self._weight)
        return self._group.all_reduce(rows.masked_fill(foreign.unsqueeze(1), 0))


class GatheredLogits:
    """The output projection split by the vocabulary: each rank's logits are joined and the padding cut off."""

    __slots__ = ("_group", "_linear", "in_features", "out_features")

    def __init__(self, linear: PackedLinear, group: ParallelGroup, vocab_size: int) -> None:
        self._linear = linear
        self._group = group
        self.in_features = linear.in_features
        self.out_features = vocab_size

    def __call__(self, x: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocab], whole on every rank."""
        logits = self._group.all_gather(self._linear(x), -1)
        return logits[..., : self.out_features].contiguous()


def vocabulary_parallel(linear: PackedLinear, group: ParallelGroup, vocab_size: int) -> PackedLinear:
    """``linear`` over this rank's rows of the vocabulary, giving all logits."""
    return linear if group.size == 1 else GatheredLogits(linear, group, vocab_size)
