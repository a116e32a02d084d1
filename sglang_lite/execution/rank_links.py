"""The sockets between rank 0 and the ranks that follow it, and how each notices that the other is gone.

Two sockets for each follower: plans go one way, reports the other. Rank 0 sends plans from the thread that submits
them and watches reports and processes in another; a socket is never shared between threads. Connections carry
heartbeats, so that a machine that vanished counts as disconnected.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from sglang_lite.execution.plan_frames import PlanFrame

logger = logging.getLogger(__name__)

Context = zmq.Context[zmq.Socket[bytes]]

EXTRA = b"extra"
"""First of two frames that are neither a plan nor the reason why a rank ends: the other one is for whoever listens."""

_HEARTBEAT_MS = 2_000
_SILENCE_MS = 10_000
"""A connection without an answer to heartbeats for this long is gone."""

_LAST_FRAME_SECONDS = 2.0
"""How long a follower whose connection ended may take to find the frame that told it to stop."""

_EXIT_CODE_SECONDS = 1.0
"""How long a lost process may take to have an exit code that says why."""


class LeaderLink:
    """Rank 0's sockets to one follower; binds both.

    Args:
        plans, reports: endpoints to bind ("ipc://..." or "tcp://host:*").
    """

    def __init__(self, context: Context, rank: int, plans: str, reports: str) -> None:
        self.rank = rank
        self._plans = _socket(context, zmq.PUSH)
        self._plans.setsockopt(zmq.SNDHWM, 0)  # what waits is bounded by the requests that the core admits
        self._plans.bind(plans)
        self.reports = _socket(context, zmq.PULL)
        self.monitor = self.reports.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.reports.bind(reports)
        self.endpoints = tuple(_bound(socket) for socket in (self._plans, self.reports))

    def send(self, frame: PlanFrame) -> None:
        """Send a plan, or what ``EXTRA`` begins; never waits."""
        self._plans.send_multipart(frame, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets of the submitting thread; what was sent has a moment to leave."""
        self._plans.close(1000)

    def close_watched(self) -> None:
        """Close the sockets of the watching thread."""
        self.reports.disable_monitor()
        self.monitor.close(0)
        self.reports.close(0)


class RankWatch:
    """A thread of rank 0 that notices the first follower that fails, ends or disconnects.

    Args:
        links: to all followers.
        processes: of the followers on this machine, by rank.
        on_loss: called once, in that thread, with a sentence.
        on_extra: called there with the rank and what it sent behind ``EXTRA``.
    """

    def __init__(
        self,
        links: list[LeaderLink],
        processes: dict[int, subprocess.Popen[bytes]],
        on_loss: Callable[[str], None],
        on_extra: Callable[[int, bytes], None],
    ) -> None:
        self._links = links
        self._processes = processes
        self._on_loss = on_loss
        self._on_extra = on_extra
        self._stop_reading, self._stop_writing = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        os.write(self._stop_writing, b"x")
        self._thread.join()
        os.close(self._stop_reading)
        os.close(self._stop_writing)

    def _watch(self) -> None:
        reason = self._wait_for_loss()
        if reason is not None:
            self._on_loss(reason)
        for link in self._links:
            link.close_watched()

    def _wait_for_loss(self) -> str | None:
        """A sentence on what was lost, or None when told to stop."""
        poller = zmq.Poller()
        poller.register(self._stop_reading, zmq.POLLIN)
        descriptors = {os.pidfd_open(process.pid): rank for rank, process in self._processes.items()}
        try:
            for source in (*descriptors, *(link.reports for link in self._links), *(x.monitor for x in self._links)):
                poller.register(source, zmq.POLLIN)
            while True:
                ready = dict(poller.poll())
                if self._stop_reading in ready:
                    return None
                # A follower's own words say more than its end, which follows them.
                for link in self._links:
                    if link.reports in ready and (reason := self._read(link)) is not None:
                        return f"tensor parallel rank {link.rank} failed: {reason}"
                for link in self._links:
                    if link.monitor in ready:
                        recv_monitor_message(link.monitor)
                        return self._describe_end(link)
                for descriptor in descriptors:
                    if descriptor in ready:
                        return self._describe_end(next(x for x in self._links if x.rank == descriptors[descriptor]))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _read(self, link: LeaderLink) -> str | None:
        """One report: why the rank ends, or None when it is an extra one."""
        frames = link.reports.recv_multipart()
        if len(frames) == 2 and frames[0] == EXTRA:
            self._on_extra(link.rank, frames[1])
            return None
        return frames[0].decode()

    def _describe_end(self, link: LeaderLink) -> str:
        name = f"tensor parallel rank {link.rank}"
        while link.reports.poll(0):
            if (reason := self._read(link)) is not None:
                return f"{name} failed: {reason}"
        process = self._processes.get(link.rank)
        if process is None:
            return f"{name} on another node is gone: its connection ended"
        try:
            code = process.wait(_EXIT_CODE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"{name} (process {process.pid}) closed its connection"
        if code < 0:
            return f"{name} (process {process.pid}) was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"{name} (process {process.pid}) exited with code {code}"


class FollowerLink:
    """A follower's sockets to rank 0.

    Args:
        plans, reports: rank 0's endpoints.
        on_loss: called in a thread of its own when rank 0 is gone, unless the follower has ended by then.
    """

    def __init__(self, context: Context, plans: str, reports: str, on_loss: Callable[[], None]) -> None:
        self._plans = _socket(context, zmq.PULL)
        self._monitor = self._plans.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._plans.connect(plans)
        # A context of its own, so that waiting for its last message does not wait for the other sockets.
        self._report_context: Context = zmq.Context()
        self._reports = _socket(self._report_context, zmq.PUSH)
        self._reports.setsockopt(zmq.SNDHWM, 0)
        self._lock = threading.Lock()
        self._flushed = False
        self._reports.connect(reports)
        self._on_loss = on_loss
        threading.Thread(target=self._watch, name="leader-watch", daemon=True).start()

    def receive(self) -> PlanFrame:
        """The next plan, or extra frames, in the order of submission."""
        return self._plans.recv_multipart()

    def report(self, message: str) -> None:
        """Tell rank 0 why this rank ends."""
        with self._lock:
            self._reports.send(message.encode())

    def report_extra(self, data: bytes) -> None:
        """Send something to whoever listens on rank 0. Any thread may call it."""
        with self._lock:
            if not self._flushed:
                self._reports.send_multipart([EXTRA, data])

    def flush(self) -> None:
        """Wait a moment until the reports have left; none can be sent afterwards."""
        with self._lock:
            self._flushed = True
            self._reports.close(2000)
        self._report_context.term()

    def _watch(self) -> None:
        self._monitor.poll()
        # Rank 0 closes the connection behind its last frame, which may still be in the queue or on its way to it.
        threading.Event().wait(_LAST_FRAME_SECONDS)
        self._on_loss()


def _socket(context: Context, kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    return socket


def _bound(socket: zmq.Socket[bytes]) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    return endpoint.decode() if isinstance(endpoint, bytes) else str(endpoint)
