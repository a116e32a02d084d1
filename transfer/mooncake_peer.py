"""A peer of the ``mooncake`` transport: the thread that submits spans to it, polls their ids and sends notifications.

Only ids of single spans settle exactly, so that "quiesced" can be told. An id is forgotten as soon as the engine has
freed it: asking again would end the process. Opening a session may block, so no other thread submits.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from sglang_lite.transfer.base import Description, Outcome, Peer, RemoteRegion, TransferError
from sglang_lite.transfer.tcp_peer import MOST_WAITING, TcpTransfer

MAX_IN_FLIGHT = 512
"""Spans under way to one peer: far below the engine's limit, at which a session gets stuck."""

_POLL_SECONDS = 0.0005
_PENDING, _DONE, _LATE = 0, 1, -2
"""What the engine says of an id; of these only done frees it, and every other number is a failure, which frees it."""


class Session(msgspec.Struct, frozen=True, array_like=True):
    """``Description.session``: the engine's session and the description of the control channel."""

    session: str
    control: bytes


class MooncakeTransfer(TcpTransfer):
    """See ``base.Transfer``; ``MooncakePeer`` moves it on."""

    next_span = 0
    num_flying = 0
    note: TcpTransfer | None = None

    def __len__(self) -> int:
        return len(self.spans)

    @property
    def is_spent(self) -> bool:
        """No span is under way and none will be submitted."""
        return not self.num_flying and (self.is_over or self.next_span == len(self.spans))


class NoteSender(Protocol):
    """Sends a notification by the control channel."""

    def __call__(self, control: Peer, note: bytes) -> TcpTransfer:
        """Raises TransferError: the channel does not take it."""


class MooncakePeer:
    """A peer, and the thread that submits spans to it and polls them.

    Args:
        engine: Mooncake's ``TransferEngine``.
        session: the peer's name in it.
        control: the peer in the control channel.
        send_note: sends a notification there.
    """

    def __init__(self, engine: Any, told: Description, session: Session, control: Peer, send_note: NoteSender) -> None:
        self._engine = engine
        self._send_note = send_note
        self.description = told
        self.session = session
        self.control = control
        self._alive = True
        self._closing = False
        self._condition = threading.Condition()
        self._transfers: collections.deque[MooncakeTransfer] = collections.deque()
        self._notes: collections.deque[MooncakeTransfer] = collections.deque()
        self._flying: dict[int, tuple[MooncakeTransfer, int, bool]] = {}
        self._thread: threading.Thread | None = None

    @property
    def instance(self) -> str:
        """See ``base.Peer.instance``."""
        return self.description.instance

    @property
    def regions(self) -> Sequence[RemoteRegion]:
        """See ``base.Peer.regions``."""
        return self.description.regions

    @property
    def alive(self) -> bool:
        """See ``base.Peer.alive``."""
        return self._alive

    def put(self, transfer: MooncakeTransfer) -> None:
        """Queue a transfer."""
        with self._condition:
            if len(self._transfers) + len(self._notes) >= MOST_WAITING:
                raise TransferError("engine", f"{MOST_WAITING} transfers to this peer are under way already")
            if self._closing:
                raise TransferError("closed", "the connection to this peer is closed")
            transfer.lease.use(transfer)
            self._transfers.append(transfer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mooncake transfers", daemon=True)
                self._thread.start()
            self._condition.notify()

    def close(self) -> None:
        """Submit no more; what is under way is lost, and waited for by the thread."""
        with self._condition:
            self._closing = True
            for transfer in (*self._transfers, *self._notes):
                transfer.settle(Outcome.FAILED, "peer_lost", "the connection was closed")
            self._condition.notify()

    def join(self, seconds: float) -> bool:
        """Wait for the thread; whether nothing is under way any more."""
        if self._thread is not None:
            self._thread.join(seconds)
            return not self._thread.is_alive()
        return True

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._transfers and not self._notes:
                    if self._closing:
                        return
                    self._condition.wait()
            moved = self._check()
            moved |= self._fill()
            moved |= self._finish()
            if not moved:
                time.sleep(_POLL_SECONDS)

    def _check(self) -> bool:
        moved = False
        for number, (transfer, span, is_retry) in list(self._flying.items()):
            status = self._engine.transfer_check_status(number)
            if status not in (_PENDING, _LATE):
                del self._flying[number]  # the engine has freed it
                transfer.num_flying -= 1
                moved = True
                if status != _DONE:
                    self._failed(transfer, span, is_retry)
        return moved

    def _fill(self) -> bool:
        moved = False
        for transfer in list(self._transfers):
            while (
                len(self._flying) < MAX_IN_FLIGHT and not transfer.is_over and transfer.next_span < len(transfer.spans)
            ):
                transfer.next_span += 1
                self._submit(transfer, transfer.next_span - 1, False)
                moved = True
        return moved

    def _submit(self, transfer: MooncakeTransfer, span: int, is_retry: bool) -> None:
        number = self._engine.transfer_submit_write(
            self.session.session,
            transfer.lease.addr + int(transfer.spans.src_offset[span]),
            transfer.region.addr + int(transfer.spans.dst_offset[span]),
            int(transfer.spans.length[span]),
        )
        if number:
            transfer.num_flying += 1
            self._flying[number] = (transfer, span, is_retry)
        else:
            self._failed(transfer, span, is_retry)

    def _failed(self, transfer: MooncakeTransfer, span: int, is_retry: bool) -> None:
        """A span right behind a rejected one may fail for no reason of its own: it is tried twice."""
        if transfer.is_over:
            return
        if not is_retry:
            self._submit(transfer, span, True)
            return
        self._alive = self._engine.send_probe(self.session.session) == 0
        if self._alive:
            transfer.settle(Outcome.FAILED, "rejected", f"the peer refused span {span}")
        else:
            transfer.settle(Outcome.FAILED, "peer_lost", f"{self.session.session} does not answer")

    def _finish(self) -> bool:
        moved = False
        for transfer in [transfer for transfer in self._transfers if transfer.is_spent]:
            moved = True
            if not transfer.is_over and transfer.notify:
                self._notify(transfer)
            else:
                transfer.settle(Outcome.DONE)
            with self._condition:
                self._transfers.remove(transfer)
            transfer.rest()
        return self._settle_notes() or moved

    def _notify(self, transfer: MooncakeTransfer) -> None:
        """All bytes are there: say so. Without a channel to say it by, nobody will know, and it has failed."""
        try:
            transfer.note = self._send_note(self.control, transfer.notify)
        except TransferError as error:
            transfer.settle(Outcome.FAILED, error.reason, f"its notification could not be sent: {error}")
        else:
            self._notes.append(transfer)

    def _settle_notes(self) -> bool:
        moved = False
        while self._notes and (note := self._notes[0].note) is not None:
            first = self._notes[0]
            if first.is_over:
                note.abort()
            elif note.is_over:
                first.settle(note.poll(), note.reason, note.detail)
            else:
                break
            moved = True
            self._notes.popleft()
        return moved
