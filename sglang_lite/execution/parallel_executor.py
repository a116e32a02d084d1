"""The executor of rank 0: it sends each plan to the other ranks and runs it with them.

The ranks compute one step together, so a rank that fails takes the step with it, and nobody knows how far the others
came: the replica ends, with a sentence that names the rank.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
import zmq

from sglang_lite.config import ServerConfig
from sglang_lite.execution.base import ExecutionError, RankLostError
from sglang_lite.execution.executor import TorchExecutor
from sglang_lite.execution.placement import Placement, placement_of, split_address
from sglang_lite.execution.plan_frames import PlanFrame, encode_plan, encode_stop
from sglang_lite.execution.rank_launch import END_SECONDS, RankLaunch, end_rank, fingerprint, open_store, start_rank
from sglang_lite.execution.rank_links import EXTRA, LeaderLink, RankWatch
from sglang_lite.execution.torch_group import TorchGroup, join_group, leave_group
from sglang_lite.layers.parallel import ParallelGroup
from sglang_lite.scheduler.plan import StepOutput, StepPlan
from sglang_lite.types import StartupError

if TYPE_CHECKING:
    from sglang_lite.execution.build import BuiltRunner

CHECK_SECONDS = 0.25
"""How often a wait for a step looks whether all ranks are still there."""

EXPLANATION_SECONDS = 2.0
"""How long a failed step waits for a lost rank to become known, which is the better explanation."""

_Result = TypeVar("_Result")


class RankLeader:
    """Rank 0's view of the others: starts those of this node, sends them plans, notices when one is lost.

    Attributes:
        failure: a sentence once a rank is lost.
    """

    def __init__(self, config: ServerConfig, placement: Placement) -> None:
        self._config = config
        self._placement = placement
        self._directory = tempfile.mkdtemp(prefix="sglang-lite-ranks-")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._failed = threading.Event()
        self._listeners: list[Callable[[str], None]] = []
        self._lock = threading.Lock()
        self._closing = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._links: list[LeaderLink] = []
        self._watch: RankWatch | None = None
        self._listener: Callable[[int, bytes], None] = lambda rank, data: None
        self.failure: str | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        config, placement = self._config, self._placement
        self._store = open_store(config, self._directory, is_leader=True)
        self._store.set("fingerprint", fingerprint(config))
        for rank in range(1, placement.size):
            link = LeaderLink(self._context, rank, *(self._bind_address(what, rank) for what in ("plans", "reports")))
            self._links.append(link)
            self._store.set(f"plans/{rank}", link.endpoints[0])
            self._store.set(f"reports/{rank}", link.endpoints[1])
        for rank in placement.local_ranks:
            if rank:
                launch = RankLaunch(config=config.to_json(), rank=rank, directory=self._directory)
                self._processes[rank] = start_rank(launch)
        self._watch = RankWatch(self._links, self._processes, self._lose, self._hear)

    def _bind_address(self, what: str, rank: int) -> str:
        if self._placement.is_local(rank):
            return f"ipc://{self._directory}/{what}-{rank}"
        host, _ = split_address(self._config.dist_init_addr)
        return f"tcp://{host}:*"

    def join(self, device: torch.device) -> TorchGroup:
        """Connect to the other ranks for computing.

        Raises:
            StartupError: one of them failed or did not come.
        """
        return self.attempt(
            lambda: join_group(
                self._store,
                0,
                self._placement.size,
                device,
                expert_parts=self._config.ep_size,
                on_one_machine=self._placement.nodes == 1,
            )
        )

    def attempt(self, work: Callable[[], _Result]) -> _Result:
        """Do something that needs the other ranks, and give up as soon as one is lost: it might then never end.

        Raises:
            StartupError: a rank was lost, or ``work`` raised it.
        """
        results: list[_Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:  # raised again by the thread that waits
                errors.append(error)

        thread = threading.Thread(target=run, name="rank-start", daemon=True)
        thread.start()
        while thread.is_alive() and self.failure is None:
            thread.join(CHECK_SECONDS)
        if errors and not isinstance(errors[0], StartupError):
            self._failed.wait(EXPLANATION_SECONDS)
        if self.failure is not None:
            raise StartupError(self.failure)
        if errors:
            raise errors[0]
        return results[0]

    def watch(self, listener: Callable[[str], None]) -> None:
        """Call ``listener`` with a sentence, in a thread of its own, when a rank is lost (at once if one is)."""
        with self._lock:
            failure = self.failure
            if failure is None:
                self._listeners.append(listener)
        if failure is not None:
            listener(failure)

    def check(self) -> None:
        """Raises RankLostError when a rank is lost."""
        if self.failure is not None:
            raise RankLostError(self.failure)

    def explain(self, error: ExecutionError) -> RankLostError:
        """What to raise for a failed step: the lost rank behind it, if there is one."""
        self._failed.wait(EXPLANATION_SECONDS)
        return RankLostError(self.failure or f"{error}; the other ranks cannot go on without it")

    def send(self, frame: PlanFrame) -> None:
        """Send a plan to every other rank."""
        for link in self._links:
            link.send(frame)

    @property
    def num_ranks(self) -> int:
        """Of the replica."""
        return self._placement.size

    def send_command(self, command: bytes) -> None:
        """Send something to every other rank, in order with the plans; by the thread that submits them."""
        self.send([EXTRA, command])

    def listen(self, listener: Callable[[int, bytes], None]) -> None:
        """Call ``listener`` with (rank, data), in a thread of its own, for what ranks send beside their failures."""
        self._listener = listener

    def close(self) -> None:
        """End the other ranks and release everything."""
        self._closing = True
        lost = self.failure is not None
        if not lost and self._links:
            self.send(encode_stop())
        for process in self._processes.values():
            end_rank(process, grace=0.0 if lost else END_SECONDS)
        if self._watch is not None:
            self._watch.close()
        for link in self._links:
            link.close()
        if not lost:
            leave_group()
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _hear(self, rank: int, data: bytes) -> None:
        self._listener(rank, data)

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._closing:
                return
            self.failure = reason
            listeners = list(self._listeners)
        self._failed.set()
        # Now, because a listener may end this process at once; nobody connects any more.
        shutil.rmtree(self._directory, ignore_errors=True)
        for listener in listeners:
            listener(reason)


class ParallelExecutor:
    """See ``execution.base.Executor``.

    Args:
        inner: runs the plans of rank 0.
        leader: of the other ranks; closed with this executor.
    """

    def __init__(self, inner: TorchExecutor, leader: RankLeader) -> None:
        self._inner = inner
        self._leader = leader

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan on every rank."""
        self._leader.check()
        self._leader.send(encode_plan(plan))
        self._inner.submit(plan)

    def wait(self, timeout: float) -> bool:
        """Whether ``collect`` would return at once; waits up to ``timeout`` seconds for that.

        Raises:
            RankLostError: it never will.
        """
        if self._inner.wait(timeout):
            return True
        self._leader.check()
        return False

    def collect(self) -> StepOutput:
        """Block until the oldest submitted plan is done.

        Raises:
            RankLostError: a rank failed or is gone; the executor is of no use any more.
        """
        while not self.wait(CHECK_SECONDS):
            pass
        try:
            return self._inner.collect()
        except ExecutionError as error:
            raise self._leader.explain(error) from error

    @property
    def ranks(self) -> RankLeader:
        """The way to the other ranks."""
        return self._leader

    @property
    def in_flight(self) -> int:
        """Plans submitted and not yet collected."""
        return self._inner.in_flight

    def watch(self, listener: Callable[[str], None]) -> None:
        """Call ``listener`` with a sentence, in a thread of its own, when a rank is lost."""
        self._leader.watch(listener)

    def close(self) -> None:
        """Finish the plan that is running, then end the other ranks."""
        if self._leader.failure is None:
            self._inner.close()
        self._leader.close()


