"""One request of the scheduler, its states, and the parameters that move into the request table as one record."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from sglang_lite.scheduler.timelines import Timeline
from sglang_lite.scheduler.waits import NO_READING, Reading
from sglang_lite.types import (
    EMPTY_EXTRAS,
    Float32Array,
    Int32Array,
    RequestColumns,
    RequestExtras,
    RequestFlags,
    UInt8Array,
)

if TYPE_CHECKING:
    from sglang_lite.cache import Node
    from sglang_lite.grammar.base import TokenMatcher


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
    HELD = 6
    """Waits for its peer on another server; may own pages that the peer writes, but no row (``transfers``)."""


# Looking a member up on its class costs several times as much as a module's name, and every request pays it.
_NEW, _PENDING = RequestState.NEW, RequestState.PENDING
_PREFILL, _DECODE = RequestState.PREFILL, RequestState.DECODE

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


class Special:
    """Bits of the ``special`` column: what makes a row need per-row work in some step."""

    STOP_TOKENS: Final = 1
    LOGIT_BIAS: Final = 2
    LOGPROBS: Final = 4
    MIN_TOKENS: Final = 8
    PENALTIES: Final = 16
    GRAMMAR: Final = 32


def parameters_from_columns(columns: RequestColumns) -> ParameterArray:
    """Pack the columns of N requests into ``PARAMETER_DTYPE[N]``."""
    records = np.empty(len(columns), dtype=PARAMETER_DTYPE)
    for name in PARAMETER_DTYPE.names or ():
        records[name] = getattr(columns, name)
    return records


def special_bits(columns: RequestColumns) -> UInt8Array:
    """``Special`` bits of N requests as far as their columns tell: uint8[N]."""
    bits = np.zeros(len(columns), dtype=np.uint8)
    scores_prompt = (columns.logprob_start >= 0) & (columns.logprob_start < columns.num_tokens)
    bits[scores_prompt | ((columns.flags & np.uint32(RequestFlags.RETURN_LOGPROB)) != 0)] |= Special.LOGPROBS
    bits[columns.min_new_tokens > 0] |= Special.MIN_TOKENS
    penalized = (columns.frequency_penalty != 0) | (columns.presence_penalty != 0) | (columns.repetition_penalty != 1)
    bits[penalized] |= Special.PENALTIES
    return bits


class Request:
    """A live request: what is handled once per arrival, chunk, preemption or end, never once per token.

    Attributes:
        key: the caller's key.
        order: arrival number; the smaller, the older.
        params: ``PARAMETER_DTYPE`` record.
        extras: the rare parts.
        tokens: int32[], all known tokens while the request has no row (the prompt, and after a preemption or on
            another server the output so far); empty while it has one, because then the table holds them.
        prompt_length: tokens of the prompt.
        target: tokens to compute before the next token can be drawn.
        planned, computed: tokens of the target whose computation is planned / committed.
        scored: next prompt position whose log-probability has to be reported.
        cached_tokens: prompt tokens found in the cache on the first run, -1 before it.
        node: the locked node of the radix tree, None while nothing is locked.
        adapter_slot: where its low-rank adapter is loaded, ``NO_ADAPTER`` for none.
        admitted_before: requests the scheduler had admitted to run, or to get pages, when this one arrived (a clock).
        started: time of the first chunk, None before it.
        timeline: where its time went.
        tenant: slot of who pays for it, 0 without fair scheduling.
        incoming: pages reserved for a prompt that another server computes, None without.
        lent: a peer may read or write its pages; they outlive it in a hold.
        has_peer: a session of it is open, or is to be.
        sent_pages: pages of the prompt that were noted as written.
        embeds: float32[prompt_length, hidden], the prompt of a request that sent vectors; its tokens mean nothing then.
        matcher: where the output stands in its grammar, None without one. Kept over preemptions: the output is too.
    """

    __slots__ = (
        "adapter_slot",
        "admitted_before",
        "arrival",
        "cached_tokens",
        "computed",
        "embeds",
        "extras",
        "has_peer",
        "incoming",
        "key",
        "lent",
        "matcher",
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
        "sent_pages",
        "special",
        "started",
        "state",
        "stop_token_ids",
        "target",
        "tenant",
        "timeline",
        "tokens",
    )

    def __init__(
        self,
        params: np.void,
        special: int,
        tokens: Int32Array,
        order: int,
        arrival: float,
        extras: RequestExtras,
        matcher: TokenMatcher | None = None,
        reading: Reading = NO_READING,
    ) -> None:
        self.params = params
        self.key = int(params["key"])
        self.priority = int(params["priority"])
        self.max_new_tokens = int(params["max_new_tokens"])
        self.extras = extras
        self.namespace = extras.namespace
        self.adapter_slot = extras.adapter_slot
        self.tokens = tokens
        self.order = order
        self.arrival = arrival
        self.target = len(tokens)
        self.prompt_length = len(tokens) - extras.num_resumed
        self.planned = 0
        self.computed = 0
        self.scored = int(params["logprob_start"]) if special & Special.LOGPROBS else -1
        if not 0 <= self.scored < self.prompt_length:
            self.scored = self.prompt_length
        self.cached_tokens = -1
        self.retractions = 0
        self.row = -1
        self.state = _NEW
        self.node: Node | None = None
        self.admitted_before = 0
        self.started: float | None = None
        self.timeline = Timeline(arrival, reading)
        self.tenant = 0
        self.incoming: Int32Array | None = None
        self.lent = False
        self.has_peer = extras.transfer is not None
        self.sent_pages = 0
        self.stop_token_ids: tuple[int, ...] = ()
        if extras is not EMPTY_EXTRAS:
            if extras.stop_token_ids and not params["flags"] & RequestFlags.IGNORE_EOS:
                self.stop_token_ids = extras.stop_token_ids
                special |= Special.STOP_TOKENS
            if extras.logit_bias:
                special |= Special.LOGIT_BIAS
        self.embeds: Float32Array | None = None
        self.matcher = matcher
        if matcher is not None:
            special |= Special.GRAMMAR
        self.special = special

    @property
    def waiting(self) -> bool:
        """In the queue, with neither row nor pages."""
        return self.state is _NEW or self.state is _PENDING

    @property
    def running(self) -> bool:
        """Owns a row and pages."""
        return self.state is _PREFILL or self.state is _DECODE
