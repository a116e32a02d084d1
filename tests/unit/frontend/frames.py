"""Frames as the engine core would send them, from short descriptions."""

from __future__ import annotations

import numpy as np

from sglang_lite.types import FinishCode, LogprobRecord, OutputColumns

Row = tuple[int, int, FinishCode, int]


def frame(
    rows: list[Row],
    *,
    cached_tokens: int = 0,
    retractions: int = 0,
    logprobs: list[LogprobRecord] | None = None,
    messages: dict[int, str] | None = None,
) -> OutputColumns:
    """Rows of (key, token, finish code, matched token)."""
    count = len(rows)
    return OutputColumns(
        key=np.array([row[0] for row in rows], np.int64),
        token=np.array([row[1] for row in rows], np.int32),
        finish=np.array([int(row[2]) for row in rows], np.uint8),
        matched=np.array([row[3] for row in rows], np.int32),
        cached_tokens=np.full(count, cached_tokens, np.int32),
        retractions=np.full(count, retractions, np.uint8),
        logprobs=logprobs or [],
        messages=messages or {},
    )


def tokens(key: int, token_ids: list[int]) -> list[Row]:
    return [(key, token_id, FinishCode.RUNNING, -1) for token_id in token_ids]


def ending(key: int, code: FinishCode, token_id: int = -1, matched: int = -1) -> Row:
    return (key, token_id, code, matched)


def scores(key: int, token_ids: list[int], *, prompt: bool = False, top: int = 2, extra: int = 0) -> LogprobRecord:
    """Log-probability -(position + 1) / 10 for each token, NaN for the first one of a prompt."""
    ids = np.array(token_ids, np.int32)
    values = -(np.arange(len(token_ids)) + 1) / 10
    if prompt:
        values[0] = np.nan
    return LogprobRecord(
        key=key,
        prompt=prompt,
        token_ids=ids,
        logprobs=values.astype(np.float32),
        top_ids=(ids[:, None] + np.arange(top)).astype(np.int32),
        top_logprobs=(values[:, None] - np.arange(top)).astype(np.float32),
        extra_logprobs=(values[:, None] - np.arange(extra)).astype(np.float32),
        hidden=np.empty((len(token_ids), 0), np.float32),
    )