def start_ranks(
    config: ServerConfig,
    build: Callable[[ParallelGroup], BuiltRunner],
    make_executor: Callable[[BuiltRunner], TorchExecutor],
) -> tuple[ParallelExecutor, BuiltRunner]:
    """Start and join the other ranks of this replica, and build rank 0's part.

    Args:
        build: what rank 0 runs, in that group.
        make_executor: what runs it.

    Raises:
        StartupError: a rank failed.
    """
    placement = placement_of(config)
    device = rank_device(config, placement, 0)
    leader = RankLeader(config, placement)
    try:
        group = leader.join(device)
        built = leader.attempt(lambda: build(group))
    except BaseException:
        leader.close()
        raise
    return ParallelExecutor(make_executor(built), leader), built


def rank_device(config: ServerConfig, placement: Placement, rank: int) -> torch.device:
    """The device of a rank, made the current one of this process.

    Raises:
        StartupError: it cannot be initialised.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    ordinal = placement.device_of(rank)
    try:
        torch.cuda.set_device(ordinal)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise StartupError(
            f"CUDA initialisation failed: device ordinal {ordinal}, local rank {rank % placement.ranks_per_node}, "
            f"tp rank {rank}: {error}; see --base-gpu-id and --gpu-id-step"
        ) from error
    return torch.device("cuda", ordinal)
