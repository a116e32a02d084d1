"""How the engine core receives commands and sends events: over ZMQ from its own process, or within one."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import zmq

from sglang_lite.engine.frames import (
    Command,
    ControlEvent,
    FrameError,
    decode_command,
    encode_control,
    encode_output,
)
from sglang_lite.types import OutputColumns

logger = logging.getLogger(__name__)

FRONT_SHIFT = 48
"""A request key is ``front << FRONT_SHIFT | number``."""

MESSAGES_PER_RECEIVE = 1024
"""Bound on the frames taken in one go, so that a flood of requests cannot keep the core from stepping."""

LONGEST_POLL_SECONDS = 3600.0
"""A longer wait is taken in parts: the socket library counts milliseconds in 32 bits."""

HIGH_WATER_MARK = 1024
"""Frames a socket queues before its sender has to wait."""


class Transport(Protocol):
    """What the core loop needs from the outside."""

    def receive(self, timeout: float | None) -> list[Command]:
        """Everything that has arrived; waits up to ``timeout`` seconds (None: for ever) when nothing has."""

    def send_output(self, columns: OutputColumns) -> None:
        """Deliver the rows of a step to the fronts that own them."""

    def send(self, event: ControlEvent, front: int | None = None) -> None:
        """Deliver an event to one front, or to all of them."""


class ZmqTransport:
    """One PULL socket for commands and one PUSH socket for each front, in the core process."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], ingress: str, egress: Sequence[str]) -> None:
        """Bind ``ingress`` and connect to the ``egress`` endpoint of every front."""
        self._ingress = context.socket(zmq.PULL)
        self._ingress.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._ingress.bind(ingress)
        self._egress = [_connect(context, endpoint) for endpoint in egress]
        self._poller = zmq.Poller()
        self._poller.register(self._ingress, zmq.POLLIN)

    def receive(self, timeout: float | None) -> list[Command]:
        """See ``Transport.receive``. Malformed frames are logged and dropped."""
        if timeout is None or timeout > 0:
            # Rounded up: waking a little late is right, waking early would turn the rest of the wait into a spin.
            self._poller.poll(None if timeout is None else math.ceil(min(timeout, LONGEST_POLL_SECONDS) * 1000))
        commands: list[Command] = []
        for _ in range(MESSAGES_PER_RECEIVE):
            try:
                frame = self._ingress.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                commands.append(decode_command(frame))
            except FrameError as error:
                logger.warning("ignored a malformed frame: %s", error)
        return commands

    def watch(self, descriptor: int) -> None:
        """``receive`` also returns when this one becomes readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def send_output(self, columns: OutputColumns) -> None:
        """See ``Transport.send_output``. Waits while a front's queue is full: that is the back pressure."""
        if len(self._egress) == 1:
            self._egress[0].send_multipart(encode_output(columns))
            return
        owner = columns.key >> FRONT_SHIFT
        # A chunk of a prompt has scores, but no row.
        owners = {*owner.tolist(), *(record.key >> FRONT_SHIFT for record in columns.logprobs)}
        for front in sorted(owners):
            if 0 <= front < len(self._egress):
                part = select_rows(columns, owner == front)
                part.logprobs = [record for record in columns.logprobs if record.key >> FRONT_SHIFT == front]
                self._egress[front].send_multipart(encode_output(part))

    def send(self, event: ControlEvent, front: int | None = None) -> None:
        """See ``Transport.send``."""
        frame = encode_control(event)
        targets = self._egress if front is None else self._egress[front : front + 1]
        for socket in targets:
            socket.send_multipart(frame)

    def close(self, linger: float) -> None:
        """Close the sockets; unsent events have ``linger`` seconds to leave."""
        self._ingress.close(0)
        for socket in self._egress:
            socket.close(int(linger * 1000))


def select_rows(columns: OutputColumns, mask: np.typing.NDArray[np.bool_]) -> OutputColumns:
    """The rows of one front: those where ``mask`` (bool[N]) is set."""
    keys = set(columns.key[mask].tolist())
    return OutputColumns(
        key=columns.key[mask],
        token=columns.token[mask],
        finish=columns.finish[mask],
        matched=columns.matched[mask],
        cached_tokens=columns.cached_tokens[mask],
        retractions=columns.retractions[mask],
        logprobs=[record for record in columns.logprobs if record.key in keys],
        messages={key: text for key, text in columns.messages.items() if key in keys},
        timelines={key: record for key, record in columns.timelines.items() if key in keys},
    )


def _connect(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.connect(endpoint)
    return socket
