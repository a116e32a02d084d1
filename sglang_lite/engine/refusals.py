"""Requests that are refused: by the engine, which is an error of the call, or by a front.

When it is half of a pair that a front refuses, the other half, on another server, waits for it and must be told.
"""

from __future__ import annotations

import numpy as np

from sglang_lite.engine.batching import Submission, build_columns
from sglang_lite.engine.limits import PreparedPrompt
from sglang_lite.frontend.request import GenerateRequest, GenerationOutput
from sglang_lite.types import RequestColumns, RequestError, RequestFlags

REFUSING_STATUSES = (400, 429)
"""An engine that ends a request with one of these before any output has refused it."""


def refusal(key: int, request: GenerateRequest) -> RequestColumns:
    """What tells the core of a request that it does not get: its pair, and some token in the place of a prompt.

    The core refuses that, and its role tells the other server so. Nobody reads the row of ``key``.
    """
    bare = GenerateRequest(request_id=request.request_id, input_ids=[0], transfer=request.transfer)
    columns = build_columns([Submission(key, bare, PreparedPrompt(np.zeros(1, np.int32), 1))])
    columns.flags = columns.flags | np.uint32(RequestFlags.REFUSED)
    return columns


def raise_if_refused(output: GenerationOutput) -> None:
    """A request that the engine refused never ran: that is an error of the call, not a result."""
    reason = output.finish_reason
    if reason is None or reason.type != "abort" or reason.status_code not in REFUSING_STATUSES:
        return
    if len(output.output_ids) > output.resumed_tokens:
        return
    raise RequestError(reason.message or "the request was refused", status=reason.status_code)
