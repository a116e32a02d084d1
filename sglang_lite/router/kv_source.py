"""Where a worker publishes its KV events: from its ``/server_info``, or from ``--kv-events-endpoints``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_lite.cache.namespace import EventFormat
from sglang_lite.configuration.kv_events import KVEventsConfig
from sglang_lite.router.workers import normalize_url
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)

_ANY_HOST = ("*", "0.0.0.0", "::", "[::]")
_MOST_RANKS = 1024


@dataclass(frozen=True, slots=True)
class Source:
    """A publisher.

    Attributes:
        endpoint: of its PUB socket.
        replay: of the socket that repeats batches; None where there is none.
        topic: first frame of its messages.
        block_size: tokens of a block.
        form: how name spaces enter its hashes.
        rank: of the replica that publishes.
    """

    endpoint: str
    replay: str | None
    topic: str
    block_size: int
    form: EventFormat = "default"
    rank: int = 0


def sources_of(info: Mapping[str, Any], host: str, given: tuple[str, str | None] | None) -> list[Source]:
    """The publishers of a worker, one a replica; none when it publishes nothing, or nowhere that we can reach.

    Args:
        info: body of the worker's ``/server_info``.
        host: of the worker.
        given: endpoint and replay endpoint of the first replica from the command line; these win.
    """
    shown = info.get("kv_events")
    shown = shown if isinstance(shown, dict) else {}
    size = shown.get("block_size") or info.get("page_size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1 or not (shown or given):
        return []
    try:
        config = _config(info, shown, given)
        if given is None and not config.binds:
            logger.warning("a worker on %s publishes its KV events to %s, not to us", host, config.endpoint)
            return []
        count = min(int(shown.get("dp_size") or info.get("dp_size") or 1), _MOST_RANKS)
        replicas = [config.for_replica(rank) for rank in range(max(1, count))]
    except (TypeError, ValueError) as error:
        logger.warning("the KV events of a worker on %s cannot be followed: %s", host, error)
        return []
    return [
        Source(
            _reached(one.endpoint, host),
            None if one.replay_endpoint is None else _reached(one.replay_endpoint, host),
            one.topic,
            size,
            one.format,
            rank,
        )
        for rank, one in enumerate(replicas)
    ]


def parse_endpoints(texts: Sequence[str]) -> dict[str, tuple[str, str | None]]:
    """``WORKER_URL=ENDPOINT[,REPLAY_ENDPOINT]`` each -> worker's address: both endpoints.

    Raises:
        StartupError: not of that form.
    """
    found: dict[str, tuple[str, str | None]] = {}
    for text in texts:
        url, separator, endpoints = text.partition("=")
        endpoint, _, replay = endpoints.partition(",")
        try:
            KVEventsConfig.parse({"publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay or None})
        except ValueError as error:
            raise StartupError(f"--kv-events-endpoints {text!r}: {error}") from None
        if not separator:
            raise StartupError(f"--kv-events-endpoints {text!r}: must be WORKER_URL=ENDPOINT[,REPLAY_ENDPOINT]")
        try:
            found[normalize_url(url)] = (endpoint, replay or None)
        except ValueError as error:
            raise StartupError(f"--kv-events-endpoints {text!r}: {error}") from None
    return found


def _config(info: Mapping[str, Any], shown: Mapping[str, Any], given: tuple[str, str | None] | None) -> KVEventsConfig:
    """What the worker was started with; servers that do not show it describe it in ``kv_events``."""
    own = info.get("kv_events_config")
    config = KVEventsConfig.parse(own) if isinstance(own, dict) else None
    if config is None:
        host, port = shown.get("endpoint_host", "*"), shown.get("endpoint_port_base")
        replay = shown.get("replay_endpoint_port_base")
        config = KVEventsConfig(
            "zmq",
            f"ipc://{host}" if port is None else f"tcp://{host}:{port}",
            bind=True,
            replay_endpoint=None if replay is None else f"tcp://*:{replay}",
            topic=str(shown.get("topic") or ""),
        )
    if given is None:
        return config
    return KVEventsConfig("zmq", given[0], True, given[1], topic=config.topic, format=config.format)


def _reached(endpoint: str, host: str) -> str:
    """The endpoint as seen from here: a publisher that binds every address is on the worker's host."""
    name, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or name not in _ANY_HOST:
        return endpoint
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
