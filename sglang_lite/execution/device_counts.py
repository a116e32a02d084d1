"""How often each token was generated, for the rows that have a penalty, on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sglang_lite.execution.device import Device
from sglang_lite.types import Int32Array


class DeviceCounts:
    """Places are found on the device: a step with penalties waits for nothing.

    Args:
        vocab_size: columns of the count table.
        num_rows: rows of the request table; a row gets a place in the table when it is first announced.
    """

    def __init__(self, device: Device, vocab_size: int, num_rows: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._counts = torch.zeros(8, vocab_size, dtype=torch.int32, device=device.torch_device)
        self._place_of_row = torch.zeros(num_rows, dtype=torch.int64, device=device.torch_device)
        self._has_place = np.zeros(num_rows, dtype=np.bool_)
        self._places: dict[int, int] = {}

    def restart(self, row: int, output_tokens: Int32Array) -> None:
        """Count the output of a request that takes over a row, or comes back after a preemption."""
        place = self._places.get(row)
        if place is None:
            place = self._places[row] = len(self._places)
            self._place_of_row[row] = place
            self._has_place[row] = True
        if place >= self._counts.shape[0]:
            grown = self._counts.new_zeros(2 * self._counts.shape[0], self._vocab_size)
            grown[: self._counts.shape[0]] = self._counts
            self._counts = grown
        self._counts[place].zero_()
        if len(output_tokens):
            ids, numbers = np.unique(output_tokens, return_counts=True)
            self._counts[place].index_copy_(
                0, self._device.upload(ids.astype(np.int64)), self._device.upload(numbers.astype(np.int32))
            )

    def announce(self, rows: Int32Array) -> None:
        """A row never seen counts from zero."""
        for row in rows[~self._has_place[rows]].tolist():
            self.restart(row, np.empty(0, dtype=np.int32))

    def of(self, rows: Tensor) -> Tensor:
        """int32[P, V] of int64[P] rows."""
        return self._counts.index_select(0, self._place_of_row.index_select(0, rows))

    def add(self, rows: Tensor, tokens: Tensor) -> None:
        """Count one token int64[P] for each row int64[P]; -1 counts nothing."""
        places = self._place_of_row.index_select(0, rows)
        self._counts.index_put_((places, tokens.clamp(min=0)), (tokens >= 0).int(), accumulate=True)
