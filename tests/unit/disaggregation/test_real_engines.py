"""The same sessions over the engines themselves, on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from sglang_lite.disaggregation.base import KVFailed, KVQuiesced, PeerReady
from sglang_lite.transfer.base import KVTransport
from sglang_lite.transfer.factory import open_transport
from tests.support.session_pair import Pair


def _open_mooncake(host: str) -> KVTransport:
    return open_transport("mooncake_tcp", host=host)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(transport=_open_mooncake, page_bytes=65536)
    yield made
    made.close()


def test_sessions_over_mooncake(pair: Pair) -> None:
    for room in range(3):
        pair.run(room, room, list(range(8)), [40, 3, 9, 12, 60, 61, 62, 7])
    pair.open_prefill(9, 9, 8)
    pair.open_decode(9, 9, [1, 2], 8)
    pair.prefill.wait(9, (PeerReady,))
    pair.prefill.worker.send(9, 0, np.array([5], dtype=np.int32))
    pair.decode.worker.abort(9)
    assert pair.decode.wait(9) == KVQuiesced(9)
    failed = pair.prefill.wait(9)
    assert isinstance(failed, KVFailed) and (failed.quiesced or pair.prefill.wait(9) == KVQuiesced(9))
    pair.run(10, 9, [1, 2], [3, 4])
