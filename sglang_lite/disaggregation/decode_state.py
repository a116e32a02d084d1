"""What a decode worker keeps about one session."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from sglang_lite.disaggregation.links import Link
from sglang_lite.disaggregation.states import State
from sglang_lite.transfer.base import Fence
from sglang_lite.types import Int32Array, TransferParams


@dataclass(slots=True)
class DecodeSession:
    """One request on the decode side.

    Attributes:
        generation: of this attempt; new for every session of this process.
        link: to the prefill rank, once it is found; from then on it may write into the pages.
        deadline: of the present state, time of the loop.
        request_sent: when the transfer request was sent last.
        over_since: when it ended without the word that nobody writes any more.
        fence: shuts the prefill rank out; None where that is not needed, or not possible.
        is_acknowledged: the prefill rank has answered to it.
    """

    key: int
    rid: str
    params: TransferParams
    pages: Int32Array
    num_tokens: int
    prefix_len: int
    generation: int
    opened: float
    deadline: float
    state: State = State.BOOTSTRAPPING
    link: Link | None = None
    request_sent: float = 0.0
    over_since: float = 0.0
    fence: Fence | None = None
    is_acknowledged: bool = False
    is_verifying: bool = False
    num_retries: int = 0
    why: str = ""
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def peer(self) -> str:
        """For people."""
        at = f" (rank at {self.link.address})" if self.link is not None else ""
        return f"prefill instance {self.params.host}:{self.params.port}{at}"
