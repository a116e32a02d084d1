"""What of the nixl transport needs no second process."""

from __future__ import annotations

import contextlib
import sys

import msgspec
import numpy as np
import pytest

from sglang_lite.transfer.base import Description, Outcome, SpanBatch, TransferError
from sglang_lite.transfer.factory import check_available
from sglang_lite.transfer.nixl import NixlTransport
from sglang_lite.transfer.nixl_engine import MODULES, rows_of


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MODULES:
        monkeypatch.setitem(sys.modules, f"{name}._api", None)
    with pytest.raises(TransferError, match=r"sglang-lite\[nixl\]"):
        check_available("nixl")


def test_rows_carry_the_device_and_addresses_above_two_to_the_63() -> None:
    rows = rows_of(2**63, np.array([0, 4096]), np.array([1, 2]), "cuda:3")
    assert rows.tolist() == [[2**63, 1, 3], [2**63 + 4096, 2, 3]]


def test_a_batch_without_spans_carries_its_notification_and_a_liar_is_refused() -> None:
    with contextlib.ExitStack() as stack:
        here, there = NixlTransport("127.0.0.1"), NixlTransport("127.0.0.1")
        stack.callback(here.close, 2.0)
        stack.callback(there.close, 2.0)
        memory = np.zeros(64, dtype=np.uint8)
        source = here.register(memory.ctypes.data, 32)
        there.register(memory.ctypes.data + 32, 32)
        told = msgspec.msgpack.decode(there.describe(), type=Description)
        with pytest.raises(TransferError, match="its description of another"):
            here.connect(msgspec.msgpack.encode(msgspec.structs.replace(told, instance="0" * 32)))
        for at in range(0, len(told.session), 37):  # UCX ends the process over some of them
            damaged = bytearray(told.session)
            damaged[at] ^= 0x55
            with pytest.raises(TransferError):
                here.connect(msgspec.msgpack.encode(msgspec.structs.replace(told, session=bytes(damaged))))
        peer = here.connect(there.describe())
        nothing = np.zeros(0, dtype=np.int64)
        spans = SpanBatch(nothing, nothing, nothing)
        transfer = here.submit(peer, source, peer.regions[0], spans, notify=b"only this", deadline_s=5.0)
        assert transfer.poll() is Outcome.DONE and transfer.quiesced
        while not (notes := there.notifications()):
            pass
        assert notes == [(here.instance, b"only this")]
        with pytest.raises(TransferError, match="cannot reach memory at npu:0"):
            here.register(memory.ctypes.data, 8, "npu:0")
