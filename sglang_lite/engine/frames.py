"""Frames between the front and the engine core: one msgpack header and raw column buffers, as ZMQ multipart.

Columns of one frame lie one after another in a single buffer, widest items first, so every column is aligned and
encoding is one join. Decoding makes read-only NumPy views of the received bytes and copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_lite.engine.messages import (
    Abort,
    AbortAll,
    Admit,
    CommandHeader,
    EventHeader,
    Failure,
    Finish,
    Flush,
    Load,
    LoadAdapter,
    LoadGrammar,
    Output,
    Pause,
    Ping,
    Progress,
    QueryLoad,
    Ready,
    ReleaseMemory,
    Reply,
    Resume,
    ResumeMemory,
    Shutdown,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
)
from sglang_lite.types import Int64Array, LogprobRecord, OutputColumns, RequestColumns

Frame = list[bytes]
"""One message as ZMQ parts: the header first."""

ColumnTable = tuple[tuple[str, np.dtype[Any]], ...]

REQUEST_COLUMNS: ColumnTable = (
    ("key", np.dtype(np.int64)),
    ("seed", np.dtype(np.int64)),
    ("priority", np.dtype(np.int64)),
    ("num_tokens", np.dtype(np.int32)),
    ("max_new_tokens", np.dtype(np.int32)),
    ("min_new_tokens", np.dtype(np.int32)),
    ("temperature", np.dtype(np.float32)),
    ("top_p", np.dtype(np.float32)),
    ("top_k", np.dtype(np.int32)),
    ("min_p", np.dtype(np.float32)),
    ("frequency_penalty", np.dtype(np.float32)),
    ("presence_penalty", np.dtype(np.float32)),
    ("repetition_penalty", np.dtype(np.float32)),
    ("flags", np.dtype(np.uint32)),
    ("logprob_start", np.dtype(np.int32)),
    ("top_logprobs", np.dtype(np.int32)),
    ("timeout", np.dtype(np.float32)),
)
"""Order of the columns of an ``Admit`` buffer; the token ids have a buffer of their own."""

OUTPUT_COLUMNS: ColumnTable = (
    ("key", np.dtype(np.int64)),
    ("token", np.dtype(np.int32)),
    ("matched", np.dtype(np.int32)),
    ("cached_tokens", np.dtype(np.int32)),
    ("finish", np.dtype(np.uint8)),
    ("retractions", np.dtype(np.uint8)),
)
"""Order of the columns of an ``Output`` buffer."""

_ENCODER = msgspec.msgpack.Encoder()
_COMMANDS: msgspec.msgpack.Decoder[CommandHeader] = msgspec.msgpack.Decoder(CommandHeader)
_EVENTS: msgspec.msgpack.Decoder[EventHeader] = msgspec.msgpack.Decoder(EventHeader)
_INT32 = np.dtype(np.int32)
_INT64 = np.dtype(np.int64)
_FLOAT32 = np.dtype(np.float32)


_Header = TypeVar("_Header")


class FrameError(Exception):
    """A frame that does not follow the format. Receivers log and ignore it."""


@dataclass(slots=True, frozen=True)
class Keys:
    """An ``Abort`` or ``Finish`` header with its keys: int64[N]."""

    header: Abort | Finish
    keys: Int64Array


MaintenanceCommand = UpdateWeights | ReleaseMemory | ResumeMemory | StartProfile | StopProfile
ControlCommand = (
    AbortAll
    | Flush
    | Pause
    | Resume
    | QueryLoad
    | Ping
    | LoadAdapter
    | UnloadAdapter
    | LoadGrammar
    | MaintenanceCommand
    | Shutdown
)
Command = RequestColumns | Keys | ControlCommand
ControlEvent = Reply | Load | Progress | Ready | Failure
Event = OutputColumns | ControlEvent


def encode_requests(columns: RequestColumns) -> Frame:
    """Ingress frame of N new requests."""
    shapes = [(index, *matrix.shape) for index, matrix in columns.embeds.items()]
    header = _ENCODER.encode(Admit(len(columns), columns.extras, shapes))
    token_ids = np.ascontiguousarray(columns.token_ids, _INT32)
    vectors = [np.ascontiguousarray(matrix, _FLOAT32).tobytes() for matrix in columns.embeds.values()]
    return [header, _pack(columns, REQUEST_COLUMNS), token_ids.tobytes(), *vectors]


def encode_keys(header: Abort | Finish, keys: Sequence[int] | Int64Array) -> Frame:
    """Frame that names requests by key."""
    return [_ENCODER.encode(header), np.asarray(keys, _INT64).tobytes()]


def encode_control(header: ControlCommand | ControlEvent) -> Frame:
    """Frame that is a header alone."""
    return [_ENCODER.encode(header)]


def encode_output(columns: OutputColumns) -> Frame:
    """Egress frame of one step."""
    if not columns.logprobs:
        header = _ENCODER.encode(Output(len(columns), [], columns.messages, columns.timelines))
        return [header, _pack(columns, OUTPUT_COLUMNS)]
    shapes = [
        (
            record.key,
            record.prompt,
            len(record.token_ids),
            record.top_ids.shape[1],
            record.extra_logprobs.shape[1],
            record.hidden.shape[1],
        )
        for record in columns.logprobs
    ]
    header = _ENCODER.encode(Output(len(columns), shapes, columns.messages, columns.timelines))
    return [header, _pack(columns, OUTPUT_COLUMNS), _pack_logprobs(columns.logprobs)]


def decode_command(frame: Sequence[bytes]) -> Command:
    """What a front sent to the core.

    Raises:
        FrameError: the frame is malformed.
    """
    header = _decode_header(_COMMANDS, frame)
    if isinstance(header, Admit):
        _expect_parts(frame, 3 + len(header.embeds))
        return _unpack_requests(header, frame[1], frame[2], frame[3:])
    if isinstance(header, (Abort, Finish)):
        _expect_parts(frame, 2)
        return Keys(header, _view(frame[1], _INT64, len(frame[1]) // 8, 0))
    _expect_parts(frame, 1)
    return header


def decode_event(frame: Sequence[bytes]) -> Event:
    """What the core sent to a front.

    Raises:
        FrameError: the frame is malformed.
    """
    header = _decode_header(_EVENTS, frame)
    if not isinstance(header, Output):
        _expect_parts(frame, 1)
        return header
    _expect_parts(frame, 3 if header.logprobs else 2)
    columns = _unpack(frame[1], OUTPUT_COLUMNS, header.count)
    logprobs = _unpack_logprobs(header, frame[2]) if header.logprobs else []
    return OutputColumns(**columns, logprobs=logprobs, messages=header.messages, timelines=header.timelines)


def _decode_header(decoder: msgspec.msgpack.Decoder[_Header], frame: Sequence[bytes]) -> _Header:
    if not frame:
        raise FrameError("empty frame: expected a header part")
    try:
        return decoder.decode(frame[0])
    except msgspec.MsgspecError as error:
        raise FrameError(f"header of {len(frame[0])} bytes: {error}") from error


def _expect_parts(frame: Sequence[bytes], parts: int) -> None:
    if len(frame) != parts:
        raise FrameError(f"frame has {len(frame)} parts, expected {parts}")


def _pack(columns: RequestColumns | OutputColumns, table: ColumnTable) -> bytes:
    return b"".join([np.ascontiguousarray(getattr(columns, name), dtype).data for name, dtype in table])


def _unpack(buffer: bytes, table: ColumnTable, count: int) -> dict[str, Any]:
    row_bytes = sum(dtype.itemsize for _, dtype in table)
    if count < 0 or len(buffer) != count * row_bytes:
        raise FrameError(f"column buffer has {len(buffer)} bytes, expected {count} rows of {row_bytes}")
    columns = {}
    offset = 0
    for name, dtype in table:
        columns[name] = np.frombuffer(buffer, dtype, count, offset)
        offset += count * dtype.itemsize
    return columns


def _unpack_requests(
    header: Admit, buffer: bytes, token_buffer: bytes, vector_buffers: Sequence[bytes]
) -> RequestColumns:
    columns = _unpack(buffer, REQUEST_COLUMNS, header.count)
    token_ids = _view(token_buffer, _INT32, len(token_buffer) // 4, 0)
    lengths = columns["num_tokens"]
    if header.count and int(lengths.min()) < 1:
        raise FrameError("num_tokens has an entry below 1")
    if int(lengths.sum(dtype=np.int64)) != len(token_ids):
        raise FrameError(f"num_tokens add up to {int(lengths.sum(dtype=np.int64))}, but {len(token_ids)} ids came")
    if any(not 0 <= index < header.count for index in header.extras):
        raise FrameError(f"extras name a request outside 0..{header.count - 1}")
    embeds = {}
    for (index, rows, width), vectors in zip(header.embeds, vector_buffers, strict=True):
        if not 0 <= index < header.count or not 0 < rows <= int(lengths[index]) or width < 1:
            raise FrameError(f"vectors [{rows}, {width}] for request {index} of {header.count} do not fit its prompt")
        embeds[index] = _view(vectors, _FLOAT32, rows * width, 0).reshape(rows, width)
    return RequestColumns(**columns, token_ids=token_ids, extras=header.extras, embeds=embeds)


def _pack_logprobs(records: list[LogprobRecord]) -> bytes:
    arrays: list[npt.NDArray[Any]] = []
    for record in records:
        arrays.append(np.ascontiguousarray(record.token_ids, _INT32))
        arrays.append(np.ascontiguousarray(record.logprobs, _FLOAT32))
        arrays.append(np.ascontiguousarray(record.top_ids, _INT32))
        arrays.append(np.ascontiguousarray(record.top_logprobs, _FLOAT32))
        arrays.append(np.ascontiguousarray(record.extra_logprobs, _FLOAT32))
        arrays.append(np.ascontiguousarray(record.hidden, _FLOAT32))
    return b"".join([array.tobytes() for array in arrays])


def _unpack_logprobs(header: Output, buffer: bytes) -> list[LogprobRecord]:
    records = []
    offset = 0
    for key, prompt, positions, top, extra, hidden in header.logprobs:
        if min(positions, top, extra, hidden) < 0:
            raise FrameError("log-probability record with a negative size")
        views = []
        widths = ((_INT32, 1), (_FLOAT32, 1), (_INT32, top), (_FLOAT32, top), (_FLOAT32, extra), (_FLOAT32, hidden))
        for dtype, width in widths:
            views.append(_view(buffer, dtype, positions * width, offset, exact=False))
            offset += positions * width * 4
        records.append(
            LogprobRecord(
                key=key,
                prompt=prompt,
                token_ids=views[0],
                logprobs=views[1],
                top_ids=views[2].reshape(positions, top),
                top_logprobs=views[3].reshape(positions, top),
                extra_logprobs=views[4].reshape(positions, extra),
                hidden=views[5].reshape(positions, hidden),
            )
        )
    if offset != len(buffer):
        raise FrameError(f"log-probability buffer has {len(buffer)} bytes, expected {offset}")
    return records


def _view(buffer: bytes, dtype: np.dtype[Any], count: int, offset: int, *, exact: bool = True) -> npt.NDArray[Any]:
    """``count`` items at ``offset``; with ``exact`` the buffer ends there."""
    end = offset + count * dtype.itemsize
    if end > len(buffer) or (exact and end != len(buffer)):
        raise FrameError(f"buffer of {len(buffer)} bytes does not hold {count} items of {dtype} at {offset}")
    return np.frombuffer(buffer, dtype, count, offset)
