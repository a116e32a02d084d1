"""A request of a pair that a front refuses: the other half of the pair, on another server, waits for it."""

from __future__ import annotations

import numpy as np

from sglang_lite.engine.batching import Submission, build_columns
from sglang_lite.engine.limits import PreparedPrompt
from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.types import RequestColumns, RequestFlags


def refusal(key: int, request: GenerateRequest) -> RequestColumns:
    """What tells the core of a request that it does not get: its pair, and some token in the place of a prompt.

    The core refuses that, and its role tells the other server so. Nobody reads the row of ``key``.
    """
    bare = GenerateRequest(request_id=request.request_id, input_ids=[0], transfer=request.transfer)
    columns = build_columns([Submission(key, bare, PreparedPrompt(np.zeros(1, np.int32), 1))])
    columns.flags = columns.flags | np.uint32(RequestFlags.REFUSED)
    return columns
