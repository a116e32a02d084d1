"""Repetition, presence and frequency penalties over the output tokens of a request."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sglang_lite.scheduler.plan import SamplingColumns
from sglang_lite.types import Int32Array

_NO_SLOT = -1


class OutputCounts:
    """How often each token was generated, for the rows that have a penalty. Other rows cost nothing.

    Args:
        vocab_size: columns of the count table.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._slot_of_row: Int32Array = np.empty(0, dtype=np.int32)
        self._num_slots = 0

    def restart(self, row: int, output_tokens: Int32Array) -> None:
        """Count the output of a request that takes over a row, or comes back after a preemption."""
        self._reserve(row + 1)
        slot = int(self._slot_of_row[row])
        if slot == _NO_SLOT:
            self._slot_of_row[row] = slot = self._num_slots
            self._num_slots += 1
        if slot >= self._counts.shape[0]:
            grown = self._counts.new_zeros(max(4, 2 * self._counts.shape[0]), self._vocab_size)
            grown[: self._counts.shape[0]] = self._counts
            self._counts = grown
        tokens = np.bincount(output_tokens, minlength=self._vocab_size).astype(np.int32)
        self._counts[slot].copy_(torch.from_numpy(tokens))

    def slots(self, rows: Int32Array) -> Tensor:
        """int64[P] places of rows in the table; a row never announced counts from zero."""
        self._reserve(int(rows.max(initial=-1)) + 1)
        for row in rows[self._slot_of_row[rows] == _NO_SLOT].tolist():
            self.restart(row, np.empty(0, dtype=np.int32))
        return torch.from_numpy(self._slot_of_row[rows].astype(np.int64))

    def _reserve(self, num_rows: int) -> None:
        """Make the column of slots long enough for that many rows."""
        missing = num_rows - len(self._slot_of_row)
        if missing > 0:
            more = np.full(max(missing, len(self._slot_of_row)), _NO_SLOT, dtype=np.int32)
            self._slot_of_row = np.concatenate((self._slot_of_row, more))

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """Count one token int64[P] for each place; -1 counts nothing."""
        self._counts.index_put_((slots, tokens.clamp(min=0)), (tokens >= 0).int(), accumulate=True)

    def of(self, slots: Tensor) -> Tensor:
        """int32[P, V]."""
        return self._counts.index_select(0, slots)


def apply_penalties(logits: Tensor, counts: Tensor, columns: SamplingColumns) -> Tensor:
    """Logits of the penalised rows, float32[P, V], with their penalties.

    A token seen before has its logit divided by the repetition penalty when positive and multiplied when negative,
    lowered once by the presence penalty, and by the frequency penalty for each time it was seen.
    """

    def column(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Tensor:
        return torch.from_numpy(values[columns.penalized]).unsqueeze(1)

    seen = counts > 0
    repetition = column(columns.repetition_penalty)
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    penalised = torch.where(seen, scaled - column(columns.presence_penalty), logits)
    return penalised.sub_(counts * column(columns.frequency_penalty))
