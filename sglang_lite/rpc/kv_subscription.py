"""``SubscribeKvEvents``: the KV events of all replicas in one stream of messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq.asyncio

from sglang_lite.configuration.kv_events import KVEventsConfig
from sglang_lite.rpc.generation import send
from sglang_lite.rpc.kv_feed import Batch, BatchQueue, ReplicaFeed, check_feed
from sglang_lite.rpc.kv_messages import batch_message
from sglang_lite.rpc.status import Call
from sglang_lite.server.context import Phase, ServerContext
from sglang_lite.types import RequestError

MAX_SUBSCRIBERS = 16
_LOOK_SECONDS = 0.25


class KvSubscriptions:
    """The subscriptions of one server."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._count = 0

    def config(self, start: int) -> KVEventsConfig:
        """What is published; raises RequestError where a subscription from ``start`` on cannot be served."""
        return check_feed(KVEventsConfig.parse(self._context.config.kv_events_config), start)

    async def serve(self, call: Call, start: int) -> None:
        """Send batches until the client or the server leaves.

        Raises:
            RequestError: refused; the subscriber is too slow; the server is going down.
        """
        async with self._following(self.config(start), start) as (queue, feeds):
            while self._context.phase is not Phase.DRAINING:
                batch = await _next(queue, feeds)
                if batch is not None:
                    await send(self._context, call, batch_message(batch))
        raise RequestError("the server is going down", status=503)

    @asynccontextmanager
    async def _following(
        self, config: KVEventsConfig, start: int
    ) -> AsyncIterator[tuple[BatchQueue, list[asyncio.Task[None]]]]:
        if self._count >= MAX_SUBSCRIBERS:
            raise RequestError(f"there are {MAX_SUBSCRIBERS} subscribers of KV events already", status=429)
        self._count += 1
        queue, sockets = BatchQueue(), zmq.asyncio.Context()
        replicas = [config.for_replica(rank) for rank in range(self._context.config.dp_size)]
        feeds = [asyncio.create_task(ReplicaFeed(sockets, replica, start, queue).run()) for replica in replicas]
        try:
            yield queue, feeds
        finally:
            self._count -= 1
            for feed in feeds:
                feed.cancel()
            await asyncio.gather(*feeds, return_exceptions=True)
            sockets.destroy(linger=0)


async def _next(queue: BatchQueue, feeds: list[asyncio.Task[None]]) -> Batch | None:
    """The next batch, None after a while without one. The error of a feed is raised."""
    for feed in feeds:
        if feed.done():
            feed.result()
    try:
        async with asyncio.timeout(_LOOK_SECONDS):
            return await queue.get()
    except TimeoutError:
        return None
