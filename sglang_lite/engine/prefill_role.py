"""The role of a prefill server's core: prompts are computed once a decode server waits, and their pages sent to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_lite.disaggregation.base import (
    FirstToken,
    KVFailed,
    KVQuiesced,
    KVSent,
    PeerReady,
    PrefillSessions,
    SessionStats,
)
from sglang_lite.engine.roles import code_of, end_row, first_token
from sglang_lite.engine.transport import select_rows
from sglang_lite.scheduler.scheduler import Scheduler
from sglang_lite.types import FinishCode, OutputColumns, RequestColumns

_COMPUTED = (FinishCode.LENGTH, FinishCode.STOP_TOKEN)


@dataclass(slots=True)
class _Sending:
    """A request with an open session; ``answer`` and ``first`` are there once its prompt is computed."""

    ids: tuple[int, ...]
    answer: OutputColumns | None = None
    first: FirstToken | None = None


class PrefillRole:
    """See ``roles.Role``. The answer of a request is kept back until its pages were delivered."""

    def __init__(self, scheduler: Scheduler, sessions: PrefillSessions) -> None:
        self._scheduler = scheduler
        self._sessions = sessions
        self._live: dict[int, _Sending] = {}
        self._outputs: list[OutputColumns] = []

    def admitting(self, columns: RequestColumns) -> None:
        """One token is drawn at most; the others are the decode server's."""
        paired = [index for index, extras in columns.extras.items() if extras.transfer is not None]
        if paired:
            columns.max_new_tokens = columns.max_new_tokens.copy()
            columns.max_new_tokens[paired] = np.minimum(columns.max_new_tokens[paired], 1)

    def admitted(self, columns: RequestColumns) -> None:
        """See ``Role.admitted``. The decode server hears of those that were refused: it would wait for their pages."""
        held = set(self._scheduler.held())
        for index, extras in columns.extras.items():
            key, params = int(columns.key[index]), extras.transfer
            if params is None or key in self._live:
                continue
            if key in held:
                self._live[key] = _Sending(extras.token_ids_logprob)
                self._sessions.open(key, params.rid, params, int(columns.num_tokens[index]))
            else:
                self._sessions.refuse(params.rid, params, "the prefill server refused it")

    def abort(self, keys: list[int] | None) -> int:
        """See ``Role.abort``."""
        found = [key for key in (list(self._live) if keys is None else keys) if self._is_computed(key)]
        for key in found:
            del self._live[key]
            self._sessions.abort(key)
            self._outputs.append(end_row(key, FinishCode.ABORTED))
        return len(found)

    def turn(self, now: float) -> None:
        """See ``Role.turn``."""
        for event in self._sessions.events():
            match event:
                case PeerReady(key=key):
                    self._scheduler.release_held(key, lent=True)
                case KVSent(key=key):
                    self._delivered(key)
                case KVFailed():
                    self._failed(event, now)
                case KVQuiesced(key=key):
                    self._scheduler.release_hold(key)
                case _:
                    pass
        for written in self._scheduler.take_written():
            sending = self._live.get(written.key)
            if sending is not None:
                self._sessions.send(written.key, written.first_page, written.pages, last=sending.first)
        for key in self._scheduler.take_ended():
            if key in self._live and not self._is_computed(key):
                del self._live[key]
                self._sessions.abort(key)

    def outgoing(self, columns: OutputColumns) -> OutputColumns:
        """Keep the answers of computed prompts back."""
        kept = [
            index
            for index, (key, code) in enumerate(zip(columns.key.tolist(), columns.finish.tolist(), strict=True))
            if code in _COMPUTED and key in self._live
        ]
        if not kept:
            return columns
        for index in kept:
            sending = self._live[int(columns.key[index])]
            sending.answer = select_rows(columns, np.arange(len(columns)) == index)
            sending.first = first_token(columns, index, sending.ids)
        remaining = np.ones(len(columns), dtype=np.bool_)
        remaining[kept] = False
        rest = select_rows(columns, remaining)
        # Chunks of other prompts have records without a row.
        taken = set(columns.key[kept].tolist())
        rest.logprobs = [record for record in columns.logprobs if record.key not in taken]
        rest.timelines = {key: record for key, record in columns.timelines.items() if key not in taken}
        return rest

    def take_outputs(self) -> list[OutputColumns]:
        """See ``Role.take_outputs``."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def stats(self) -> SessionStats:
        """See ``Role.stats``."""
        return self._sessions.stats()

    def fileno(self) -> int:
        """See ``Role.fileno``."""
        return self._sessions.fileno()

    def close(self, grace_s: float) -> None:
        """See ``Role.close``."""
        self._sessions.close(grace_s)

    def _is_computed(self, key: int) -> bool:
        sending = self._live.get(key)
        return sending is not None and sending.answer is not None

    def _delivered(self, key: int) -> None:
        sending = self._live.pop(key, None)
        self._scheduler.release_hold(key)
        if sending is not None and sending.answer is not None:
            self._outputs.append(sending.answer)

    def _failed(self, event: KVFailed, now: float) -> None:
        sending = self._live.pop(event.key, None)
        if sending is not None and sending.answer is not None:
            self._outputs.append(end_row(event.key, code_of(event.status), event.message))
        elif sending is not None:
            self._scheduler.fail_request(event.key, code_of(event.status), event.message, now)
        if event.quiesced:
            self._scheduler.release_hold(event.key)
