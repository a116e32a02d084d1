"""Types that cross layers: sampling parameters, finish reasons, request errors, columns of a request batch.

Everything here is plain data over NumPy and msgspec, so the front process, the engine core, the scheduler and the
offline engine can share it without importing torch, asyncio or sockets.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
UInt32Array = npt.NDArray[np.uint32]
Float32Array = npt.NDArray[np.float32]

NO_SEED = -1
"""Value of a seed column for a request that gave no seed."""


GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True):
    """What an output has to match.

    Attributes:
        kind: the language of ``text``, by the name of the request field it comes from.
        text: as the client wrote it; another spacing is another grammar.
        compact: a JSON text has at most one character of whitespace in one place.
    """

    kind: GrammarKind
    text: str
    compact: bool = False


class ThinkingTokens(msgspec.Struct, frozen=True, array_like=True):
    """The reasoning that a grammar leaves alone, in front of what it shapes.

    Attributes:
        start: the token that opens it; -1 where the output begins inside it.
        end: the token that closes it.
    """

    start: int
    end: int


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request turns logits into tokens and when it stops.

    Values are already validated (see ``frontend.validation``); ranges are those of SGLang's ``sampling_params``.
    ``max_new_tokens=None`` means up to the context limit. ``top_k=-1`` means the whole vocabulary.
    ``temperature=0`` means greedy. ``stop``, ``stop_regex``, ``no_stop_trim``, ``skip_special_tokens`` and
    ``spaces_between_special_tokens`` concern text only and stay in the front process. ``thinking`` delays ``grammar``.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stream_interval: int | None = None
    grammar: Grammar | None = None
    thinking: ThinkingTokens | None = None


class FinishCode(enum.IntEnum):
    """Why a request ended, as the engine core reports it (one uint8 per row of an egress frame).

    Stop strings and stop patterns are found by the front, which then ends the request with a ``finish`` message;
    they never appear here.
    """

    RUNNING = 0
    STOP_TOKEN = 1
    LENGTH = 2
    ABORTED = 3
    WAITING_TIMEOUT = 4
    RUNNING_TIMEOUT = 5
    QUEUE_FULL = 6
    TOO_LONG = 7
    ERROR = 8


class RequestFlags(enum.IntFlag):
    """Bits of the ``flags`` column of a request."""

    NONE = 0
    IGNORE_EOS = 1
    RETURN_LOGPROB = 2
    """Log-probability of every output token (and of prompt tokens from ``logprob_start`` on when that is >= 0)."""
    HIDDEN_STATES = 4
    """With ``RETURN_LOGPROB``: also the hidden state behind each of these log-probabilities."""
    REFUSED = 8
    """The front has refused it; the core only tells the other half of its pair, which is on another server."""


class RequestError(Exception):
    """A request that cannot be served, with the HTTP status that says so.

    Args:
        message: what is wrong: field, value, what is allowed.
        status: HTTP status (400 bad input, 412 paused, 429 capacity, 501 not supported here, 503 unavailable).
        field: name of the offending field, or None when the fault is not one field's.
    """

    def __init__(self, message: str, *, status: int = 400, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.field = field


class ProfileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a profile records and where its trace goes.

    Attributes:
        output_dir: directory of the trace.
        num_steps: steps after which the recording ends by itself; 0 to record until it is stopped.
        with_stack, record_shapes: also note Python stacks, and the shapes of operands.
        prefix: beginning of the trace's file name.
    """

    output_dir: str
    num_steps: int = 0
    with_stack: bool = False
    record_shapes: bool = False
    prefix: str = ""


class StartupError(Exception):
    """A configuration that cannot be served. The message says what, where, what is allowed and what to do."""


NO_ADAPTER = -1
"""Slot of a request, or of a token, that goes through the base model alone."""


class TransferParams(msgspec.Struct, frozen=True, array_like=True):
    """Where the KV of a request comes from, under prefill/decode disaggregation.

    Attributes:
        host, port: of the prefill side's bootstrap server.
        room: names the pair of requests, 0 to 2^63 - 1.
        prefill_dp_rank: the prefill replica that has it; None to find out.
        rid: the request id, for logs and checksums.
    """

    host: str
    port: int
    room: int
    prefill_dp_rank: int | None = None
    rid: str = ""


class RequestExtras(msgspec.Struct, frozen=True, kw_only=True):
    """What only few requests carry; the rest of a request is columns.

    ``namespace`` separates prefix caches (cache salt, adapter); the empty string is the shared one.
    ``adapter_slot`` says where the request's low-rank adapter is loaded. ``grammar`` names a grammar that was sent
    before (``grammar.identity``); the empty string is none; it begins behind ``thinking``, where that is given.
    ``num_resumed`` of the request's tokens, the last ones, are output that another server has sent already.
    ``transfer`` says whose KV it waits for, or who waits for its, under prefill/decode disaggregation. ``tenant`` is
    who pays for the request under fair scheduling, and ``tenant_weight`` (> 0) the share that tenant has a right to.
    """

    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] | None = None
    namespace: str = ""
    token_ids_logprob: tuple[int, ...] = ()
    adapter_slot: int = NO_ADAPTER
    grammar: str = ""
    thinking: ThinkingTokens | None = None
    tenant: str = ""
    tenant_weight: float = 1.0
    transfer: TransferParams | None = None
    num_resumed: int = 0


