"""What the engine core and the session worker say to each other.

The worker is a thread that owns every socket, transport and session of a core. The core tells it which requests have
pages to send or to receive, and takes events from it; neither side ever waits for the other.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec

from sglang_lite.disaggregation.distributions import Distribution, add
from sglang_lite.types import FinishCode, Int32Array, TransferParams

FAKE_HOST = "2.2.2.2"
"""A bootstrap host that nobody has: sessions with it succeed at once, without a peer (warm-up, health checks)."""

MAX_ROOM = (1 << 63) - 1

TokenId = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)]
"""A token of some vocabulary; -1 for none."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What the prefill side hands over beside the pages.

    Attributes:
        token: the first output token.
        cached_tokens: of the prompt, on the prefill side.
        finish_code: a ``FinishCode``: not 0 when the first token already ends the request.
        matched: the stop token that did, or -1.
        logprob: of the token; None when not asked for.
        top_logprobs, token_ids_logprobs: (log-probability, token) pairs at its position.
    """

    token: TokenId
    cached_tokens: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)] = 0
    finish_code: Annotated[int, msgspec.Meta(ge=0, le=int(max(FinishCode)))] = 0
    matched: TokenId = -1
    logprob: float | None = None
    top_logprobs: tuple[tuple[float, TokenId], ...] = ()
    token_ids_logprobs: tuple[tuple[float, TokenId], ...] = ()


@dataclass(frozen=True, slots=True)
class PeerReady:
    """Prefill: every decode rank has said where the pages go, so the prompt may be computed.

    Attributes:
        decode_prefix_len: tokens that the decode side has already; their pages are not sent.
    """

    key: int
    decode_prefix_len: int = 0


@dataclass(frozen=True, slots=True)
class KVSent:
    """Prefill: everything was delivered and confirmed; nobody reads the pages any more."""

    key: int


@dataclass(frozen=True, slots=True)
class KVArrived:
    """Decode: all pages and the record are here, checked where checking is on; nobody writes the pages any more."""

    key: int
    first: FirstToken


@dataclass(frozen=True, slots=True)
class KVFailed:
    """The session is over without success.

    Attributes:
        status: HTTP status that the request's client should see.
        message: what happened, with both ends, for the client and the log.
        quiesced: nobody reads or writes the pages any more; else ``KVQuiesced`` follows.
        reason: one word for metrics; those of ``transfer.base.REASONS``, or ``handshake``, ``timeout``, ``duplicate``,
            ``peer_failed``, ``peer_aborted``.
    """

    key: int
    status: int
    message: str
    quiesced: bool
    reason: str = "engine"


@dataclass(frozen=True, slots=True)
class KVQuiesced:
    """After ``abort`` or a failure: nobody reads or writes the pages any more."""

    key: int


@dataclass(frozen=True, slots=True)
class PrefillLost:
    """Decode: the process behind a prefill server's address is gone. Who came here before ``until`` was sent to it.

    Attributes:
        host, port: of its bootstrap server.
        until: monotonic seconds: when the process was last heard, or nobody answered at its address any more.
        message: for the clients of those who wait for pages here, and for the log.
        key: of no request.
    """

    host: str
    port: int
    until: float
    message: str
    key: int = -1


Event = PeerReady | KVSent | KVArrived | KVFailed | KVQuiesced | PrefillLost


class SessionStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for metrics, ``/v1/loads`` and ``/poll_transfers``.

    Attributes:
        unopened: requests of a decode server that wait for room for their pages.
        by_state: name of a state -> live sessions in it.
        quarantined: sessions that are over but whose pages may still be touched.
        bytes, spans, transfers, seconds: sums over completed transfers.
        retries: submissions and messages that were tried again.
        failures: reason -> sessions that ended with it.
        completed_checksums, pending_checksums: descriptor checksums of transfers: the latest ones, and those under way.
        completed, pending: how many transfers.
        distributions: name of a histogram -> its sum and counts (``observability.buckets.TRANSFER_BUCKETS``).
    """

    unopened: int = 0
    by_state: dict[str, int] = {}
    quarantined: int = 0
    bytes: int = 0
    spans: int = 0
    transfers: int = 0
    seconds: float = 0.0
    retries: int = 0
    failures: dict[str, int] = {}
    completed_checksums: tuple[str, ...] = ()
    pending_checksums: tuple[str, ...] = ()
    completed: int = 0
    pending: int = 0
    distributions: dict[str, Distribution] = {}


def merge_stats(stats: Sequence[SessionStats]) -> SessionStats | None:
    """Those of several cores together; None without any."""
    if len(stats) < 2:
        return stats[0] if stats else None
    merged: dict[str, Any] = {}
    for name in SessionStats.__struct_fields__:
        values = [getattr(entry, name) for entry in stats]
        if name == "distributions":
            merged[name] = functools.reduce(add, values)
        elif isinstance(values[0], dict):
            merged[name] = dict(sum((Counter(value) for value in values), Counter()))
        elif isinstance(values[0], tuple):
            merged[name] = tuple(item for value in values for item in value)
        else:
            merged[name] = sum(values)
    return SessionStats(**merged)


class Sessions(Protocol):
    """What both roles offer. All methods return at once and may be called from one thread."""

    def abort(self, key: int) -> None:
        """End a session, from whichever state; the other side hears of it. ``KVQuiesced(key)`` follows."""

    def events(self) -> list[Event]:
        """Take what has happened since the last call, in order."""

    def fileno(self) -> int:
        """A descriptor that is readable while events wait."""

    def stats(self) -> SessionStats:
        """A snapshot."""

    def close(self, grace_s: float) -> None:
        """End all sessions, free transfers, then unregister memory and leave; waits at most about ``grace_s``."""


class PrefillSessions(Sessions, Protocol):
    """Sessions of the side that computes prompts."""

    def open(self, key: int, rid: str, params: TransferParams, num_tokens: int) -> None:
        """Expect a decode server for a request, before its prompt of ``num_tokens`` may be computed."""

    def refuse(self, rid: str, params: TransferParams, message: str) -> None:
        """Tell the decode side that a request which was never opened is not computed; no event follows."""

    def send(self, key: int, first_page: int, pages: Int32Array, last: FirstToken | None = None) -> None:
        """Send pages that are written; several times, while the prompt is computed in chunks.

        Args:
            first_page: number of ``pages[0]`` within the sequence; calls follow one another without gap.
            pages: int32[n], unchanged until ``KVSent`` or ``KVQuiesced``.
            last: the record, with the final call.
        """


class DecodeSessions(Sessions, Protocol):
    """Sessions of the side that generates."""

    def open(
        self, key: int, rid: str, params: TransferParams, pages: Int32Array, num_tokens: int, decode_prefix_len: int
    ) -> None:
        """Ask the prefill side for a prompt's KV.

        Args:
            pages: int32[n], where it goes; the first is that of token ``decode_prefix_len``.
            num_tokens: of the whole prompt.
            decode_prefix_len: tokens that are here already, whole pages.
        """

    def refuse(self, rid: str, params: TransferParams, message: str) -> None:
        """Tell the prefill side that a request which was never opened will not come; no event follows."""
