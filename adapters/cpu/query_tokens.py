"""The query tokens of rows that decode one token or verify a few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class QueryTokens:
    """T query tokens of n rows, one row after the other.

    Attributes:
        starts, stops: int64[n], tokens of each sequence before and after the step.
        row: int64[T], place of each token's row.
        offset: int64[T], its place among the row's queries.
        lengths: int64[T], tokens of the sequence that it sees, itself included.
    """

    starts: Array
    stops: Array
    row: Array
    offset: Array
    lengths: Array

    @classmethod
    def of(cls, query_lens: npt.NDArray[np.integer], kv_lens: npt.NDArray[np.integer]) -> Self:
        """From the queries and the length after the step of each row: int[n] each."""
        counts, stops = query_lens.astype(np.int64), kv_lens.astype(np.int64)
        starts = stops - counts
        if len(counts) == int(counts.sum()):
            places = np.arange(len(counts))
            return cls(starts, stops, places, np.zeros_like(places), stops)
        row = np.repeat(np.arange(len(counts)), counts)
        offset = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        return cls(starts, stops, row, offset, starts[row] + offset + 1)
