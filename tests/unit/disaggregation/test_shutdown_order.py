"""C816: what ends with a prefill worker, and in which order."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from sglang_lite.disaggregation.base import FirstToken, KVFailed, PeerReady
from sglang_lite.transfer.base import Outcome
from sglang_lite.transfer.leases import Lease
from sglang_lite.transfer.tcp import TcpTransport
from tests.support.session_pair import Pair


class Pending:
    """A transfer that goes on until it is given up, and is quiet a moment later."""

    reason, detail, num_bytes = None, "", 512

    def __init__(self, told: list[str]) -> None:
        self._told, self._polls = told, 0
        self._is_aborted = False

    def poll(self) -> Outcome:
        self._polls += self._is_aborted
        return Outcome.FAILED if self._is_aborted else Outcome.PENDING

    @property
    def quiesced(self) -> bool:
        return self._is_aborted

    def abort(self) -> None:
        if not self._is_aborted:
            self._told.append("batch freed")
        self._is_aborted = True


def test_batches_then_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    submitted = threading.Event()

    class Holding(TcpTransport):
        def submit(self, *arguments: Any, **options: Any) -> Any:
            submitted.set()
            return Pending(told)

        def close(self, grace_s: float) -> None:
            told.append("transport closed")
            super().close(grace_s)

    close = Lease.close

    def unregister(lease: Lease) -> None:
        assert not lease.num_users
        told.append("memory unregistered")
        close(lease)

    monkeypatch.setattr(Lease, "close", unregister)
    pair = Pair(transport=Holding)
    try:
        pair.open_prefill(1, 5, 8)
        pair.open_decode(1, 5, [7, 8], 8)
        pair.prefill.wait(1, (PeerReady,))
        pair.prefill.worker.send(1, 0, np.array([3, 4], dtype=np.int32), FirstToken(1))
        assert submitted.wait(5.0)
        began = time.monotonic()
        pair.prefill.worker.close(1.0)
        assert time.monotonic() - began < 5.0
        assert told == ["batch freed", "transport closed", "memory unregistered"]
        failed = pair.decode.wait(1, seconds=2.0)
        assert isinstance(failed, KVFailed)
    finally:
        pair.close()
