"""Which replica takes a request, and the parts of a frame of requests that go to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sglang_lite.engine.info import LoadSnapshot
from sglang_lite.types import RequestColumns


class ReplicaLoads:
    """What the front knows of the replicas' loads: the last report of each and what was sent since.

    Args:
        count: how many replicas there are.
        first: the one that the first request in turn goes to; each front begins with another.

    Attributes:
        alive: replicas that can take requests, in order.
        requests: live requests of each that this front has sent, exactly.
    """

    def __init__(self, count: int, first: int = 0) -> None:
        self.alive = list(range(count))
        self.requests = [0] * count
        self._reported_tokens = [0] * count
        self._sent_tokens = [0] * count
        self._next = first

    def tokens(self, replica: int) -> int:
        """Tokens that a replica holds or has still to compute; the report in it is about a second old."""
        return self._reported_tokens[replica] + self._sent_tokens[replica]

    def report(self, replica: int, load: LoadSnapshot) -> None:
        """A replica told its load, and what was sent to it before is part of that."""
        self._reported_tokens[replica] = load.used_tokens + load.waiting_tokens
        self._sent_tokens[replica] = 0

    def sent(self, replica: int, num_tokens: int) -> None:
        """A request of that many prompt tokens was sent to a replica."""
        self.requests[replica] += 1
        self._sent_tokens[replica] += num_tokens

    def round_robin(self) -> int:
        """The replicas in turn."""
        self._next += 1
        return self.alive[(self._next - 1) % len(self.alive)]

    def fewest_requests(self) -> int:
        """The replica with the fewest live requests, the first of equals."""
        return min(self.alive, key=self.requests.__getitem__)

    def fewest_tokens(self) -> int:
        """The replica with the fewest tokens; of equals the one with fewest requests."""
        return min(self.alive, key=lambda replica: (self.tokens(replica), self.requests[replica]))


def chooser(method: str, loads: ReplicaLoads) -> Callable[[], int]:
    """How the next replica is chosen for a request that names none.

    Args:
        method: value of ``--load-balance-method``, resolved. ``follow_bootstrap_room`` concerns requests with a
            bootstrap room, which prefill servers get; one without goes round.
    """
    choices = {
        "round_robin": loads.round_robin,
        "follow_bootstrap_room": loads.round_robin,
        "total_requests": loads.fewest_requests,
        "total_tokens": loads.fewest_tokens,
    }
    return choices[method]


def select_requests(columns: RequestColumns, indices: Sequence[int]) -> RequestColumns:
    """Some requests of a frame, in that order, with their token ids and extras."""
    chosen = np.asarray(indices, dtype=np.int64)
    ends = np.cumsum(columns.num_tokens, dtype=np.int64)
    pieces: list[npt.NDArray[np.int32]] = [
        columns.token_ids[end - length : end]
        for end, length in zip(ends[chosen].tolist(), columns.num_tokens[chosen].tolist(), strict=True)
    ]
    return RequestColumns(
        key=columns.key[chosen],
        num_tokens=columns.num_tokens[chosen],
        max_new_tokens=columns.max_new_tokens[chosen],
        min_new_tokens=columns.min_new_tokens[chosen],
        temperature=columns.temperature[chosen],
        top_p=columns.top_p[chosen],
        top_k=columns.top_k[chosen],
        min_p=columns.min_p[chosen],
        frequency_penalty=columns.frequency_penalty[chosen],
        presence_penalty=columns.presence_penalty[chosen],
        repetition_penalty=columns.repetition_penalty[chosen],
        seed=columns.seed[chosen],
        priority=columns.priority[chosen],
        flags=columns.flags[chosen],
        logprob_start=columns.logprob_start[chosen],
        top_logprobs=columns.top_logprobs[chosen],
        timeout=columns.timeout[chosen],
        token_ids=np.concatenate(pieces) if pieces else columns.token_ids[:0],
        extras={new: columns.extras[old] for new, old in enumerate(indices) if old in columns.extras},
        embeds={new: columns.embeds[old] for new, old in enumerate(indices) if old in columns.embeds},
    )
