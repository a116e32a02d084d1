"""A prefill and a decode core without threads, and a wire between them whose delays and faults are drawn at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_lite.disaggregation.base import Event, FirstToken, KVArrived, KVFailed, KVQuiesced, KVSent, PeerReady
from sglang_lite.engine.core import EngineCore
from sglang_lite.engine.decode_role import DecodeRole
from sglang_lite.engine.frames import Command
from sglang_lite.engine.local import LocalTransport
from sglang_lite.engine.prefill_role import PrefillRole
from sglang_lite.scheduler import Scheduler, SchedulerConfig
from sglang_lite.types import FinishCode, Int32Array, OutputColumns, RequestExtras, TransferParams
from tests.support.null_executor import LateExecutor
from tests.support.scheduler_driver import request_columns

PAGE, VOCABULARY = 4, 30


@dataclass(slots=True)
class _Session:
    """One room, as the wire sees it. ``late`` are copies that may still be made after the end."""

    opened: set[str] = field(default_factory=set)
    is_ready: bool = False
    pages: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    sent: int = 0
    last: FirstToken | None = None
    has_arrived: bool = False
    is_over: bool = False
    owes: set[str] = field(default_factory=set)


class PlayedSessions:
    """One side's sessions: tells the wire."""

    def __init__(self, wire: Wire, name: str) -> None:
        self._wire, self._name = wire, name
        self.waiting: list[Event] = []

    def open(self, key: int, rid: str, params: TransferParams, *details: Any) -> None:
        self._wire.open(self._name, key, details[0].tolist() if len(details) == 3 else [])

    def send(self, key: int, first_page: int, pages: Int32Array, last: FirstToken | None = None) -> None:
        self._wire.send(key, first_page, pages.tolist(), last)

    def abort(self, key: int) -> None:
        self._wire.abort(self._name, key)

    def refuse(self, rid: str, params: TransferParams, message: str) -> None:
        self._wire.fail_other(self._name, params.room)

    def events(self) -> list[Event]:
        taken, self.waiting = self.waiting, []
        return taken

    def fileno(self) -> int:
        return 0

    def stats(self) -> Any:
        return None

    def close(self, grace_s: float) -> None:
        """Nothing is open."""


class PlayedSide:
    """A core without a thread."""

    def __init__(self, wire: Wire, kind: str, num_pages: int, *, fallback: bool, policy: Any = "fcfs") -> None:
        config = SchedulerConfig(
            num_pages=num_pages,
            page_size=PAGE,
            context_length=64,
            max_running_requests=3,
            chunked_prefill_size=8,
            reserved_decode_tokens=4,
            enable_radix_cache=kind == "prefill",
            policy=policy,
            max_queued_requests=12,
        )
        self.scheduler = Scheduler(config)
        self.executor = LateExecutor(3, num_slots=num_pages * PAGE, page_size=PAGE, vocab_size=VOCABULARY)
        self.sessions = wire.join(self, kind)
        role: Any = PrefillRole(self.scheduler, self.sessions)
        if kind == "decode":
            role = DecodeRole(self.scheduler, self.sessions, fallback=fallback, vocab_size=VOCABULARY)
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishCode] = {}
        self._transport = LocalTransport(self._take, lambda event: None)
        self._core = EngineCore(self.scheduler, self.executor, self._transport, role=role, clock=lambda: 0.0)

    def _take(self, columns: OutputColumns) -> None:
        for key, token, code in zip(columns.key.tolist(), columns.token.tolist(), columns.finish.tolist(), strict=True):
            assert key not in self.ends, f"a row of request {key} follows its end"
            if token >= 0:
                self.tokens.setdefault(key, []).append(token)
            if code:
                self.ends[key] = FinishCode(code)

    def put(self, command: Command) -> None:
        self._transport.put(command)

    def submit(self, key: int, prompt: Sequence[int], count: int, priority: int = 0) -> None:
        extras = {0: RequestExtras(transfer=TransferParams("h", 1, key, rid=str(key)))}
        self.put(request_columns([key], [list(prompt)], extras=extras, max_new_tokens=count, priority=priority))

    def step(self) -> None:
        self._core.step(0)
        self.scheduler.audit()

    @property
    def used_pages(self) -> int:
        stats = self.scheduler.stats()
        return stats.num_pages - stats.free_pages - stats.cached_pages

    def content(self, page: int) -> tuple[list[int], list[int]]:
        where = slice(page * PAGE, page * PAGE + PAGE)
        return self.executor._slot_token[where].tolist(), self.executor._slot_position[where].tolist()

    def write(self, page: int, content: tuple[list[int], list[int]]) -> None:
        where = slice(page * PAGE, page * PAGE + PAGE)
        self.executor._slot_token[where], self.executor._slot_position[where] = content


