"""A node without a front: the ranks of ``--node-rank`` 1 and up, which follow rank 0 on another machine."""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import subprocess
import tempfile
from types import FrameType

from sglang_lite.config import ServerConfig
from sglang_lite.execution.placement import placement_of
from sglang_lite.execution.rank_launch import RankLaunch, end_rank, start_rank
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)


def run_node(config: ServerConfig) -> int:
    """Run this node's ranks until rank 0 ends them, one of them fails, or a signal comes.

    Args:
        config: prepared by ``startup.prepare``.

    Returns:
        0 when rank 0 ended the replica or a signal came.

    Raises:
        StartupError: a rank failed or lost rank 0; its own words are in the log.
    """
    placement = placement_of(config)
    signals_reading, signals_writing = os.pipe()

    def take_signal(number: int, frame: FrameType | None) -> None:
        os.write(signals_writing, b"x")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, take_signal)
    directory = tempfile.mkdtemp(prefix="sglang-lite-ranks-")
    document = config.to_json()
    processes = {
        rank: start_rank(RankLaunch(config=document, rank=rank, directory=directory)) for rank in placement.local_ranks
    }
    ranks = f"ranks {placement.local_ranks.start} to {placement.local_ranks.stop - 1}"
    logger.info("node %d of %d runs %s of %s", placement.node, placement.nodes, ranks, config.dist_init_addr)
    try:
        ended = _first_end(processes, signals_reading)
    finally:
        for process in processes.values():
            end_rank(process, grace=0.0)
        shutil.rmtree(directory, ignore_errors=True)
    if ended is None or processes[ended].returncode == 0:
        return 0
    raise StartupError(
        f"tensor parallel rank {ended} on node {placement.node} ended with code {processes[ended].returncode}; "
        f"its log says why (75: rank 0 at {config.dist_init_addr} is gone)"
    )


def _first_end(processes: dict[int, subprocess.Popen[bytes]], signals: int) -> int | None:
    """Wait for a rank to end and return it; None when a signal came first."""
    descriptors = {os.pidfd_open(process.pid): rank for rank, process in processes.items()}
    try:
        ready, _, _ = select.select([signals, *descriptors], [], [])
        return None if signals in ready else descriptors[ready[0]]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
