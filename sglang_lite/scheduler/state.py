"""What the parts of the scheduler share: the table, the queue, the batch, the plans in flight and the counters."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sglang_lite.scheduler.config import PauseMode, SchedulerConfig
from sglang_lite.scheduler.deadlines import Deadlines
from sglang_lite.scheduler.decode import DecodeBatch
from sglang_lite.scheduler.drafting import DraftingBatch
from sglang_lite.scheduler.fair_queue import FairQueue
from sglang_lite.scheduler.outputs import Outbox
from sglang_lite.scheduler.pages import RequestPages
from sglang_lite.scheduler.plan import StepPlan
from sglang_lite.scheduler.queue import WaitingQueue
from sglang_lite.scheduler.request import Request
from sglang_lite.scheduler.sampling import SampleSet
from sglang_lite.scheduler.sharing import PrefillsInProgress
from sglang_lite.scheduler.stats import Counters
from sglang_lite.scheduler.table import RequestTable
from sglang_lite.scheduler.transfers import Transfers
from sglang_lite.scheduler.waits import WaitClock
from sglang_lite.types import Int32Array, RequestTimeline


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt computed in one plan.

    Attributes:
        request: whose prompt; row: its row, because the request may have lost it by the commit.
        start, stop: positions computed.
        completes: nothing of the target is left after this chunk.
        samples: the chunk ends with the draw of a token.
    """

    request: Request
    row: int
    start: int
    stop: int
    completes: bool
    samples: bool

    @property
    def is_running(self) -> bool:
        """Whether the request still runs."""
        return self.request.running and self.request.row == self.row


@dataclass(frozen=True, slots=True)
class InFlight:
    """A plan without its result.

    Attributes:
        sample: the rows that sample; kv_lens: int32[S], their lengths, which is where their new token goes.
        chunks: the prefill chunks.
        scored: the request of each entry of ``plan.logprobs``.
    """

    plan: StepPlan
    sample: SampleSet
    kv_lens: Int32Array
    chunks: list[Chunk]
    scored: list[Request]


@dataclass(slots=True)
class SchedulerState:
    """The state of one scheduler.

    Attributes:
        in_progress: prompts of the running prefills whose pages are not published yet.
        requests: live requests by key.
        prefilling: running requests with prompt tokens still to plan, in the order of admission.
        in_flight: uncommitted plans, the oldest first.
        next_step: number of the next plan; next_order: arrival number of the last request.
        paused: mode of the pause, None while running.
        waits: what the queue waits for; timelines: key -> record to send with the next outputs.
        transfers: requests with a peer on another server.
        now: time of the call at hand, in seconds.
        stale_step: number of the newest plan that may still write pages which were given back after it was made.
        held_until: time until which an idle scheduler lets a batch gather, None when it does not.
    """

    config: SchedulerConfig
    table: RequestTable
    pages: RequestPages
    queue: WaitingQueue
    decode: DecodeBatch
    in_progress: PrefillsInProgress
    transfers: Transfers
    outbox: Outbox = field(default_factory=Outbox)
    counters: Counters = field(default_factory=Counters)
    deadlines: Deadlines = field(default_factory=Deadlines)
    requests: dict[int, Request] = field(default_factory=dict)
    prefilling: list[Request] = field(default_factory=list)
    in_flight: deque[InFlight] = field(default_factory=deque)
    next_step: int = 0
    next_order: int = 0
    paused: PauseMode | None = None
    held_until: float | None = None
    stale_step: int = -1
    waits: WaitClock = field(default_factory=WaitClock)
    timelines: dict[int, RequestTimeline] = field(default_factory=dict)
    now: float = 0.0

    @classmethod
    def create(cls, config: SchedulerConfig) -> SchedulerState:
        """An empty state for these limits."""
        table = RequestTable(config.max_running_requests, config.context_length, config.page_size)
        pages = RequestPages(config, table)
        decode = DecodeBatch(table, config.page_size)
        if config.draft_tokens:
            decode = DraftingBatch(table, pages, config)
        return cls(
            config=config,
            table=table,
            pages=pages,
            queue=FairQueue(config) if config.fair else WaitingQueue(config),
            decode=decode,
            in_progress=PrefillsInProgress(config.page_size, enabled=config.enable_radix_cache),
            transfers=Transfers(config.page_size),
        )

    @property
    def last_step(self) -> int | None:
        """Number of the newest uncommitted plan."""
        return self.in_flight[-1].plan.step if self.in_flight else None
