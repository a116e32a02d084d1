"""The request table: one row per running request, one column per property."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from sglang_lite.scheduler.request import PARAMETER_DTYPE, Request, RequestState
from sglang_lite.types import NO_ADAPTER, Int32Array, Int64Array, UInt8Array

STOP_COLUMNS = 8
"""Stop tokens kept in the table; the rare request with more is checked on its own."""


class RequestTable:
    """Columns of the running requests. A row belongs to one request from its first chunk to its end or preemption.

    Attributes:
        token_ids: int32[capacity, context_length], prompt and output tokens known on the host. Memory is touched
            only as far as sequences grow.
        page_table: int32[capacity, max_pages], pages of each sequence in order; 0 beyond ``num_pages``.
        length: int32[capacity], known tokens.
        num_pages: int32[capacity], entries of ``page_table`` in use.
        shared_pages: int32[capacity], of those the first ones that the radix tree owns (locked, never written).
        serial: int64[capacity], running number of the row's assignment: differs whenever the request does.
        live: bool[capacity], the row's request runs. False at once when it ends, so that tokens of plans still in
            flight are dropped; the row itself is reused only after those plans.
        state: uint8[capacity], ``RequestState``.
        params: ``PARAMETER_DTYPE``[capacity].
        special: uint8[capacity], ``Special`` bits.
        stop_ids: int32[capacity, STOP_COLUMNS], padded with -1; set only where ``special`` says so.
        cached_tokens: int32[capacity]; retractions: uint8[capacity]: as reported with every token.
        adapter_slot: int32[capacity], slot of the request's low-rank adapter or ``NO_ADAPTER``.
        num_adapted: live rows that have one.
        tenant: int32[capacity], slot of who pays for the row's request.
        requests: the request of each row, None where the row is free.
    """

    def __init__(self, capacity: int, context_length: int, page_size: int) -> None:
        self.capacity = capacity
        self.context_length = context_length
        max_pages = -(-context_length // page_size)
        self.token_ids: Int32Array = np.zeros((capacity, context_length), dtype=np.int32)
        self.flat_token_ids: Int32Array = self.token_ids.reshape(-1)
        self.page_table: Int32Array = np.zeros((capacity, max_pages), dtype=np.int32)
        self.length: Int32Array = np.zeros(capacity, dtype=np.int32)
        self.num_pages: Int32Array = np.zeros(capacity, dtype=np.int32)
        self.shared_pages: Int32Array = np.zeros(capacity, dtype=np.int32)
        self.serial: Int64Array = np.zeros(capacity, dtype=np.int64)
        self.live: npt.NDArray[np.bool_] = np.zeros(capacity, dtype=np.bool_)
        self.state: UInt8Array = np.full(capacity, RequestState.FINISHED, dtype=np.uint8)
        self.params = np.zeros(capacity, dtype=PARAMETER_DTYPE)
        self.special: UInt8Array = np.zeros(capacity, dtype=np.uint8)
        self.stop_ids: Int32Array = np.full((capacity, STOP_COLUMNS), -1, dtype=np.int32)
        self.cached_tokens: Int32Array = np.zeros(capacity, dtype=np.int32)
        self.retractions: UInt8Array = np.zeros(capacity, dtype=np.uint8)
        self.adapter_slot: Int32Array = np.full(capacity, NO_ADAPTER, dtype=np.int32)
        self.num_adapted = 0
        self.tenant: Int32Array = np.zeros(capacity, dtype=np.int32)
        self.requests: list[Request | None] = [None] * capacity
        self.num_live = 0
        self._free = list(range(capacity - 1, -1, -1))
        self._num_assigned = 0
        self._retired: deque[tuple[int, int]] = deque()

    @property
    def num_free_rows(self) -> int:
        """Rows that can be assigned now."""
        return len(self._free)

    def assign(self, request: Request) -> int:
        """Give a waiting request a row and fill its columns; the caller has checked ``num_free_rows``."""
        row = self._free.pop()
        self._num_assigned += 1
        self.serial[row] = self._num_assigned
        count = len(request.tokens)
        self.token_ids[row, :count] = request.tokens
        self.length[row] = count
        self.num_pages[row] = 0
        self.shared_pages[row] = 0
        self.params[row] = request.params
        self.special[row] = request.special
        if request.stop_token_ids:
            stop_token_ids = request.stop_token_ids[:STOP_COLUMNS]
            self.stop_ids[row] = -1
            self.stop_ids[row, : len(stop_token_ids)] = stop_token_ids
        self.cached_tokens[row] = max(request.cached_tokens, 0)
        self.retractions[row] = min(request.retractions, 255)
        self.adapter_slot[row] = request.adapter_slot
        self.num_adapted += request.adapter_slot != NO_ADAPTER
        self.tenant[row] = request.tenant
        self.requests[row] = request
        self.live[row] = True
        self.num_live += 1
        request.row = row
        request.tokens = self.token_ids[row, :0]
        self.set_state(request, RequestState.PREFILL)
        return row

    def set_state(self, request: Request, state: RequestState) -> None:
        """Move a running request to another state."""
        request.state = state
        self.state[request.row] = state

    def vacate(self, request: Request, state: RequestState, last_step: int | None) -> None:
        """Take the row from a request that ends or is preempted; its pages are already gone.

        Args:
            state: the request's next state.
            last_step: number of the newest uncommitted plan, which may still name the row; None when there is none.
        """
        row = request.row
        self.set_state(request, state)
        self.page_table[row, : self.num_pages[row]] = 0
        self.num_pages[row] = 0
        self.shared_pages[row] = 0
        self.live[row] = False
        self.num_adapted -= request.adapter_slot != NO_ADAPTER
        self.requests[row] = None
        self.num_live -= 1
        request.row = -1
        if last_step is None:
            self._free.append(row)
        else:
            self._retired.append((last_step, row))

    def reclaim_rows(self, committed_step: int) -> None:
        """Free the rows whose last plan is committed."""
        while self._retired and self._retired[0][0] <= committed_step:
            self._free.append(self._retired.popleft()[1])

    def known_tokens(self, request: Request) -> Int32Array:
        """int32[length]: prompt and committed output of a running request, a view."""
        tokens: Int32Array = self.token_ids[request.row, : self.length[request.row]]
        return tokens

    def running(self) -> list[Request]:
        """The running requests, by row."""
        return [request for request in self.requests if request is not None]
