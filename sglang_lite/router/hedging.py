"""Whether and when a request is sent to a second worker: no I/O, and time is an argument.

A worker that is slow now is most often slow for reasons of its own, and another one answers sooner (Dean and Barroso,
"The Tail at Scale"). Waiting for the 95th percentile before that costs 5 % more requests, and the budget holds that
where everybody is slow, as gRPC's throttling of hedges does: each request earns a share of a hedge.
"""

from __future__ import annotations

from collections import deque

from sglang_lite.router.body import Head
from sglang_lite.router.option_groups import HedgeOptions
from sglang_lite.router.routes import PROXIED

HEDGED = frozenset(PROXIED) - {"/v1/responses"}
"""Routes whose requests may be at two workers. Responses are kept by the worker that made them."""

Kind = tuple[str, bool]
"""Route of a request, and whether it asks for a stream: what takes about as long as another one."""

_WINDOW = 1024
_ENOUGH = 100
_GRAIN = 32
_BURST = 10.0


def may_be_hedged(path: str, head: Head) -> bool:
    """Whether a second worker could answer as well, and the slower one forgets the request when its call ends.

    A session is at one worker, a room for KV pages takes one guest, and a request in the background runs on.
    """
    bound = (head.session_params, head.session_id, head.bootstrap_room)
    return path in HEDGED and not head.background and all(bytes(raw) in (b"", b"null") for raw in bound)


class _Times:
    """The last times of one kind, and a quantile of them that is computed again now and then."""

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._fresh = 0
        self.limit: float | None = None

    def add(self, seconds: float) -> None:
        self._times.append(seconds)
        self._fresh += 1
        if len(self._times) >= _ENOUGH and (self.limit is None or self._fresh >= _GRAIN):
            self.limit = sorted(self._times)[int(self._quantile * (len(self._times) - 1) + 0.5)]
            self._fresh = 0


class Hedging:
    """Delays and budget of one router process.

    Args:
        options: ``hedge_after_secs``, ``hedge_quantile`` or both are set.
    """

    def __init__(self, options: HedgeOptions) -> None:
        self._after = options.hedge_after_secs
        self._quantile = options.hedge_quantile
        self._share = options.hedge_max_percent / 100
        self._times: dict[Kind, _Times] = {}
        self._budget = 0.0

    def arrive(self) -> None:
        """A request that may be hedged is here."""
        self._budget = min(self._budget + self._share, max(_BURST, self._share))

    def delay(self, kind: Kind) -> float | None:
        """Seconds to wait for the first byte; None while too little was seen to say."""
        if self._quantile is None:
            return self._after
        seen = self._times.get(kind)
        if seen is None or seen.limit is None:
            return self._after
        return max(seen.limit, self._after or 0.0)

    def take(self) -> bool:
        """A hedge is to be sent; False when there were too many already."""
        if self._budget < 1 - 1e-9:  # a sum of shares
            return False
        self._budget -= 1
        return True

    def note(self, kind: Kind, seconds: float) -> None:
        """The first byte came, from whichever worker, ``seconds`` after the first one got the request.

        Where the other worker was faster, the first one would have taken longer still. Both times lie above the
        quantile, since only then there is another one, and so do not move it.
        """
        if self._quantile is not None:
            self._times.setdefault(kind, _Times(self._quantile)).add(seconds)
