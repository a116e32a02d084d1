"""Frames keep every value over the wire, cost little, and refuse what does not follow the format."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sglang_lite.engine.frames import (
    OUTPUT_COLUMNS,
    REQUEST_COLUMNS,
    FrameError,
    Keys,
    decode_command,
    decode_event,
    encode_control,
    encode_keys,
    encode_output,
    encode_requests,
)
from sglang_lite.engine.info import LoadSnapshot
from sglang_lite.engine.messages import (
    Abort,
    AbortAll,
    Failure,
    Finish,
    Flush,
    Load,
    Pause,
    Ping,
    Progress,
    QueryLoad,
    Reply,
    Resume,
    Shutdown,
)
from sglang_lite.types import LogprobRecord, OutputColumns, RequestColumns, RequestExtras


def _column(draw: st.DrawFn, dtype: np.dtype[Any], count: int) -> Any:
    return draw(hnp.arrays(dtype, count))


@st.composite
def request_columns(draw: st.DrawFn) -> RequestColumns:
    count = draw(st.integers(1, 5))
    columns = {name: _column(draw, dtype, count) for name, dtype in REQUEST_COLUMNS}
    columns["num_tokens"] = draw(hnp.arrays(np.int32, count, elements=st.integers(1, 6)))
    token_ids = _column(draw, np.dtype(np.int32), int(columns["num_tokens"].sum()))
    extras = draw(
        st.dictionaries(
            st.integers(0, count - 1),
            st.builds(
                RequestExtras,
                stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
                logit_bias=st.none() | st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=3),
                namespace=st.text(max_size=8),
                token_ids_logprob=st.lists(st.integers(0, 10**6), max_size=3).map(tuple),
            ),
            max_size=count,
        )
    )
    embeds = {
        index: draw(hnp.arrays(np.float32, (int(columns["num_tokens"][index]), draw(st.integers(1, 3)))))
        for index in draw(st.sets(st.integers(0, count - 1), max_size=2))
    }
    return RequestColumns(**columns, token_ids=token_ids, extras=extras, embeds=embeds)


@st.composite
def logprob_records(draw: st.DrawFn) -> LogprobRecord:
    positions, top, extra = draw(st.integers(0, 4)), draw(st.integers(0, 3)), draw(st.integers(0, 2))
    hidden = draw(st.integers(0, 3))
    return LogprobRecord(
        key=draw(st.integers(-(2**63), 2**63 - 1)),
        prompt=draw(st.booleans()),
        token_ids=draw(hnp.arrays(np.int32, positions)),
        logprobs=draw(hnp.arrays(np.float32, positions)),
        top_ids=draw(hnp.arrays(np.int32, (positions, top))),
        top_logprobs=draw(hnp.arrays(np.float32, (positions, top))),
        extra_logprobs=draw(hnp.arrays(np.float32, (positions, extra))),
        hidden=draw(hnp.arrays(np.float32, (positions, hidden))),
    )


@st.composite
def output_columns(draw: st.DrawFn) -> OutputColumns:
    count = draw(st.integers(0, 6))
    columns = {name: _column(draw, dtype, count) for name, dtype in OUTPUT_COLUMNS}
    return OutputColumns(
        **columns,
        logprobs=draw(st.lists(logprob_records(), max_size=3)),
        messages=draw(st.dictionaries(st.integers(0, 2**62), st.text(max_size=10), max_size=2)),
    )


@given(request_columns())
@settings(max_examples=30, deadline=None)
def test_request_columns_survive_the_wire(columns: RequestColumns) -> None:
    received = decode_command(encode_requests(columns))
    assert isinstance(received, RequestColumns)
    for name, dtype in REQUEST_COLUMNS:
        assert getattr(received, name).dtype == dtype
        np.testing.assert_array_equal(getattr(received, name), getattr(columns, name))
    np.testing.assert_array_equal(received.token_ids, columns.token_ids)
    assert received.extras == columns.extras
    assert received.embeds.keys() == columns.embeds.keys()
    for index, matrix in columns.embeds.items():
        assert received.embeds[index].dtype == np.float32
        np.testing.assert_array_equal(received.embeds[index], matrix)


@given(output_columns())
@settings(max_examples=30, deadline=None)
def test_output_columns_survive_the_wire(columns: OutputColumns) -> None:
    received = decode_event(encode_output(columns))
    assert isinstance(received, OutputColumns)
    for name, _ in OUTPUT_COLUMNS:
        np.testing.assert_array_equal(getattr(received, name), getattr(columns, name))
    assert received.messages == columns.messages
    assert len(received.logprobs) == len(columns.logprobs)
    for record, expected in zip(received.logprobs, columns.logprobs, strict=True):
        assert (record.key, record.prompt) == (expected.key, expected.prompt)
        for name in ("token_ids", "logprobs", "top_ids", "top_logprobs", "extra_logprobs", "hidden"):
            np.testing.assert_array_equal(getattr(record, name), getattr(expected, name))
            assert getattr(record, name).shape == getattr(expected, name).shape


@pytest.mark.parametrize("header", [Abort(0, 7), Finish()])
def test_keys_survive_the_wire(header: Abort | Finish) -> None:
    received = decode_command(encode_keys(header, [1, 2**62]))
    assert isinstance(received, Keys)
    assert received.header == header
    assert received.keys.tolist() == [1, 2**62]


@pytest.mark.parametrize(
    "header",
    [
        AbortAll(0, 1),
        Flush(1, 2, 0.5),
        Pause(0, 3, "in_place"),
        Resume(0, 4),
        QueryLoad(0, 5),
        Ping(0, 6),
        Shutdown(),
    ],
)
def test_control_commands_survive_the_wire(header: Any) -> None:
    assert decode_command(encode_control(header)) == header


@pytest.mark.parametrize(
    "event",
    [Reply(3, False, 2), Load(0, LoadSnapshot(num_running=3)), Progress("loading", 0.5), Failure("why", startup=True)],
)
def test_events_survive_the_wire(event: Any) -> None:
    assert decode_event(encode_control(event)) == event


def test_decoding_copies_nothing() -> None:
    frame = encode_output(_rows(8))
    received = decode_event(frame)
    assert isinstance(received, OutputColumns)
    buffer = np.frombuffer(frame[1], np.uint8)
    for name, _ in OUTPUT_COLUMNS:
        column = getattr(received, name)
        assert np.shares_memory(column, buffer)
        assert column.flags.aligned


@given(st.lists(st.binary(max_size=40), max_size=4))
@settings(max_examples=80, deadline=None)
def test_noise_is_a_frame_error(frame: list[bytes]) -> None:
    with pytest.raises(FrameError):
        decode_command(frame)
    with pytest.raises(FrameError):
        decode_event(frame)


@given(request_columns(), st.data())
@settings(max_examples=30, deadline=None)
def test_damaged_request_frames_are_frame_errors_or_well_formed(columns: RequestColumns, data: st.DataObject) -> None:
    frame = encode_requests(columns)
    part = data.draw(st.integers(0, len(frame) - 1))
    cut = data.draw(st.integers(0, len(frame[part]) - 1))
    frame[part] = frame[part][:cut]
    with pytest.raises(FrameError):
        decode_command(frame)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_tokens": np.array([0, 3], np.int32)}, "num_tokens"),
        ({"num_tokens": np.array([2, 2], np.int32)}, "num_tokens"),
        ({"extras": {2: RequestExtras()}}, "extras"),
        ({"embeds": {2: np.zeros((1, 1), np.float32)}}, "vectors"),
        ({"embeds": {0: np.zeros((2, 1), np.float32)}}, "vectors"),
        ({"embeds": {0: np.zeros((1, 0), np.float32)}}, "vectors"),
    ],
)
def test_inconsistent_requests_are_frame_errors(changes: dict[str, Any], named: str) -> None:
    values: dict[str, Any] = {name: np.zeros(2, dtype) for name, dtype in REQUEST_COLUMNS}
    values |= {"num_tokens": np.array([1, 2], np.int32), "token_ids": np.arange(3, dtype=np.int32), "extras": {}}
    decode_command(encode_requests(RequestColumns(**values)))
    with pytest.raises(FrameError, match=named):
        decode_command(encode_requests(RequestColumns(**{**values, **changes})))


def test_header_of_the_other_direction_is_refused() -> None:
    with pytest.raises(FrameError):
        decode_command(encode_control(Reply(1)))
    with pytest.raises(FrameError):
        decode_event(encode_control(Ping(0, 1)))


def test_pause_mode_is_checked() -> None:
    with pytest.raises(FrameError):
        decode_command([msgspec.msgpack.encode(["pause", 0, 1, "sideways"])])


def test_a_large_egress_frame_is_encoded_in_microseconds() -> None:
    columns = _rows(4096)
    best = min(_seconds_of(lambda: encode_output(columns)) for _ in range(200))
    assert best < 60e-6


def _seconds_of(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _rows(count: int) -> OutputColumns:
    columns: dict[str, Any] = {name: np.arange(count).astype(dtype) for name, dtype in OUTPUT_COLUMNS}
    return OutputColumns(**columns)
