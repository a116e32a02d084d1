"""What rank 0's core tells the session workers of the other ranks, and what they answer: msgpack."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from sglang_lite.disaggregation.base import (
    Event,
    FirstToken,
    KVArrived,
    KVFailed,
    KVQuiesced,
    KVSent,
    PeerReady,
    PrefillLost,
    SessionStats,
)
from sglang_lite.types import Int32Array, TransferParams


class OpenPrefill(msgspec.Struct, frozen=True, array_like=True, tag="open prefill"):
    """See ``base.PrefillSessions.open``."""

    key: int
    rid: str
    params: TransferParams
    num_tokens: int


class OpenDecode(msgspec.Struct, frozen=True, array_like=True, tag="open decode"):
    """See ``base.DecodeSessions.open``."""

    key: int
    rid: str
    params: TransferParams
    pages: bytes
    num_tokens: int
    decode_prefix_len: int
    attempt: tuple[str, int]


class SendPages(msgspec.Struct, frozen=True, array_like=True, tag="send"):
    """See ``base.PrefillSessions.send``."""

    key: int
    first_page: int
    pages: bytes
    last: FirstToken | None


class AbortKey(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """See ``base.Sessions.abort``."""

    key: int


Command: TypeAlias = OpenPrefill | OpenDecode | SendPages | AbortKey


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    kind: int
    body: msgspec.Raw


_KINDS: tuple[type[Event] | type[SessionStats], ...] = (
    PeerReady,
    KVSent,
    KVArrived,
    KVFailed,
    KVQuiesced,
    PrefillLost,
    SessionStats,
)
_COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def encode_command(command: Command) -> bytes:
    """A command."""
    return msgspec.msgpack.encode(command)


def decode_command(data: bytes) -> Command:
    """What ``encode_command`` encoded. Raises msgspec.MsgspecError: the ranks do not run the same release."""
    return _COMMANDS.decode(data)


def encode_answer(answer: Event | SessionStats) -> bytes:
    """An event, or a snapshot."""
    body = msgspec.Raw(msgspec.msgpack.encode(answer))
    return msgspec.msgpack.encode(_Answer(_KINDS.index(type(answer)), body))


def decode_answer(data: bytes) -> Event | SessionStats:
    """What ``encode_answer`` encoded. Raises msgspec.MsgspecError: the ranks do not run the same release."""
    answer = msgspec.msgpack.decode(data, type=_Answer)
    return msgspec.msgpack.decode(answer.body, type=_KINDS[answer.kind])


def pack_pages(pages: Int32Array) -> bytes:
    """Little-endian."""
    return pages.astype("<i4").tobytes()


def unpack_pages(data: bytes) -> Int32Array:
    """What ``pack_pages`` packed."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32)
