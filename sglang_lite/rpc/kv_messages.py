"""KV events as messages of ``smg.grpc.common``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from sglang_lite.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from sglang_lite.rpc.generated.smg.grpc.common import common_pb2 as common
from sglang_lite.rpc.kv_feed import Batch

_EVENTS_PER_BATCH = 1 << 20
_TIERS = {
    "GPU": common.KV_CACHE_TIER_DEVICE,
    "CPU_PINNED": common.KV_CACHE_TIER_HOST,
    "DISK": common.KV_CACHE_TIER_DISK,
    "EXTERNAL": common.KV_CACHE_TIER_EXTERNAL,
}
_decoder = msgspec.msgpack.Decoder(tuple[float, list[BlockStored | BlockRemoved | AllBlocksCleared], int])


def batch_message(batch: Batch) -> common.KvEventBatch:
    """A batch. One behind a hole begins with ``cleared``: its reader then knows too little rather than something
    wrong. Ids of events grow from batch to batch of a replica."""
    seconds, events, rank = _decoder.decode(batch.payload)
    if batch.after_hole:
        events = [AllBlocksCleared(), *events]
    message = common.KvEventBatch(sequence_number=batch.number, timestamp=seconds, dp_rank=rank)
    for index, event in enumerate(events):
        made = message.events.add()
        made.event_id = batch.number * _EVENTS_PER_BATCH + index
        match event:
            case BlockStored():
                _store(made.stored, event)
            case BlockRemoved():
                made.removed.block_hashes.extend(event.block_hashes)
                made.removed.tier = _tier(event.medium)
            case AllBlocksCleared():
                made.cleared.SetInParent()
    return message


def _tier(medium: Any) -> int:
    return _TIERS["GPU" if medium is msgspec.UNSET else medium]


def _store(stored: Any, event: BlockStored) -> None:
    size = event.block_size
    for index, value in enumerate(event.block_hashes):
        block = stored.blocks.add(block_hash=value, block_size=size)
        block.token_ids.extend(event.token_ids[index * size : (index + 1) * size])
        if event.lora_id is not None:
            block.lora_id = event.lora_id
    if event.parent_block_hash is not None:
        stored.parent_block_hash = event.parent_block_hash
    stored.tier = _tier(event.medium)
    if event.lora_name is not msgspec.UNSET:
        stored.lora_name = event.lora_name
    if event.cache_salt is not msgspec.UNSET:
        stored.cache_salt = event.cache_salt


def load_message(entry: Mapping[str, Any]) -> common.KvEventBatch:
    """An entry of ``/v1/loads``, without events."""
    load = common.EngineLoad(
        running_requests=entry["num_running_reqs"],
        waiting_requests=entry["num_waiting_reqs"],
        waiting_uncached_tokens=entry["num_waiting_uncached_tokens"],
        token_usage=entry["token_usage"],
        gen_throughput=entry["gen_throughput"],
        max_running_requests=entry["max_running_requests"],
        load_only=True,
        cache_hit_rate=entry["cache_hit_rate"],
        num_used_tokens=entry["num_used_tokens"],
        max_total_num_tokens=entry["max_total_num_tokens"],
    )
    return common.KvEventBatch(timestamp=entry["timestamp"], dp_rank=entry["dp_rank"], load=load)