EMPTY_EXTRAS = RequestExtras()


@dataclass(slots=True)
class RequestColumns:
    """N requests as columns: what an ingress frame carries and ``Scheduler.admit`` takes.

    Attributes:
        key: int64[N], unique among live requests. The high 16 bits name the front, the low 48 count.
        num_tokens: int32[N], prompt length of each request, each >= 1.
        max_new_tokens: int32[N], already limited to the context length; 0 means prefill only.
        min_new_tokens: int32[N], end tokens are suppressed before that many output tokens.
        temperature, top_p, min_p, frequency_penalty, presence_penalty, repetition_penalty: float32[N].
        top_k: int32[N], -1 for the whole vocabulary.
        seed: int64[N], ``NO_SEED`` where none was given.
        priority: int64[N], larger is more urgent.
        flags: uint32[N], ``RequestFlags``.
        logprob_start: int32[N], first prompt position whose log-probability is wanted, -1 for none.
        top_logprobs: int32[N], alternatives per position.
        timeout: float32[N], seconds from admission to the end, 0 for none.
        token_ids: int32[sum(num_tokens)], the prompts one after another.
        extras: index of the request in this batch -> its rare parts.
        embeds: index -> float32[num_tokens of its prompt, hidden], for prompts of vectors, whose ids mean nothing.
    """

    key: Int64Array
    num_tokens: Int32Array
    max_new_tokens: Int32Array
    min_new_tokens: Int32Array
    temperature: Float32Array
    top_p: Float32Array
    top_k: Int32Array
    min_p: Float32Array
    frequency_penalty: Float32Array
    presence_penalty: Float32Array
    repetition_penalty: Float32Array
    seed: Int64Array
    priority: Int64Array
    flags: UInt32Array
    logprob_start: Int32Array
    top_logprobs: Int32Array
    timeout: Float32Array
    token_ids: Int32Array
    extras: dict[int, RequestExtras] = field(default_factory=dict)
    embeds: dict[int, Float32Array] = field(default_factory=dict)

    def resumed(self, index: int) -> list[int]:
        """The output that request ``index`` resumes."""
        end = int(self.num_tokens[: index + 1].sum(dtype=np.int64))
        resumed: list[int] = self.token_ids[end - self.extras[index].num_resumed : end].tolist()
        return resumed

    def __len__(self) -> int:
        return len(self.key)


class LogprobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of consecutive positions of one request.

    Attributes:
        key: the request.
        prompt: True for prompt positions, False for output tokens.
        token_ids: int32[P], the token at each position.
        logprobs: float32[P], its natural-log probability; NaN where there is none (the first prompt token).
        top_ids, top_logprobs: int32[P, K] and float32[P, K], most likely first; K may be 0.
        extra_logprobs: float32[P, M], for the request's ``token_ids_logprob``; M may be 0.
        hidden: float32[P, H], the last hidden state (after the final norm) at the position before each, from which its
            log-probability comes; H is 0 where it was not asked for, and for the first prompt token.
    """

    key: int
    prompt: bool
    token_ids: Int32Array
    logprobs: Float32Array
    top_ids: Int32Array
    top_logprobs: Float32Array
    extra_logprobs: Float32Array
    hidden: Float32Array


class RequestTimeline(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Where the time of a request went, as the scheduler recorded it. Seconds of the core's clock.

    Sent when the prompt is computed, again when it is computed again after a preemption, and at an end before that.

    Attributes:
        queue_seconds: from admission to the first chunk; requeue_seconds: waits after preemptions.
        waits: cause (``scheduler.waits.CAUSES``) -> seconds; they add up to the two above.
        prefill_seconds: from the first chunk to the first token, and the same after preemptions.
        prefill_chunks, computed_tokens: chunks, and the positions they computed.
        cached_tokens: prompt tokens found in the prefix cache.
        preemptions: how often the request lost its pages.
        guessed: tokens guessed under speculation, then the number of steps in which 0, 1, 2, .. of the guesses were
            right; empty where nothing was guessed, and until the request has left its row.
    """

    queue_seconds: float = 0.0
    requeue_seconds: float = 0.0
    waits: dict[str, float] = {}
    prefill_seconds: float = 0.0
    prefill_chunks: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    guessed: list[int] = []


@dataclass(slots=True)
class OutputColumns:
    """What leaves the engine core after a step: N (request, token) pairs as columns.

    Attributes:
        key: int64[N].
        token: int32[N], the new token, or -1 where the row ended without one (abort, time-out, prefill only).
        finish: uint8[N], ``FinishCode``.
        matched: int32[N], the stop token for ``STOP_TOKEN``, else -1.
        cached_tokens: int32[N], prompt tokens found in the prefix cache (same value in every frame of a request).
        retractions: uint8[N], how often the request was preempted so far (saturating).
        logprobs: records for the requests that asked for them.
        messages: key -> text for the rare rows that end with ``ERROR`` or ``TOO_LONG``.
        timelines: key -> record of the requests whose prompt was computed, or that ended before it was.
    """

    key: Int64Array
    token: Int32Array
    finish: UInt8Array
    matched: Int32Array
    cached_tokens: Int32Array
    retractions: UInt8Array
    logprobs: list[LogprobRecord] = field(default_factory=list)
    messages: dict[int, str] = field(default_factory=dict)
    timelines: dict[int, RequestTimeline] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.key)
