"""The sessions of a replica with several tensor-parallel ranks: rank 0's core speaks to the workers of all of them.

Every rank has its part of every page, in a pool of its own, and moves it itself. A command does not wait for the plans
that the other ranks have still to run: the core sends pages once rank 0 has computed them, and since every layer ends
with a sum over all ranks, these have written theirs by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from sglang_lite.disaggregation.base import Event, FirstToken, KVQuiesced, SessionStats
from sglang_lite.disaggregation.decode_sessions import DecodeWorker
from sglang_lite.disaggregation.event_queue import EventQueue
from sglang_lite.disaggregation.prefill_sessions import PrefillWorker
from sglang_lite.disaggregation.rank_frames import (
    AbortKey,
    Command,
    OpenDecode,
    OpenPrefill,
    SendPages,
    decode_answer,
    decode_command,
    encode_answer,
    encode_command,
    pack_pages,
    unpack_pages,
)
from sglang_lite.disaggregation.rank_merge import RankMerge
from sglang_lite.types import Int32Array, TransferParams

Worker = TypeVar("Worker", PrefillWorker, DecodeWorker)

_NO_RANK = -1
"""Of events for the core that no rank has told."""


class RankChannel(Protocol):
    """The way from rank 0 to the others and back."""

    @property
    def num_ranks(self) -> int:
        """Of the replica, with rank 0."""

    def send_command(self, command: bytes) -> None:
        """To every other rank, in order; never waits. By the thread that submits plans."""

    def listen(self, listener: Callable[[int, bytes], None]) -> None:
        """Call ``listener`` with (rank, answer), in a thread of its own."""


class RankedSessions(Generic[Worker]):
    """See ``base.Sessions``. One thread calls the methods.

    Args:
        own: rank 0's worker, not started yet.
    """

    def __init__(self, own: Worker, channel: RankChannel) -> None:
        self._own: Worker = own
        self._channel = channel
        self._merge = RankMerge(channel.num_ranks)
        self._queue: EventQueue[tuple[int, Event]] = EventQueue()
        self._stats: dict[int, SessionStats] = {}
        own.redirect(lambda event: self._queue.put((0, event)))
        channel.listen(self._heard)

    def start(self) -> None:
        """Start rank 0's worker; the others start theirs."""
        self._own.start()

    def abort(self, key: int) -> None:
        """See ``base.Sessions``."""
        if self._merge.abort(key):
            self._stop(key)
        elif not self._merge.is_known(key):
            self._queue.put((_NO_RANK, KVQuiesced(key)))

    def events(self) -> list[Event]:
        """See ``base.Sessions``."""
        events: list[Event] = []
        for rank, event in self._queue.take():
            if rank == _NO_RANK:
                events.append(event)
                continue
            told, must_end = self._merge.take(rank, event)
            events += told
            if must_end:
                self._stop(event.key)
        return events

    def fileno(self) -> int:
        """See ``base.Sessions``."""
        return self._queue.fileno()

    def stats(self) -> SessionStats:
        """See ``base.Sessions``: requests as rank 0 counts them, bytes and spans of all ranks."""
        own: SessionStats = self._own.stats()
        others = list(self._stats.values())
        return msgspec.structs.replace(
            own,
            quarantined=self._merge.num_quarantined,
            bytes=own.bytes + sum(other.bytes for other in others),
            spans=own.spans + sum(other.spans for other in others),
            retries=own.retries + sum(other.retries for other in others),
            failures=dict(self._merge.failures),
        )

    def close(self, grace_s: float) -> None:
        """See ``base.Sessions``; the other ranks close theirs when they end."""
        self._own.close(grace_s)

    def _stop(self, key: int) -> None:
        self._own.abort(key)
        self._tell(AbortKey(key))

    def _tell(self, command: Command) -> None:
        self._channel.send_command(encode_command(command))

    def _heard(self, rank: int, data: bytes) -> None:
        answer = decode_answer(data)
        if isinstance(answer, SessionStats):
            self._stats[rank] = answer
        else:
            self._queue.put((rank, answer))


class RankedPrefillSessions(RankedSessions[PrefillWorker]):
    """See ``base.PrefillSessions``."""

    def open(self, key: int, rid: str, params: TransferParams, num_tokens: int) -> None:
        """See ``base.PrefillSessions``."""
        self._merge.open(key)
        self._own.open(key, rid, params, num_tokens)
        self._tell(OpenPrefill(key, rid, params, num_tokens))

    def refuse(self, rid: str, params: TransferParams, message: str) -> None:
        """See ``base.PrefillSessions``: a decode server that hears it of one rank waits for none."""
        self._own.refuse(rid, params, message)

    def send(self, key: int, first_page: int, pages: Int32Array, last: FirstToken | None = None) -> None:
        """See ``base.PrefillSessions``."""
        self._own.send(key, first_page, pages, last)
        self._tell(SendPages(key, first_page, pack_pages(pages), last))


class RankedDecodeSessions(RankedSessions[DecodeWorker]):
    """See ``base.DecodeSessions``."""

    def open(
        self, key: int, rid: str, params: TransferParams, pages: Int32Array, num_tokens: int, decode_prefix_len: int
    ) -> None:
        """See ``base.DecodeSessions``."""
        self._merge.open(key)
        attempt = self._own.next_attempt()
        self._own.open(key, rid, params, pages, num_tokens, decode_prefix_len, attempt)
        self._tell(OpenDecode(key, rid, params, pack_pages(pages), num_tokens, decode_prefix_len, attempt))

    def refuse(self, rid: str, params: TransferParams, message: str) -> None:
        """See ``base.DecodeSessions``: one prefill rank that hears of it is enough."""
        self._own.refuse(rid, params, message)


class FollowingSessions:
    """The sessions of another rank: does what rank 0 says, and reports.

    Args:
        worker: of this rank, not started yet.
        report: sends an answer to rank 0; any thread may call it.
    """

    def __init__(self, worker: PrefillWorker | DecodeWorker, report: Callable[[bytes], None]) -> None:
        self._worker, self._report = worker, report
        self._told = SessionStats()
        worker.redirect(lambda event: report(encode_answer(event)), self._tell_stats)
        worker.start()

    def run(self, data: bytes) -> None:
        """A command of rank 0.

        Raises:
            msgspec.MsgspecError: it is malformed, or of a server of the other role.
        """
        worker, command = self._worker, decode_command(data)
        match command:
            case OpenPrefill() if isinstance(worker, PrefillWorker):
                worker.open(command.key, command.rid, command.params, command.num_tokens)
            case SendPages() if isinstance(worker, PrefillWorker):
                worker.send(command.key, command.first_page, unpack_pages(command.pages), command.last)
            case OpenDecode() if isinstance(worker, DecodeWorker):
                where, rest = unpack_pages(command.pages), (command.decode_prefix_len, command.attempt)
                worker.open(command.key, command.rid, command.params, where, command.num_tokens, *rest)
            case AbortKey():
                worker.abort(command.key)
            case _:
                raise msgspec.ValidationError(f"{type(command).__name__} is no command for {worker.name}")

    def close(self, grace_s: float) -> None:
        """End all sessions."""
        self._worker.close(grace_s)

    def _tell_stats(self) -> None:
        stats = self._worker.stats()
        told = SessionStats(bytes=stats.bytes, spans=stats.spans, retries=stats.retries)
        if told != self._told:
            self._told = told
            self._report(encode_answer(told))
