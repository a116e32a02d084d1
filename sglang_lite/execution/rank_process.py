"""A rank that follows rank 0: ``python -m sglang_lite.execution.rank_process``, started by ``rank_launch.start_rank``.

It builds its share of the model, then runs the plans that rank 0 sends, in order, for as long as rank 0 and its own
parent live.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import shutil
import signal
import sys
import threading

import msgspec
import torch
import zmq
from torch._C._distributed_c10d import Store

from sglang_lite.config import ServerConfig
from sglang_lite.disaggregation.build import open_worker
from sglang_lite.disaggregation.ranked_sessions import FollowingSessions
from sglang_lite.execution.build import build_runner
from sglang_lite.execution.executor import StepRunner
from sglang_lite.execution.parallel_executor import rank_device
from sglang_lite.execution.placement import placement_of
from sglang_lite.execution.plan_frames import PlanFrame, decode_plan
from sglang_lite.execution.rank_launch import RankLaunch, fingerprint, open_store
from sglang_lite.execution.rank_links import EXTRA, FollowerLink
from sglang_lite.execution.torch_group import join_group
from sglang_lite.execution.transfer_memory import transfer_memory
from sglang_lite.models.description import read_description
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)

SESSION_GRACE_SECONDS = 1.5
"""How long the transfers of a rank that ends may take to stop."""

EXIT_STARTUP_FAILURE = 1
EXIT_FAULT = 70
EXIT_ORPHANED = 75


def main() -> int:
    """Run a rank until it is told to stop. Returns the exit code of the process."""
    # A terminal or a service manager signals the whole group; the front drains first and then ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(levelname)s %(name)s: %(message)s")
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankLaunch)
    threading.Thread(target=_leave_with_parent, args=(launch.directory,), name="parent-watch", daemon=True).start()
    config = ServerConfig.from_json(launch.config)
    logging.getLogger().setLevel(config.log_level.upper())
    try:
        store = open_store(config, launch.directory, is_leader=False)
        plans, reports = (store.get(f"{what}/{launch.rank}").decode() for what in ("plans", "reports"))
    except (StartupError, RuntimeError) as error:
        logger.error("rank %d cannot reach rank 0: %s", launch.rank, error)
        return EXIT_STARTUP_FAILURE
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = FollowerLink(context, plans, reports, lambda: os._exit(EXIT_ORPHANED))
    try:
        if store.get("fingerprint").decode() != fingerprint(config):
            raise StartupError("its model or options are not those of rank 0; start all nodes with the same ones")
        _follow(config, launch, store, link)
    except StartupError as error:
        link.report(str(error))
        link.flush()
        return EXIT_STARTUP_FAILURE
    except Exception as error:  # whatever it is, the replica cannot go on, and rank 0 must learn why
        logger.exception("rank %d failed", launch.rank)
        link.report(f"{type(error).__name__}: {error}")
        link.flush()
        return EXIT_FAULT
    return 0


def _follow(config: ServerConfig, launch: RankLaunch, store: Store, link: FollowerLink) -> None:
    placement = placement_of(config)
    device = rank_device(config, placement, launch.rank)
    group = join_group(
        store,
        launch.rank,
        placement.size,
        device,
        expert_parts=config.ep_size,
        on_one_machine=placement.nodes == 1,
    )
    model_path = config.model_path or ""
    description = read_description(model_path, config.json_model_override_args)
    built = build_runner(config, description, model_path, parallel=group)
    torch.set_num_threads(built.num_threads)
    gc.collect()
    gc.freeze()
    sessions = None
    if config.is_disaggregated:
        worker = open_worker(
            config, transfer_memory(built.limits, description, launch.rank, config.tp_size), launch.rank
        )
        sessions = FollowingSessions(worker, link.report_extra)
    try:
        _run_frames(link, built.runner, sessions)
    finally:
        if sessions is not None:
            # Peers hear of it, and the pool is unregistered while its memory is still there.
            sessions.close(SESSION_GRACE_SECONDS)


def _run_frames(link: FollowerLink, runner: StepRunner, sessions: FollowingSessions | None) -> None:
    receive = link.receive if sessions is None else _PlanReader(link, sessions).receive
    while (plan := decode_plan(receive())) is not None:
        runner.run(plan)


class _PlanReader:
    """Reads the link in a thread, so that what concerns sessions does not wait for the plan that runs."""

    def __init__(self, link: FollowerLink, sessions: FollowingSessions) -> None:
        self._link, self._sessions = link, sessions
        self._plans: queue.SimpleQueue[PlanFrame | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="rank-frames", daemon=True).start()

    def receive(self) -> PlanFrame:
        """The next plan. Raises what reading the others raised."""
        frames = self._plans.get()
        if isinstance(frames, Exception):
            raise frames
        return frames

    def _read(self) -> None:
        try:
            while True:
                frames = self._link.receive()
                if frames[0] == EXTRA:
                    self._sessions.run(frames[1])
                else:
                    self._plans.put(frames)
        except Exception as error:  # raised again by the thread that runs plans, which reports it
            self._plans.put(error)


def _leave_with_parent(directory: str) -> None:
    """Wait for the end of standard input, then end this process whatever it is doing."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(EXIT_ORPHANED)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # Not sys.exit: threads of the collective library and the watching ones are of no interest any more, and waiting for
    # them may take for ever when the other ranks are gone.
    os._exit(code)