class Wire:
    """Moves pages between the sides. Until a session is quiet, what was under way may still be read and written."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._sides: dict[str, PlayedSide] = {}
        self._sessions: dict[int, _Session] = {}

    def join(self, side: PlayedSide, name: str) -> PlayedSessions:
        self._sides[name] = side
        return PlayedSessions(self, name)

    def open(self, name: str, key: int, pages: list[int]) -> None:
        session = self._sessions.setdefault(key, _Session())
        if session.is_over:  # the other side has ended it before
            self._tell(name, KVFailed(key, 500, "ended before", True, "peer_failed"))
            return
        session.opened.add(name)
        session.pages = pages or session.pages

    def send(self, key: int, first: int, pages: list[int], last: FirstToken | None) -> None:
        session = self._sessions[key]
        if session.is_over:
            return
        assert first == session.sent
        session.sent += len(pages)
        session.copies += zip(pages, session.pages[first : first + len(pages)], strict=True)
        session.last = last

    def abort(self, name: str, key: int) -> None:
        session = self._sessions.get(key)
        if session is None or name not in session.opened or session.is_over:
            if session is None or name not in session.owes:
                self._tell(name, KVQuiesced(key))
            return
        session.is_over = True
        session.owes.add(name)
        self.fail_other(name, key)

    def fail_other(self, name: str, key: int, reason: str = "peer_failed") -> None:
        other = "decode" if name == "prefill" else "prefill"
        session = self._sessions.setdefault(key, _Session())
        session.is_over = True
        if other in session.opened and not (other == "decode" and session.has_arrived):
            session.owes.add(other)
            self._tell(other, KVFailed(key, 500, "the other side ended it", False, reason))

    def lose(self) -> None:
        """A session that is under way breaks on both sides."""
        live = [key for key, session in self._sessions.items() if len(session.opened) == 2 and not session.is_over]
        if live:
            key = self._chance.choice(live)
            self.fail_other("prefill", key, "peer_lost")
            self.fail_other("decode", key, "peer_lost")

    def step(self, eagerness: float = 0.5) -> None:
        """Some of what may happen happens."""
        for key, session in list(self._sessions.items()):
            if self._chance.random() > eagerness:
                continue
            if session.is_over:
                self._wind_down(key, session)
            elif len(session.opened) == 2 and not session.is_ready:
                session.is_ready = True
                self._tell("prefill", PeerReady(key))
            elif session.copies:
                self._copy(session.copies.pop(self._chance.randrange(len(session.copies))))
            elif session.last is not None and not session.has_arrived:
                session.has_arrived = True
                self._tell("decode", KVArrived(key, session.last))
            elif session.has_arrived:
                self._tell("prefill", KVSent(key))
                del self._sessions[key]

    def _wind_down(self, key: int, session: _Session) -> None:
        if session.copies and not session.has_arrived:
            self._copy(session.copies.pop())  # bytes that were under way
            return
        for name in sorted(session.owes):
            self._tell(name, KVQuiesced(key))
        session.owes.clear()

    def _copy(self, copy: tuple[int, int]) -> None:
        page, place = copy
        self._sides["decode"].write(place, self._sides["prefill"].content(page))

    def _tell(self, name: str, event: Event) -> None:
        self._sides[name].sessions.waiting.append(event)


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What one engine generates."""
    from tests.support.null_executor import context_token

    tokens = list(prompt)
    for _ in range(count):
        tokens.append(context_token(np.array(tokens, dtype=np.int32), VOCABULARY))
    return tokens[len(prompt) :]
