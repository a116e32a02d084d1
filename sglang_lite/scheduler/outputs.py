"""Rows that leave the scheduler one by one (aborts, time-outs, rejections), collected into columns."""

from __future__ import annotations

import numpy as np

from sglang_lite.scheduler.request import Request
from sglang_lite.types import FinishCode, OutputColumns

NO_TOKEN = -1


class Outbox:
    """Ends of requests that wait to be sent."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int]] = []
        self._messages: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, request: Request, code: FinishCode, message: str = "") -> None:
        """Report that a request ended without a token."""
        self._rows.append((request.key, code, max(request.cached_tokens, 0), min(request.retractions, 255)))
        if message:
            self._messages[request.key] = message

    def add_rejected(self, key: int, code: FinishCode, message: str = "") -> None:
        """Report a request that was never taken."""
        self._rows.append((key, code, 0, 0))
        if message:
            self._messages[key] = message

    def drain(self) -> OutputColumns:
        """Everything collected since the last call, as columns."""
        rows, messages = self._rows, self._messages
        self._rows, self._messages = [], {}
        count = len(rows)
        return OutputColumns(
            key=np.array([row[0] for row in rows], dtype=np.int64),
            token=np.full(count, NO_TOKEN, dtype=np.int32),
            finish=np.array([row[1] for row in rows], dtype=np.uint8),
            matched=np.full(count, NO_TOKEN, dtype=np.int32),
            cached_tokens=np.array([row[2] for row in rows], dtype=np.int32),
            retractions=np.array([row[3] for row in rows], dtype=np.uint8),
            messages=messages,
        )


def concatenate_outputs(first: OutputColumns, second: OutputColumns) -> OutputColumns:
    """The rows of both, in order."""
    if not len(second):
        return first
    return OutputColumns(
        key=np.concatenate((first.key, second.key)),
        token=np.concatenate((first.token, second.token)),
        finish=np.concatenate((first.finish, second.finish)),
        matched=np.concatenate((first.matched, second.matched)),
        cached_tokens=np.concatenate((first.cached_tokens, second.cached_tokens)),
        retractions=np.concatenate((first.retractions, second.retractions)),
        logprobs=first.logprobs + second.logprobs,
        messages={**first.messages, **second.messages},
        timelines={**first.timelines, **second.timelines},
    )
