"""What a prefill worker keeps about one session and about each decode rank that waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_lite.disaggregation.base import FirstToken
from sglang_lite.disaggregation.frames import AuxRecord, Register, Request
from sglang_lite.disaggregation.links import Link
from sglang_lite.disaggregation.pool_memory import PageShare
from sglang_lite.disaggregation.states import State
from sglang_lite.transfer.base import Outcome, Peer, RemoteRegion, Transfer
from sglang_lite.types import Int32Array, TransferParams


@dataclass(slots=True)
class DecodePeer:
    """A decode rank that has registered; ``share`` is what it has of a page."""

    told: Register
    link: Link
    peer: Peer
    region: RemoteRegion
    share: PageShare


@dataclass(slots=True)
class Destination:
    """One decode rank of one session.

    Attributes:
        transfers: submitted ones.
        num_pages, num_bytes: of them.
        checksums: by number of the first page, of the part that this rank has.
        is_confirmed: it has everything.
        wants_drained: it waits for the word that nothing is written any more.
    """

    request: Request
    decode: DecodePeer
    transfers: list[Transfer] = field(default_factory=list)
    num_pages: int = 0
    num_bytes: int = 0
    checksums: dict[int, list[int]] = field(default_factory=dict)
    is_confirmed: bool = False
    wants_drained: bool = False

    @property
    def name(self) -> tuple[str, int, int]:
        """How messages refer to it."""
        return self.request.instance, self.request.room, self.request.generation

    @property
    def is_quiesced(self) -> bool:
        """None of its transfers touches memory any more."""
        return all(transfer.quiesced for transfer in self.transfers)

    def record(self, first: FirstToken) -> AuxRecord:
        """What goes behind the pages."""
        sums = [value for page in sorted(self.checksums) for value in self.checksums[page]]
        return AuxRecord(first, self.num_pages, self.num_bytes, sums)


@dataclass(slots=True)
class PrefillSession:
    """One request on the prefill side.

    Attributes:
        waiting: (first page, pages) that were computed before all destinations were known.
        last: the record, once the prompt is computed.
        next_page: that a following ``send`` starts with.
        deadline: of the present state, time of the loop.
        aux_sent: when the record was sent last; 0 before.
        hashing: checksums that are being computed.
        spans: descriptor checksums of what was submitted.
        started: when its first pages were submitted, 0 before.
        over_since: when it ended without success.
        is_released: the core uses its pages again, though they may still be read.
        why_late: what it fails with when its deadline passes, where that is known.
    """

    key: int
    rid: str
    params: TransferParams
    num_tokens: int
    opened: float
    deadline: float
    state: State = State.BOOTSTRAPPING
    destinations: list[Destination] = field(default_factory=list)
    required: int = 1
    waiting: list[tuple[int, Int32Array]] = field(default_factory=list)
    last: FirstToken | None = None
    next_page: int = 0
    aux_sent: float = 0.0
    started: float = 0.0
    hashing: int = 0
    spans: list[str] = field(default_factory=list)
    over_since: float = 0.0
    is_released: bool = False
    why_late: str = ""

    @property
    def is_ready(self) -> bool:
        """All decode ranks are known."""
        return len(self.destinations) >= self.required

    @property
    def is_quiesced(self) -> bool:
        """Nobody reads its pages any more."""
        return not self.hashing and all(destination.is_quiesced for destination in self.destinations)

    @property
    def peers(self) -> str:
        """For people."""
        return ", ".join(destination.decode.link.address for destination in self.destinations) or "no decode server yet"

    def first_failed(self) -> Transfer | None:
        """A transfer that failed."""
        for destination in self.destinations:
            for transfer in destination.transfers:
                if transfer.poll() is Outcome.FAILED:
                    return transfer
        return None

    @property
    def is_delivered(self) -> bool:
        """All pages are there, and no more will come."""
        if self.last is None or self.waiting or self.hashing or not self.is_ready:
            return False
        transfers = (transfer for destination in self.destinations for transfer in destination.transfers)
        return all(transfer.poll() is Outcome.DONE and transfer.quiesced for transfer in transfers)
