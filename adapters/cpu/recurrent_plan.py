"""Where the tokens of a step lie for the recurrent operations on the host processor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.recurrent import RecurrentBatch, RecurrentPlan

_MOST_SPAN = 1.5
"""Rows of a span for each row of the step, up to which the span is worked on as a whole."""


@dataclass(frozen=True, slots=True)
class ConvolutionIndex:
    """Places in the sequence "tail of chunk 0, tokens of chunk 0, tail of chunk 1, ..." of P tokens and F chunks.

    Attributes:
        oldest: int64[P], the oldest input of each token; the others follow it.
        tails_in: int64[F * (K - 1)], where the tails lie; tails_out: int64[F * (K - 1)], what each chunk leaves behind.
    """

    oldest: Tensor
    tails_in: Tensor
    tails_out: Tensor


@dataclass(frozen=True, slots=True)
class BlockIndex:
    """How P prefill tokens lie in blocks of ``size`` tokens, a sequence's blocks being consecutive.

    Attributes:
        places: int64[P], block * size + offset of each token.
        num_blocks: of all sequences together.
        order: the first, second, ... block of every sequence that has one; int64[m] each, of the m longest sequences.
    """

    size: int
    places: Tensor
    num_blocks: int
    order: list[Tensor]

    def groups(self, max_blocks: int) -> Iterator[list[Tensor]]:
        """Consecutive parts of ``order`` with at most ``max_blocks`` blocks, or with a single entry."""
        group: list[Tensor] = []
        count = 0
        for index in self.order:
            if group and count + len(index) > max_blocks:
                yield group
                group, count = [], 0
            group.append(index)
            count += len(index)
        if group:
            yield group


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Consecutive rows of the state pool.

    Attributes:
        first, count: the rows.
        places: int64[n], where in the span each row of the step is; None when they are the whole span in its order.
    """

    first: int
    count: int
    places: Tensor | None


class CpuRecurrentPlan(RecurrentPlan):
    """Indices of a step; what depends on a layer's shape is computed when the first layer of that shape asks.

    Attributes:
        num_decode: rows of one token that continue; num_tokens: all tokens of the step.
        decode_rows: int64[num_decode], their places in the state pool.
        decode_span: the part of the pool that they fill or nearly fill, where states are updated without a copy; None
            when they are scattered.
        prefill_rows: int64[F], the rows of the chunks in the step's order; fresh: bool[F].
        longest_first: int64[F], the chunks by falling length, in which the delta rule takes them.
    """

    def __init__(self, batch: RecurrentBatch) -> None:
        if not len(batch.query_lens) == len(batch.rows) == len(batch.fresh) >= batch.num_decode:
            raise OperationInputError(
                f"{len(batch.query_lens)} query lengths, {len(batch.rows)} rows and {len(batch.fresh)} fresh marks for "
                f"one step with {batch.num_decode} decode rows; they must be as many"
            )
        if len(set(batch.rows)) != len(batch.rows):
            raise OperationInputError(f"a row of the state pool occurs twice in one step: {batch.rows}")
        if any(batch.fresh[: batch.num_decode]):
            raise OperationInputError("a decode row continues a sequence; a new one starts with a prefill chunk")
        self.num_decode = batch.num_decode
        self.num_tokens = sum(batch.query_lens)
        decode_rows = batch.rows[: batch.num_decode]
        self.decode_rows = torch.tensor(decode_rows, dtype=torch.int64)
        self.decode_span = _span(decode_rows)
        self._lengths = np.array(batch.query_lens[batch.num_decode :], dtype=np.int64)
        self.prefill_rows = torch.tensor(batch.rows[batch.num_decode :], dtype=torch.int64)
        self.fresh = torch.tensor(batch.fresh[batch.num_decode :], dtype=torch.bool)
        self._by_length = np.argsort(-self._lengths, kind="stable")
        self.longest_first = torch.from_numpy(self._by_length)
        self._convolutions: dict[int, ConvolutionIndex] = {}
        self._blocks: dict[int, BlockIndex] = {}

    @property
    def has_prefill(self) -> bool:
        """Whether the step has chunks."""
        return len(self._lengths) > 0

    def convolution(self, num_taps: int) -> ConvolutionIndex:
        """Places of tokens and tails for a convolution of ``num_taps`` taps."""
        if num_taps not in self._convolutions:
            tail = num_taps - 1
            chunk = np.repeat(np.arange(len(self._lengths)), self._lengths)
            begins = np.cumsum(self._lengths) - self._lengths + np.arange(len(self._lengths)) * tail
            inside = np.arange(tail)
            self._convolutions[num_taps] = ConvolutionIndex(
                oldest=torch.from_numpy(np.arange(len(chunk)) + chunk * tail),
                tails_in=torch.from_numpy((begins[:, None] + inside).reshape(-1)),
                tails_out=torch.from_numpy(((begins + self._lengths)[:, None] + inside).reshape(-1)),
            )
        return self._convolutions[num_taps]

    def blocks(self, max_size: int) -> BlockIndex:
        """Blocks of ``max_size`` tokens, or of the longest chunk when that is shorter."""
        size = min(max_size, int(self._lengths.max()))
        if size not in self._blocks:
            counts = -(-self._lengths // size)
            first = np.cumsum(counts) - counts
            begins = np.cumsum(self._lengths) - self._lengths
            places = np.arange(self._lengths.sum()) + np.repeat(first * size - begins, self._lengths)
            counts, first = counts[self._by_length], first[self._by_length]
            order = [torch.from_numpy(first[counts > step] + step) for step in range(int(counts[0]))]
            self._blocks[size] = BlockIndex(size, torch.from_numpy(places), int(counts.sum()), order)
        return self._blocks[size]


def _span(rows: list[int]) -> RowSpan | None:
    """The rows from the first to the last of ``rows``, if few others lie between: copying the states out and back
    costs more than computing some in vain."""
    if not rows:
        return None
    first, count = min(rows), max(rows) - min(rows) + 1
    if rows == list(range(first, first + count)):
        return RowSpan(first, count, None)
    if count > len(rows) * _MOST_SPAN:
        return None
    return RowSpan(first, count, torch.tensor(rows) - first)
