"""One request of the scheduler, its states, and the parameters that move into the request table as one record."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sglang_lite.types import EMPTY_EXTRAS, Int32Array, RequestColumns, RequestExtras, RequestFlags

if TYPE_CHECKING:
    from sglang_lite.cache import Node


class RequestState(enum.IntEnum):
    """Where a request stands; one uint8 per row of the request table."""

    NEW = 0
    """Waiting, never run."""
    PREFILL = 1
    """Owns a row and pages; part of its prompt is still to be computed."""
    DECODE = 2
    """Owns a row and pages; every step draws one token."""
    PENDING = 3
    """Waiting again after a preemption; owns neither row nor pages."""
    FINISHED = 4
    ABORTED = 5


PARAMETER_DTYPE = np.dtype(
    [
        ("key", np.int64),
        ("seed", np.int64),
        ("priority", np.int64),
        ("max_new_tokens", np.int32),
        ("min_new_tokens", np.int32),
        ("top_k", np.int32),
        ("logprob_start", np.int32),
        ("top_logprobs", np.int32),
        ("flags", np.uint32),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("repetition_penalty", np.float32),
        ("timeout", np.float32),
    ]
)
"""Parameters of a request as one record, so that a row is filled, and a batch gathered, in one copy."""

ParameterArray = npt.NDArray[np.void]


class Special(enum.IntFlag):
    """Bits of the ``special`` column: what makes a row need per-row work in some step."""

    NONE = 0
    STOP_TOKENS = 1
    LOGIT_BIAS = 2
    LOGPROBS = 4
    MIN_TOKENS = 8
    PENALTIES = 16


def parameters_from_columns(columns: RequestColumns) -> ParameterArray:
    """Pack the columns of N requests into ``PARAMETER_DTYPE[N]``."""
    records = np.empty(len(columns), dtype=PARAMETER_DTYPE)
    for name in PARAMETER_DTYPE.names or ():
        records[name] = getattr(columns, name)
    return records


class Request:
    """A live request: what is handled once per arrival, chunk, preemption or end, never once per token.

    Attributes:
        key: the caller's key.
        order: arrival number; the smaller, the older.
        params: ``PARAMETER_DTYPE`` record.
        extras: the rare parts.
        tokens: int32[], all known tokens while the request has no row (the prompt, and after a preemption the
            output so far); empty while it has one, because then the table holds them.
        prompt_length: tokens of the prompt.
        target: tokens to compute before the next token can be drawn.
        planned, computed: tokens of the target whose computation is planned / committed.
        scored: next prompt position whose log-probability has to be reported.
        cached_tokens: prompt tokens found in the cache on the first run, -1 before it.
        node: the locked node of the radix tree, None while nothing is locked.
        admitted_before: requests the scheduler had admitted to run when this one arrived (a logical clock).
        started: time of the first chunk, None before it.
    """

    __slots__ = (
        "admitted_before",
        "arrival",
        "cached_tokens",
        "computed",
        "extras",
        "key",
        "max_new_tokens",
        "namespace",
        "node",
        "order",
        "params",
        "planned",
        "priority",
        "prompt_length",
        "retractions",
        "row",
        "scored",
        "special",
        "started",
        "state",
        "stop_token_ids",
        "target",
        "tokens",
    )

    def __init__(
        self, params: np.void, tokens: Int32Array, order: int, arrival: float, extras: RequestExtras | None
    ) -> None:
        self.params = params
        self.key = int(params["key"])
        self.priority = int(params["priority"])
        self.max_new_tokens = int(params["max_new_tokens"])
        self.extras = extras or EMPTY_EXTRAS
        self.namespace = self.extras.namespace
        self.tokens = tokens
        self.order = order
        self.arrival = arrival
        self.prompt_length = len(tokens)
        self.target = len(tokens)
        self.planned = 0
        self.computed = 0
        self.scored = int(params["logprob_start"])
        if not 0 <= self.scored < self.prompt_length:
            self.scored = self.prompt_length
        self.cached_tokens = -1
        self.retractions = 0
        self.row = -1
        self.state = RequestState.NEW
        self.node: Node | None = None
        self.admitted_before = 0
        self.started: float | None = None
        ignores_end = bool(params["flags"] & RequestFlags.IGNORE_EOS)
        self.stop_token_ids: tuple[int, ...] = () if ignores_end else self.extras.stop_token_ids
        self.special = self._special()

    def _special(self) -> Special:
        params = self.params
        special = Special.NONE
        if self.stop_token_ids:
            special |= Special.STOP_TOKENS
        if self.extras.logit_bias:
            special |= Special.LOGIT_BIAS
        if params["flags"] & RequestFlags.RETURN_LOGPROB or self.scored < self.prompt_length:
            special |= Special.LOGPROBS
        if params["min_new_tokens"] > 0:
            special |= Special.MIN_TOKENS
        if params["frequency_penalty"] != 0 or params["presence_penalty"] != 0 or params["repetition_penalty"] != 1:
            special |= Special.PENALTIES
        return special

    @property
    def waiting(self) -> bool:
        """In the queue, with neither row nor pages."""
        return self.state in (RequestState.NEW, RequestState.PENDING)

    @property
    def running(self) -> bool:
        """Owns a row and pages."""
        return self.state in (RequestState.PREFILL, RequestState.DECODE)
