"""KV events as they come: msgpack ``[time, events, rank]``, an event a map with ``type`` or an array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

MAX_HASHES = 65_536
"""Hashes of one event."""

_DEVICE = (None, "GPU")
_LARGEST = 2**63
_ARRAY_MARKS = frozenset({*range(0x90, 0xA0), 0xDC, 0xDD})


@dataclass(frozen=True, slots=True)
class Change:
    """What an event says of the blocks on the device."""

    kind: Literal["stored", "removed", "cleared"]
    hashes: list[int]


class WrongEventsError(ValueError):
    """A message that is no batch of KV events."""


class _Stored(msgspec.Struct, tag_field="type", tag="BlockStored"):
    block_hashes: list[int]
    medium: str | None = None


class _Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class _Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


class _StoredArray(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int]
    parent: int | None = None
    token_ids: msgspec.Raw = msgspec.Raw(b"")
    block_size: int = 0
    lora_id: Any = None
    medium: str | None = None


class _RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, array_like=True):
    time: float
    events: list[msgspec.Raw]


_batch = msgspec.msgpack.Decoder(_Batch)
_map = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)


def read_batch(payload: bytes) -> list[Change]:
    """The changes of a batch, oldest first. Blocks that are not on the device are left out.

    Raises:
        WrongEventsError: it is none, or an event is too large.
    """
    try:
        return [change for raw in _batch.decode(payload).events if (change := _read(bytes(raw))) is not None]
    except (msgspec.DecodeError, RecursionError) as error:
        raise WrongEventsError(str(error)) from None


def _read(raw: bytes) -> Change | None:
    event = (_array if raw[0] in _ARRAY_MARKS else _map).decode(raw)
    if isinstance(event, _Cleared | _ClearedArray):
        return Change("cleared", [])
    if len(event.block_hashes) > MAX_HASHES:
        raise WrongEventsError(f"an event has {len(event.block_hashes)} hashes; at most {MAX_HASHES} are allowed")
    if event.medium not in _DEVICE:
        return None
    # Some publishers write the 64 bits without a sign.
    hashes = [value - 2 * _LARGEST if value >= _LARGEST else value for value in event.block_hashes]
    return Change("stored" if isinstance(event, _Stored | _StoredArray) else "removed", hashes)
