"""``--dp-aware``: every data-parallel rank of a server is a worker of its own, ``url@rank``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_lite.router.body import with_fields
from sglang_lite.router.call import Call
from sglang_lite.router.errors import RouterError
from sglang_lite.router.workers import Worker

_HEADER = "x-data-parallel-rank"
_RANKED = frozenset({"/generate", "/v1/chat/completions", "/v1/completions"})
"""Routes whose bodies may name a rank. For the others a server chooses by itself."""


def spread(call: Call, workers: Sequence[Worker]) -> list[Worker]:
    """The ranks of servers instead of the servers; only the rank that the caller asks for, if it does.

    Raises:
        RouterError: bad_request for a rank that nobody has.
    """
    if not any(worker.ranks for worker in workers) or call.request.path not in _RANKED:
        return list(workers)
    ranks = [rank for worker in workers for rank in worker.ranks or [worker]]
    asked = _asked(call)
    if asked is None:
        return ranks
    found = [worker for worker in ranks if worker.rank is not None and str(worker.rank) == str(asked)]
    if not found:
        known = sorted({worker.rank for worker in ranks if worker.rank is not None})
        raise RouterError(
            "bad_request",
            f"No worker has the data-parallel rank {str(asked)[:40]!r}; there are {', '.join(map(str, known[:64]))}.",
        )
    return found


def with_rank(call: Call, worker: Worker, body: bytes) -> bytes:
    """``body`` with the rank that was chosen; one that the caller asked for is there already."""
    if worker.rank is None or _asked(call) is not None:
        return body
    return with_fields(body, call.head, {"data_parallel_rank": worker.rank})


def _asked(call: Call) -> Any:
    """The rank in the request, of whatever type, None for none. A server lets the header win, too."""
    header = call.request.headers.get(_HEADER)
    if header is not None:
        return header.strip()
    head = call.head
    return head.routed_dp_rank if head.routed_dp_rank is not None else head.data_parallel_rank
