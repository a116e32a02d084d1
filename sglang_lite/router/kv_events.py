"""What workers hold, as they publish it: the sources that are followed, and the look-up of a prompt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq
import zmq.asyncio

from sglang_lite.cache.namespace import EventFormat
from sglang_lite.router.kv_follow import Follower, Subscription
from sglang_lite.router.kv_index import CHUNK, BlockIndex, PromptHasher
from sglang_lite.router.kv_source import Source, sources_of
from sglang_lite.router.prompt import Prompt
from sglang_lite.router.workers import Worker

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 4
_Scheme = tuple[int, EventFormat]


@dataclass(frozen=True, slots=True)
class Holding:
    """What is known of a prompt.

    Attributes:
        blocks: length of the longest beginning that a worker holds.
        share: of the prompt's tokens.
        workers: those who hold it.
    """

    blocks: int = 0
    share: float = 0.0
    workers: tuple[Worker, ...] = ()


NOTHING = Holding()


@dataclass(slots=True, eq=False)
class _Followed:
    scheme: _Scheme
    followers: list[Follower]
    tasks: list[asyncio.Task[None]]
    bits: int


class KVEvents:
    """The workers that publish KV events.

    Args:
        capacity: blocks of all workers together that are remembered; so are the hashes of as many blocks of prompts.
        given: worker's address -> endpoints of its publisher, from the command line.
    """

    def __init__(self, capacity: int, given: Mapping[str, tuple[str, str | None]]) -> None:
        self.index = BlockIndex(capacity)
        self._given = given
        self._chunks = max(1, capacity // CHUNK)
        self._followed: dict[str, _Followed] = {}
        self._hashers: dict[_Scheme, PromptHasher] = {}
        self._context: zmq.asyncio.Context | None = None

    @property
    def is_active(self) -> bool:
        """Whether any worker is followed."""
        return bool(self._followed)

    def follow(self, worker: Worker, info: Mapping[str, Any]) -> None:
        """Follow a worker that has introduced itself, when it publishes anything; in the event loop."""
        self.forget(worker)
        found = sources_of(info, worker.host, self._given.get(worker.url))
        sources = [source for source in found if worker.rank in (None, source.rank)]
        if not sources:
            return
        if self._context is None:
            self._context = zmq.asyncio.Context()
        scheme = (sources[0].block_size, sources[0].form)
        followers = [Follower(self.index, self.index.open()) for _ in sources]
        bits = sum(1 << follower.slot for follower in followers)
        followed = self._followed[worker.name] = _Followed(scheme, followers, [], bits)
        for source, follower in zip(sources, followers, strict=True):
            subscription = Subscription(self._context, source, follower)
            followed.tasks.append(asyncio.create_task(_run(subscription, source)))
        logger.info("worker %s: following KV events of %s", worker.url, sources[0].endpoint)

    def forget(self, worker: Worker) -> None:
        """``worker`` is gone."""
        followed = self._followed.pop(worker.name, None)
        if followed is None:
            return
        for task in followed.tasks:
            task.cancel()
        for task, follower in zip(followed.tasks, followed.followers, strict=True):
            # Its end clears the slot once more, so that nobody else may have it before.
            task.add_done_callback(partial(_close, self.index, follower.slot))

    async def close(self) -> None:
        """Follow nobody any more."""
        tasks = [task for followed in self._followed.values() for task in followed.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._followed.clear()
        if self._context is not None:
            self._context.destroy(linger=0)

    def is_complete(self, worker: Worker) -> bool:
        """Whether all that a worker holds is known."""
        followed = self._followed.get(worker.name)
        return followed is not None and all(follower.complete for follower in followed.followers)

    def blocks(self, worker: Worker) -> int | None:
        """Blocks that a worker is known to hold; None for one that is not followed."""
        followed = self._followed.get(worker.name)
        if followed is None:
            return None
        return sum(self.index.blocks(follower.slot) for follower in followed.followers)

    def match(self, workers: Sequence[Worker], prompt: Prompt) -> Holding | None:
        """Who of ``workers`` holds most of a prompt; None when its tokens are not known, or nobody is followed."""
        if prompt.tokens is None:
            return None
        groups: dict[_Scheme, int] = {}
        for worker in workers:
            followed = self._followed.get(worker.name)
            if followed is not None:
                groups[followed.scheme] = groups.get(followed.scheme, 0) | followed.bits
        if not groups:
            return None
        best = NOTHING
        for scheme, bits in groups.items():
            blocks, holders = self.index.match(self._hasher(scheme).hashes(prompt.tokens, prompt.salt), bits)
            share = blocks * scheme[0] * _TOKEN_BYTES / max(len(prompt.tokens), 1)
            if share > best.share:
                best = Holding(blocks, share, tuple(one for one in workers if self._bits(one) & holders))
        return best

    def _bits(self, worker: Worker) -> int:
        followed = self._followed.get(worker.name)
        return 0 if followed is None else followed.bits

    def _hasher(self, scheme: _Scheme) -> PromptHasher:
        hasher = self._hashers.get(scheme)
        if hasher is None:
            hasher = self._hashers[scheme] = PromptHasher(*scheme, chunks=self._chunks)
        return hasher


def _close(index: BlockIndex, slot: int, task: asyncio.Task[None]) -> None:
    del task
    index.close(slot)


async def _run(subscription: Subscription, source: Source) -> None:
    try:
        await subscription.run()
    except zmq.ZMQError as error:
        logger.error("KV events of %s cannot be followed: %s", source.endpoint, error)
