"""The state of recurrent layers: one fixed-size place per row of the request table."""

from __future__ import annotations

import numpy as np
import torch

from sglang_lite.adapters.base import Operations
from sglang_lite.adapters.recurrent import RecurrentBatch
from sglang_lite.layers.recurrent_step import RecurrentStep
from sglang_lite.models.model_description import RecurrentDescription
from sglang_lite.scheduler.plan import StepPlan
from sglang_lite.types import StartupError


class RecurrentStatePool:
    """Convolution tails and delta-rule states of every row and recurrent layer.

    A row's state belongs to the sequence that the row of the request table has. It starts anew with the prefill chunk
    that begins at position 0, so that nothing has to be cleared when a request ends, is aborted or preempted; and it
    only ever moves on, so that a sequence has to be computed from its first token: pages of a shared prefix carry no
    state. Plans run in the order of submission, which makes planning ahead harmless.

    Args:
        description: shapes of the states.
        num_rows: of the request table.
        dtype: of the activations, and so of the tails.
        ops: of the device that the states live on.

    Raises:
        StartupError: the memory cannot be had.
    """

    def __init__(self, description: RecurrentDescription, num_rows: int, dtype: torch.dtype, ops: Operations) -> None:
        self._ops = ops
        self._length = np.zeros(num_rows, dtype=np.int64)
        tail = (description.conv_channels, description.conv_kernel - 1)
        state = (description.num_heads, description.key_dim, description.value_dim)
        try:
            # Host memory is only reserved; rows that never run cost nothing.
            self.tails = torch.empty(description.num_layers, num_rows, *tail, dtype=dtype, device=ops.device)
            self.states = torch.empty(description.num_layers, num_rows, *state, dtype=torch.float32, device=ops.device)
        except RuntimeError as error:
            size = num_rows * description.row_bytes(dtype.itemsize) / 2**30
            raise StartupError(
                f"the recurrent state of {num_rows} requests takes {size:.1f} GiB, which cannot be allocated; choose a "
                f"smaller --max-running-requests"
            ) from error

    @property
    def num_bytes(self) -> int:
        """Size of the pool."""
        return self.tails.nbytes + self.states.nbytes

    def step(self, plan: StepPlan) -> RecurrentStep:
        """The states for one step, which runs next.

        Raises:
            RuntimeError: a row continues at another position than where its state stands, for instance behind a
                prefix that was not computed in this row.
        """
        starts = plan.kv_lens.astype(np.int64) - plan.query_lens
        fresh = starts == 0
        wrong = np.flatnonzero(~fresh & (self._length[plan.rows] != starts))
        if len(wrong):
            row = int(plan.rows[wrong[0]])
            raise RuntimeError(
                f"row {row} continues at position {int(starts[wrong[0]])}, but its recurrent state stands at "
                f"{int(self._length[row])}; a sequence must be computed from its first token in one row"
            )
        self._length[plan.rows] = plan.kv_lens
        batch = RecurrentBatch(plan.num_decode, plan.query_lens.tolist(), plan.rows.tolist(), fresh.tolist())
        return RecurrentStep(self._ops.recurrent.plan(batch), self.tails, self.states)
