"""What a decode worker keeps about one session, and about each prefill rank that it deals with."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from sglang_lite.disaggregation.frames import AuxRecord
from sglang_lite.disaggregation.links import Link
from sglang_lite.disaggregation.pool_memory import PageShare
from sglang_lite.disaggregation.states import State
from sglang_lite.transfer.base import Fence
from sglang_lite.types import Int32Array, TransferParams


@dataclass(slots=True)
class PrefillSource:
    """One prefill rank of one session. From its request on it may write into the pages.

    Attributes:
        rank: of the prefill server's ranks.
        sends: it writes into the pages; else it only has to know of the session.
        share: what it has of a page.
        num_decode_ranks: whose requests it waits for.
        request_sent: when the request, or the abort, was sent last.
        is_acknowledged: it has answered to the request.
        record: what it said when its part was there.
        is_settled: its part is here, checked.
        is_drained: it writes no more.
        fence: shuts it out; None where that is not needed, or not possible.
    """

    rank: int
    link: Link
    sends: bool
    share: PageShare | None
    num_decode_ranks: int = 1
    request_sent: float = 0.0
    is_acknowledged: bool = False
    record: AuxRecord | None = None
    is_settled: bool = False
    is_drained: bool = False
    fence: Fence | None = None


@dataclass(slots=True)
class DecodeSession:
    """One request on the decode side.

    Attributes:
        group, generation: of this attempt, the same on all ranks of this server; see ``frames.Request``.
        sources: the prefill ranks, once they are found.
        deadline: of the present state, time of the loop.
        over_since: when it ended without the word that nobody writes any more.
        task: what must not outlive it: the search for the prefill ranks.
    """

    key: int
    rid: str
    params: TransferParams
    pages: Int32Array
    num_tokens: int
    prefix_len: int
    group: str
    generation: int
    opened: float
    deadline: float
    state: State = State.BOOTSTRAPPING
    sources: list[PrefillSource] = field(default_factory=list)
    over_since: float = 0.0
    num_retries: int = 0
    why: str = ""
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def peer(self) -> str:
        """For people."""
        ranks = ", ".join(source.link.address for source in self.sources)
        at = f" (rank at {ranks})" if ranks else ""
        return f"prefill instance {self.params.host}:{self.params.port}{at}"

    @property
    def is_drained(self) -> bool:
        """No rank writes any more."""
        return all(source.is_drained for source in self.sources)

    def source(self, rank: int) -> PrefillSource | None:
        """The prefill rank of that number, if the session deals with it."""
        return next((source for source in self.sources if source.rank == rank), None)

    def uses(self, link: Link) -> bool:
        """Whether one of its ranks is at that link."""
        return any(source.link is link for source in self.sources)
