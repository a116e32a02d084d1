"""KV events: what entered and left the prefix cache, for routers that follow it.

The structs encode (msgpack or JSON, through msgspec) as maps with a ``type`` key, which is their form on the wire.
Collecting is bounded: when nobody drains the log, its content is replaced by one ``AllBlocksCleared``, after which
a reader knows less than the cache holds, but nothing wrong.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sglang_lite.cache.namespace import EventFormat, hash_scheme, split_namespace

Medium = Literal["GPU", "CPU_PINNED", "DISK", "EXTERNAL"]

MAX_HASHES_PER_EVENT = 4096
"""An event must fit into one message of the publisher."""


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=False):
    """One page became matchable.

    ``parent_block_hash`` is the hash of the page before it, None for the first page of a sequence.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    cache_salt: str | msgspec.UnsetType = msgspec.UNSET
    lora_name: str | msgspec.UnsetType = msgspec.UNSET
    medium: Medium | msgspec.UnsetType = msgspec.UNSET


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Pages of one tree node are no longer matchable."""

    block_hashes: list[int]
    medium: Medium | msgspec.UnsetType = msgspec.UNSET


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Nothing is matchable any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventLog:
    """A bounded list of events waiting for a publisher.

    Args:
        capacity: events kept at most, at least 2.
        form: how name spaces enter the hashes.
    """

    def __init__(self, capacity: int = 65_536, form: EventFormat = "default") -> None:
        if capacity < 2:
            raise ValueError(f"capacity is {capacity}; a KV event log keeps at least 2 events")
        self.capacity = capacity
        self.form: EventFormat = form
        self.num_dropped = 0
        self._events: list[KVEvent] = []

    def __len__(self) -> int:
        return len(self._events)

    def drain(self) -> list[KVEvent]:
        """Take all waiting events, oldest first."""
        events, self._events = self._events, []
        return events

    def stored(self, tokens: list[int], digests: list[bytes], parent: bytes, page_size: int, namespace: str) -> None:
        """Record that consecutive pages became matchable.

        Args:
            tokens: their token ids, ``page_size`` per digest.
            digests: one per page.
            parent: digest of the page before the first one; empty at the start of a sequence.
            page_size: tokens per page.
            namespace: of the sequence, empty for none.
        """
        publish = hash_scheme(namespace, self.form).publish
        parts = split_namespace(namespace)
        previous = publish(parent) if parent else None
        for index, digest in enumerate(digests):
            value = publish(digest)
            event = BlockStored(
                block_hashes=[value],
                parent_block_hash=previous,
                token_ids=tokens[index * page_size : (index + 1) * page_size],
                block_size=page_size,
                lora_id=None,
                cache_salt=parts.salt or msgspec.UNSET,
                lora_name=parts.adapter or msgspec.UNSET,
            )
            self._append(event)
            previous = value

    def removed(self, digests: list[bytes], namespace: str = "") -> None:
        """Record that pages of a name space, named by their digests, are gone."""
        publish = hash_scheme(namespace, self.form).publish
        for start in range(0, len(digests), MAX_HASHES_PER_EVENT):
            hashes = [publish(digest) for digest in digests[start : start + MAX_HASHES_PER_EVENT]]
            self._append(BlockRemoved(block_hashes=hashes))

    def cleared(self) -> None:
        """Record that the cache is empty; what was waiting is superseded."""
        self._events = [AllBlocksCleared()]

    def _append(self, event: KVEvent) -> None:
        if len(self._events) >= self.capacity:
            self.num_dropped += len(self._events)
            self.cleared()
        self._events.append(event)
