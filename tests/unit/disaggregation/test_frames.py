"""Messages survive the wire; what is malformed is a FrameError and nothing else."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_lite.disaggregation import frames as wire
from sglang_lite.disaggregation.base import FirstToken
from sglang_lite.disaggregation.states import State, advance, combine, may_create

_NAME = "ab" * 16
_RECORD = wire.AuxRecord(FirstToken(3, 1, 2, 3, -0.25, ((-0.25, 3),), ()), 2, 1024, [1, 2])

TO_PREFILL = [
    wire.Register("10.0.0.1", 5000, _NAME, (1 << 63, 4096), 1, 2, 512, b"description"),
    wire.Abort(7, "10.0.0.1", 5000, 9, _NAME, "given up", "cd" * 16),
    wire.AuxAck(7, 9, _NAME, "damaged"),
    wire.Alive(_NAME),
]
TO_DECODE = [
    wire.Status(7, State.TRANSFERRING, 1, 9, _NAME, "code", "why"),
    wire.AbortAck(7, 1, 9, _NAME),
    wire.Aux(7, 1, 9, _NAME, _RECORD),
    wire.Alive(_NAME),
]


@pytest.mark.parametrize("message", TO_PREFILL, ids=lambda message: type(message).__name__)
def test_messages_to_prefill(message: wire.Message) -> None:
    assert wire.decode_for_prefill(message.frames()) == message


@pytest.mark.parametrize("message", TO_DECODE, ids=lambda message: type(message).__name__)
def test_messages_to_decode(message: wire.Message) -> None:
    assert wire.decode_for_decode(message.frames()) == message


def test_a_transfer_request_has_the_known_fields() -> None:
    pages = np.array([1, 258], dtype=np.int32)
    request = wire.Request(7, "10.0.0.1", 5000, _NAME, pages, 2, 16, 9)
    frames = request.frames()
    assert frames[:6] == [b"7", b"10.0.0.1", b"5000", _NAME.encode(), b"\1\0\0\0\2\1\0\0", b"0"]
    assert frames[6:] == [b"\0\0\0\0", b"2", b"16", b"", b"9", b""]
    assert request.attempt == (_NAME, 7, 9)
    decoded = wire.decode_for_prefill(frames)
    assert isinstance(decoded, wire.Request) and decoded.pages is not None
    assert decoded.pages.tolist() == [1, 258] and (decoded.required, decoded.prefix_len) == (2, 16)


def test_the_short_forms_of_other_versions() -> None:
    dummy = wire.decode_for_prefill([b"7", b"h", b"50", b"s", b"", b"", b"", b"1"])
    assert isinstance(dummy, wire.Request) and dummy.pages is None
    assert wire.decode_for_decode([b"7", b"4", b"0"]) == wire.Status(7, State.SUCCESS, 0, 0)
    assert wire.decode_for_prefill([b"WATERMARK", b"x"]) is None
    assert wire.decode_for_decode([b"STAGING_RSP"]) is None


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"None", b"h"],
        [b"7", b"h", b"50", b"s", b"abc", b"0", b"", b"1"],
        [b"7", b"h", b"50", b"s", b"\xff\xff\xff\xff", b"0", b"", b"1"],
        [b"7", b"h", b"0", b"s", b"", b"", b"", b"1"],
        [b"7", b"h", b"50", b"s", b"", b"", b"", b"0"],
        [b"%d" % (1 << 63), b"h", b"50", b"s", b"", b"", b"", b"1"],
        [b"-7", b"h", b"50", b"s", b"", b"", b"", b"1"],
        [b"7", b"h", b"50", b"\xff", b"", b"", b"", b"1"],
        [b"7", b"h", b"50", b"s", b"", b"", b"\2\0\0\0", b"1"],
    ],
)
def test_malformed_messages(frames: list[bytes]) -> None:
    with pytest.raises(wire.FrameError):
        wire.decode_for_prefill(frames)


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_lists_of_lists(lists: list[bytes]) -> None:
    assert wire.unpack_lists(wire.pack_lists(lists)) == lists


@given(st.binary(max_size=60))
def test_no_bytes_break_the_reader_of_lists(data: bytes) -> None:
    with contextlib.suppress(wire.FrameError):
        wire.unpack_lists(data)


_HEADS = st.sampled_from([b"None", b"ABORT", b"ABORT_ACK", b"AUX_DATA", b"AUX_ACK", b"ALIVE", b"7", b""])
_FRAME = st.one_of(st.binary(max_size=20), st.integers(0, 1 << 70).map(lambda number: b"%d" % number), _HEADS)


@given(_HEADS, st.lists(_FRAME, max_size=24))
def test_no_frames_break_the_readers(head: bytes, rest: list[bytes]) -> None:
    for read in (wire.decode_for_prefill, wire.decode_for_decode):
        with contextlib.suppress(wire.FrameError):
            read([head, *rest])


_STATES = st.sampled_from(State)


@given(st.lists(_STATES, max_size=12))
def test_states_only_rise_and_the_end_is_the_end(reports: list[State]) -> None:
    state = State.BOOTSTRAPPING
    for report in reports:
        following = advance(state, report)
        if state.is_over:
            assert following is state
        else:
            assert following is State.FAILED if report is State.FAILED else following >= state
        state = following
    if State.SUCCESS not in reports:
        assert (state is State.FAILED) == (State.FAILED in reports)


def test_one_failed_rank_fails_the_request() -> None:
    assert [int(state) for state in State] == [0, 1, 2, 3, 4]
    assert combine([State.SUCCESS, State.FAILED, State.TRANSFERRING]) is State.FAILED
    assert [may_create(state) for state in State] == [False, True, True, False, False]
