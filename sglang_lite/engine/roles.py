"""What the core loop asks of the role of its server under prefill/decode disaggregation."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from sglang_lite.disaggregation.base import FirstToken, SessionStats
from sglang_lite.types import FinishCode, LogprobRecord, OutputColumns, RequestColumns

_CODES = {400: FinishCode.TOO_LONG, 503: FinishCode.WAITING_TIMEOUT}
"""Ends whose HTTP status is that one; every other failure is an ``ERROR``, 500."""


class Role(Protocol):
    """Called by the thread of the core loop only. Nothing here waits."""

    def admitting(self, columns: RequestColumns) -> None:
        """Requests are about to be admitted; what this role changes of them is changed here."""

    def admitted(self, columns: RequestColumns) -> None:
        """They were: open sessions for those that the scheduler holds."""

    def abort(self, keys: list[int] | None) -> int:
        """Give up requests that the scheduler has finished with and this role has not; None for all of them."""

    def turn(self, now: float) -> None:
        """Take what happened and pass on what the scheduler did."""

    def outgoing(self, columns: OutputColumns) -> OutputColumns:
        """Rows that may leave now, of those that the scheduler reported."""

    def take_outputs(self) -> list[OutputColumns]:
        """Rows of this role itself."""

    def stats(self) -> SessionStats:
        """What the sessions did so far."""

    def fileno(self) -> int:
        """A descriptor that is readable while ``turn`` has something to take."""

    def close(self, grace_s: float) -> None:
        """End all sessions."""


def code_of(status: int) -> FinishCode:
    """The end of a request whose client shall see this HTTP status."""
    return _CODES.get(status, FinishCode.ERROR)


def end_row(key: int, code: FinishCode, message: str = "") -> OutputColumns:
    """The end of a request without a token."""
    return OutputColumns(
        key=np.array([key], dtype=np.int64),
        token=np.array([-1], dtype=np.int32),
        finish=np.array([code], dtype=np.uint8),
        matched=np.array([-1], dtype=np.int32),
        cached_tokens=np.zeros(1, dtype=np.int32),
        retractions=np.zeros(1, dtype=np.uint8),
        messages={key: message} if message else {},
    )


def first_token(columns: OutputColumns, index: int, ids: tuple[int, ...]) -> FirstToken:
    """What is handed over of a row.

    Args:
        ids: tokens whose log-probabilities were asked for as well.
    """
    key, code = int(columns.key[index]), int(columns.finish[index])
    record = next((record for record in columns.logprobs if record.key == key and not record.prompt), None)
    return FirstToken(
        token=int(columns.token[index]),
        cached_tokens=int(columns.cached_tokens[index]),
        finish_code=code if code == FinishCode.STOP_TOKEN else 0,
        matched=int(columns.matched[index]),
        logprob=None if record is None else float(record.logprobs[0]),
        top_logprobs=() if record is None else _pairs(record.top_logprobs[0], record.top_ids[0].tolist()),
        token_ids_logprobs=() if record is None else _pairs(record.extra_logprobs[0], list(ids)),
    )


def logprob_record(key: int, first: FirstToken) -> list[LogprobRecord]:
    """The log-probabilities that were handed over, as a record; none where none were asked for."""
    if first.logprob is None:
        return []
    return [
        LogprobRecord(
            key=key,
            prompt=False,
            token_ids=np.array([first.token], dtype=np.int32),
            logprobs=np.array([first.logprob], dtype=np.float32),
            top_ids=np.array([[token for _, token in first.top_logprobs]], dtype=np.int32),
            top_logprobs=np.array([[value for value, _ in first.top_logprobs]], dtype=np.float32),
            extra_logprobs=np.array([[value for value, _ in first.token_ids_logprobs]], dtype=np.float32),
            hidden=np.empty((1, 0), dtype=np.float32),
        )
    ]


def _pairs(values: np.typing.NDArray[np.float32], ids: list[int]) -> tuple[tuple[float, int], ...]:
    return tuple(zip(values.tolist(), ids, strict=False))
