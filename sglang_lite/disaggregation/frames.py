"""Messages between the workers of two servers: multipart frames, numbers as decimal text.

Registration and transfer requests have the fields of SGLang 0.5.23 in its order; what only this implementation needs
(the transport's description, generations, instances) stands behind them. A generation is one attempt of a decode
server to get a prompt's KV: answers that name an older one mean nobody.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec
import numpy as np

from sglang_lite.disaggregation.base import MAX_ROOM, FirstToken
from sglang_lite.disaggregation.states import State
from sglang_lite.types import Int32Array

REGISTER, ABORT, ABORT_ACK = b"None", b"ABORT", b"ABORT_ACK"
AUX, AUX_ACK, ALIVE = b"AUX_DATA", b"AUX_ACK", b"ALIVE"
IGNORED = (b"WATERMARK", b"STAGING_RSP")

UNREGISTERED = "unregistered"
"""Code of a status: that process does not know the decode rank; it should register again."""

_DESCRIPTION_FIELD = 20
_MAX_U64 = (1 << 64) - 1
MOST_PAGES = 1 << 20


class FrameError(ValueError):
    """A message that does not have the form it must have."""


@dataclass(frozen=True, slots=True)
class Register:
    """Decode to prefill, once a pair: who it is and where its pool lies."""

    ip: str
    port: int
    instance: str
    addresses: tuple[int, ...]
    tp_rank: int
    tp_size: int
    page_bytes: int
    description: bytes

    def frames(self) -> list[bytes]:
        """Field by field."""
        address = struct.pack(f"<{len(self.addresses)}Q", *self.addresses)
        lengths = struct.pack(f"<{len(self.addresses)}Q", *[self.page_bytes] * len(self.addresses))
        head = [REGISTER, self.ip.encode(), _text(self.port), self.instance.encode(), address, b"", pack_lists([])]
        head += [_text(self.tp_rank), _text(self.tp_size), _text(self.page_bytes), b"", b"", b"", b""]
        return [*head, b"0", b"0", b"1", b"0", b"", lengths, self.description]


@dataclass(frozen=True, slots=True)
class Request:
    """Decode to prefill, once a session: where the pages go.

    Attributes:
        pages: int32[n]; None from a rank that only counts.
        required: ranks whose requests the prefill waits for.
        group: instance of the decode server's first rank, whose generations all its ranks use; default: ``instance``.
    """

    room: int
    ip: str
    port: int
    instance: str
    pages: Int32Array | None
    required: int
    prefix_len: int
    generation: int
    group: str = ""

    @property
    def attempt(self) -> tuple[str, int, int]:
        """The same on all ranks of the decode server."""
        return self.group or self.instance, self.room, self.generation

    def frames(self) -> list[bytes]:
        """Field by field."""
        pages = b"" if self.pages is None else self.pages.astype("<i4").tobytes()
        aux = b"" if self.pages is None else b"0"
        head = [_text(self.room), self.ip.encode(), _text(self.port), self.instance.encode(), pages, aux]
        return [
            *head,
            pack_lists([]),
            _text(self.required),
            _text(self.prefix_len),
            b"",
            _text(self.generation),
            self.group.encode(),
        ]


@dataclass(frozen=True, slots=True)
class Status:
    """Prefill to decode: how the session stands there."""

    room: int
    state: State
    rank: int
    generation: int
    instance: str = ""
    code: str = ""
    message: str = ""

    def frames(self) -> list[bytes]:
        """Field by field."""
        head = [_text(self.room), _text(self.state), _text(self.rank), _text(self.generation)]
        return [*head, self.instance.encode(), self.code.encode(), self.message.encode()]


@dataclass(frozen=True, slots=True)
class Abort:
    """Decode to prefill: write no more; answer when nothing can be written any more.

    Attributes:
        target: the instance that is meant; another one behind its address answers, but ends nothing.
        group: see ``Request``.
    """

    room: int
    ip: str
    port: int
    generation: int
    instance: str
    message: str = ""
    target: str = ""
    group: str = ""

    @property
    def attempt(self) -> tuple[str, int, int]:
        """See ``Request``."""
        return self.group or self.instance, self.room, self.generation

    def frames(self) -> list[bytes]:
        """Field by field."""
        head = [ABORT, _text(self.room), self.ip.encode(), _text(self.port), _text(self.generation)]
        return [*head, self.instance.encode(), self.message.encode(), self.target.encode(), self.group.encode()]


@dataclass(frozen=True, slots=True)
class AbortAck:
    """Prefill to decode: of this generation no byte can land any more."""

    room: int
    rank: int
    generation: int
    instance: str = ""

    def frames(self) -> list[bytes]:
        """Field by field."""
        return [ABORT_ACK, _text(self.room), _text(self.rank), _text(self.generation), self.instance.encode()]


class AuxRecord(msgspec.Struct, frozen=True):
    """What travels beside the pages.

    Attributes:
        checksums: of the pages that were sent, in order; empty without verification.
        num_bytes: of all pages.
    """

    first: FirstToken
    num_pages: int
    num_bytes: int
    checksums: list[int] = []


@dataclass(frozen=True, slots=True)
class Aux:
    """Prefill to decode, when all pages are there."""

    room: int
    rank: int
    generation: int
    instance: str
    record: AuxRecord

    def frames(self) -> list[bytes]:
        """Field by field."""
        head = [AUX, _text(self.room), _text(self.rank), _text(self.generation), self.instance.encode()]
        return [*head, msgspec.msgpack.encode(self.record)]


@dataclass(frozen=True, slots=True)
class AuxAck:
    """Decode to prefill: the record and the pages are here, or what is wrong with them."""

    room: int
    generation: int
    instance: str
    message: str = ""

    def frames(self) -> list[bytes]:
        """Field by field."""
        return [AUX_ACK, _text(self.room), _text(self.generation), self.instance.encode(), self.message.encode()]


@dataclass(frozen=True, slots=True)
class Alive:
    """Either way: a sign of life of an instance."""

    instance: str

    def frames(self) -> list[bytes]:
        """Field by field."""
        return [ALIVE, self.instance.encode()]


Message = Register | Request | Status | Abort | AbortAck | Aux | AuxAck | Alive


def decode_for_prefill(frames: list[bytes]) -> Message | None:
    """A message to a prefill rank; None for those that have no meaning here.

    Raises:
        FrameError: it is malformed.
    """
    kind = frames[0] if frames else b""
    if kind in IGNORED:
        return None
    if kind == REGISTER:
        return _register(frames)
    if kind == ABORT:
        _at_least(frames, 6)
        names = [_string(frame) for frame in frames[5:9]]
        return Abort(_room(frames[1]), _string(frames[2]), _port(frames[3]), _number(frames[4]), *names)
    if kind == AUX_ACK:
        _at_least(frames, 5)
        return AuxAck(_room(frames[1]), _number(frames[2]), _string(frames[3]), _string(frames[4]))
    return _alive(frames) if kind == ALIVE else _request(frames)


def decode_for_decode(frames: list[bytes]) -> Message | None:
    """A message to a decode rank; None for those that have no meaning here.

    Raises:
        FrameError: it is malformed.
    """
    kind = frames[0] if frames else b""
    if kind in IGNORED:
        return None
    if kind == ABORT_ACK:
        _at_least(frames, 4)
        instance = _string(frames[4]) if len(frames) > 4 else ""
        return AbortAck(_room(frames[1]), _number(frames[2]), _number(frames[3]), instance)
    if kind == AUX:
        _at_least(frames, 6)
        try:
            record = msgspec.msgpack.decode(frames[5], type=AuxRecord)
        except msgspec.MsgspecError as error:
            raise FrameError(f"the record of a session is malformed: {error}") from error
        return Aux(_room(frames[1]), _number(frames[2]), _number(frames[3]), _string(frames[4]), record)
    return _alive(frames) if kind == ALIVE else _status(frames)


def pack_lists(lists: list[bytes]) -> bytes:
    """Several byte strings as one: their number, their lengths (u32, little-endian), then themselves."""
    return struct.pack(f"<{len(lists) + 1}I", len(lists), *[len(item) for item in lists]) + b"".join(lists)


def unpack_lists(data: bytes) -> list[bytes]:
    """What ``pack_lists`` packed; the empty string is no lists.

    Raises:
        FrameError: lengths and data do not agree.
    """
    if not data:
        return []
    count = struct.unpack_from("<I", data)[0] if len(data) >= 4 else -1
    if count < 0 or 4 + 4 * count > len(data):
        raise FrameError(f"{len(data)} bytes are no list of lists")
    lengths = struct.unpack_from(f"<{count}I", data, 4)
    start = 4 + 4 * count
    if start + sum(lengths) != len(data):
        raise FrameError(f"lists of {sum(lengths)} bytes are announced, {len(data) - start} follow")
    lists = []
    for length in lengths:
        lists.append(data[start : start + length])
        start += length
    return lists


def _register(frames: list[bytes]) -> Register:
    _at_least(frames, 10)
    unpack_lists(frames[6])
    if len(frames[4]) % 8:
        raise FrameError(f"addresses of {len(frames[4])} bytes are not whole 64-bit numbers")
    addresses = struct.unpack(f"<{len(frames[4]) // 8}Q", frames[4])
    description = frames[_DESCRIPTION_FIELD] if len(frames) > _DESCRIPTION_FIELD else b""
    who = (_string(frames[1]), _port(frames[2]), _string(frames[3]))
    return Register(*who, addresses, _number(frames[7]), _number(frames[8]), _number(frames[9]), description)


def _request(frames: list[bytes]) -> Request:
    _at_least(frames, 8)
    unpack_lists(frames[6])
    if len(frames[4]) % 4 or len(frames[4]) > 4 * MOST_PAGES:
        raise FrameError(f"page indices of {len(frames[4])} bytes are not whole 32-bit numbers, at most {MOST_PAGES}")
    pages = np.frombuffer(frames[4], dtype="<i4").astype(np.int32) if frames[4] or frames[5] else None
    if pages is not None and len(pages) and int(pages.min()) < 0:
        raise FrameError(f"page index {int(pages.min())} is negative")
    required = _number(frames[7])
    if not 1 <= required <= 4096:
        raise FrameError(f"{required} ranks are required; 1 to 4096 are possible")
    prefix = _number(frames[8]) if len(frames) > 8 and frames[8] else 0
    generation = _number(frames[10]) if len(frames) > 10 else 0
    group = _string(frames[11]) if len(frames) > 11 else ""
    who = (_string(frames[1]), _port(frames[2]), _string(frames[3]))
    return Request(_room(frames[0]), *who, pages, required, prefix, generation, group)


def _status(frames: list[bytes]) -> Status:
    _at_least(frames, 3)
    value = _number(frames[1])
    if value > State.SUCCESS:
        raise FrameError(f"{value} is no state of a session")
    rest = [_string(frame) for frame in frames[4:7]] + [""] * (3 - len(frames[4:7]))
    generation = _number(frames[3]) if len(frames) > 3 else 0
    return Status(_room(frames[0]), State(value), _number(frames[2]), generation, *rest)


def _alive(frames: list[bytes]) -> Alive:
    _at_least(frames, 2)
    return Alive(_string(frames[1]))


def _at_least(frames: list[bytes], count: int) -> None:
    if len(frames) < count:
        raise FrameError(f"a message has {len(frames)} frames; it needs at least {count}")


def _text(number: int) -> bytes:
    return b"%d" % number


def _number(frame: bytes) -> int:
    if not frame.isdigit() or len(frame) > 20 or int(frame) > _MAX_U64:
        raise FrameError(f"{frame[:24]!r} is no number")
    return int(frame)


def _room(frame: bytes) -> int:
    room = _number(frame)
    if room > MAX_ROOM:
        raise FrameError(f"room {room} is above 2^63 - 1")
    return room


def _port(frame: bytes) -> int:
    port = _number(frame)
    if not 1 <= port <= 65535:
        raise FrameError(f"{port} is no port")
    return port


def _string(frame: bytes) -> str:
    if len(frame) > 4096:
        raise FrameError(f"a text of {len(frame)} bytes is too long; 4096 are possible")
    try:
        return frame.decode()
    except UnicodeDecodeError as error:
        raise FrameError("a text is not UTF-8") from error
