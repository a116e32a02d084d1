"""The JSON object of ``--kv-events-config``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import msgspec

_TCP = re.compile(r"tcp://(?P<host>.+):(?P<port>\d{1,5})")
_LARGEST_PORT = 65_535

MOST_BYTES = 1 << 16
"""Payload of one message; batches with more are sent as several."""

_Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
_Bytes = Annotated[int, msgspec.Meta(ge=4 * MOST_BYTES, le=1 << 40)]


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where and how KV events are published.

    Attributes:
        publisher: "null" publishes nothing.
        endpoint: of the PUB socket.
        bind: True binds, False connects, None binds wildcard and ipc endpoints and connects to others.
        replay_endpoint: of the ROUTER socket that repeats batches; None for no replay. Always bound.
        buffer_steps, buffer_bytes: messages kept for replay, and payload of them all.
        hwm, hwm_bytes: messages that wait for one slow subscriber; more are not sent to it. There are never more than
            could have ``hwm_bytes`` if each were as large as one may be.
        max_queue_size, max_queue_bytes: messages that wait for the publishing thread; more are dropped.
        topic: first frame of every message.
        format: whether extra key and salt are mixed into published hashes ("dynamo").
        dp_rank: of the replica; set by the server.
    """

    publisher: Literal["null", "zmq"] = "null"
    endpoint: str = "tcp://*:5557"
    bind: bool | None = None
    replay_endpoint: str | None = None
    buffer_steps: _Count = 10_000
    hwm: _Count = 100_000
    max_queue_size: _Count = 100_000
    topic: str = ""
    format: Literal["default", "dynamo"] = "default"
    buffer_bytes: _Bytes = 256 << 20
    hwm_bytes: _Bytes = 256 << 20
    max_queue_bytes: _Bytes = 256 << 20
    dp_rank: Annotated[int, msgspec.Meta(ge=0)] = 0

    @classmethod
    def parse(cls, value: Mapping[str, Any] | None) -> Self | None:
        """The checked configuration, None when nothing is to be published.

        Raises:
            ValueError: says which key is wrong and what is allowed.
        """
        if value is None:
            return None
        config = msgspec.convert(dict(value), cls)
        for endpoint in (config.endpoint, config.replay_endpoint):
            if endpoint is not None:
                _check(endpoint)
        return config if config.publisher != "null" else None

    @property
    def binds(self) -> bool:
        """Whether the PUB socket binds its endpoint."""
        if self.bind is not None:
            return self.bind
        return self.endpoint.startswith("ipc://") or "*" in self.endpoint or "::" in self.endpoint

    @property
    def subscriber_messages(self) -> int:
        """Messages that wait for one slow subscriber, within both limits."""
        return min(self.hwm, self.hwm_bytes // MOST_BYTES)

    def for_replica(self, rank: int) -> Self:
        """The configuration of a replica: TCP ports go up by its rank, ipc paths end in it."""
        replay = self.replay_endpoint
        return msgspec.structs.replace(
            self,
            endpoint=_moved(self.endpoint, rank),
            replay_endpoint=None if replay is None else _moved(replay, rank),
            dp_rank=rank,
        )

    def describe(self, page_size: int, dp_size: int) -> dict[str, Any]:
        """The field ``kv_events`` of ``/server_info``. An ipc endpoint has its path as host and no port."""
        host, port = _host_and_port(self.endpoint)
        shown = {
            "publisher": self.publisher,
            "endpoint_host": host,
            "endpoint_port_base": port,
            "topic": self.topic,
            "block_size": page_size,
            "dp_size": dp_size,
        }
        if self.replay_endpoint is not None:
            shown["replay_endpoint_port_base"] = _host_and_port(self.replay_endpoint)[1]
        return shown


def _check(endpoint: str) -> None:
    if endpoint.startswith("ipc://") and len(endpoint) > len("ipc://"):
        return
    match = _TCP.fullmatch(endpoint)
    if match is None or not 1 <= int(match["port"]) <= _LARGEST_PORT:
        raise ValueError(f"endpoint {endpoint!r}: allowed are tcp://HOST:PORT (HOST may be *) and ipc://PATH")


def _host_and_port(endpoint: str) -> tuple[str, int | None]:
    match = _TCP.fullmatch(endpoint)
    return (match["host"], int(match["port"])) if match else (endpoint.removeprefix("ipc://"), None)


def _moved(endpoint: str, rank: int) -> str:
    host, port = _host_and_port(endpoint)
    if port is None:
        return f"{endpoint}_dp{rank}" if rank else endpoint
    if port + rank > _LARGEST_PORT:
        raise ValueError(f"endpoint {endpoint!r}: port + replica {rank} is above {_LARGEST_PORT}")
    return f"tcp://{host}:{port + rank}"
