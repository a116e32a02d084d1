"""Whatever order the two cores act in, both sides end, agree, and let go of their pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_lite.disaggregation.base import FirstToken, KVArrived, KVFailed, KVQuiesced, KVSent, PeerReady
from tests.support.session_pair import Pair, Side

_ROOMS = itertools.count(1000)
ACTIONS = ("open prefill", "open decode", "first pages", "last page", "abort prefill", "abort decode")


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def _order() -> st.SearchStrategy[list[str]]:
    """Each side opens once and aborts at most once, pages follow the opening, in order."""
    aborts = st.lists(st.sampled_from(ACTIONS[4:]), max_size=2, unique=True)
    return aborts.flatmap(lambda extra: st.permutations([*ACTIONS[:4], *extra])).map(_legal)


def _legal(order: list[str]) -> list[str]:
    ranks = {"open prefill": 0, "first pages": 1, "last page": 2}
    own = sorted((action for action in order if action in ranks), key=ranks.__getitem__)
    steps = iter(own)
    return [next(steps) if action in ranks else action for action in order]


def _act(pair: Pair, action: str, room: int) -> None:
    if action == "open prefill":
        pair.open_prefill(room, room, 12)
    elif action == "open decode":
        pair.open_decode(room, room, [10, 20, 30], 12)
    elif action == "first pages":
        pair.prefill.worker.send(room, 0, np.array([1, 2], dtype=np.int32))
    elif action == "last page":
        pair.prefill.worker.send(room, 2, np.array([3], dtype=np.int32), FirstToken(room))
    elif action == "abort prefill":
        pair.prefill.worker.abort(room)
    else:
        pair.decode.worker.abort(room)


def _end(side: Side, room: int, success: type) -> bool:
    """Wait for the end of a session; True for success."""
    event = side.wait(room, (success, KVFailed, KVQuiesced))
    if isinstance(event, KVFailed) and not event.quiesced:
        side.wait(room, (KVQuiesced,))
    return isinstance(event, success)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(orders=st.lists(_order(), min_size=1, max_size=3))
def test_both_sides_end_and_agree(pair: Pair, orders: list[list[str]]) -> None:
    pair.decode.pool[:] = 0
    rooms = [next(_ROOMS) for _ in orders]
    for step in range(max(map(len, orders))):
        for room, order in zip(rooms, orders, strict=True):
            if step < len(order):
                _act(pair, order[step], room)
    for room, order in zip(rooms, orders, strict=True):
        opened_last = order.index("open decode"), order.index("open prefill")
        aborted_early = [
            action in order and order.index(action) < at
            for action, at in zip(("abort decode", "abort prefill"), opened_last, strict=True)
        ]
        if any(aborted_early):  # the abort of a request that is not open does nothing but answer
            for side, action in ((pair.decode, "abort decode"), (pair.prefill, "abort prefill")):
                if action in order:
                    side.wait(room, (KVQuiesced,))
                side.worker.abort(room)
            continue
        decode_has = _end(pair.decode, room, KVArrived)
        prefill_has = _end(pair.prefill, room, KVSent)
        assert decode_has or not prefill_has
        if decode_has and len(orders) == 1:
            assert (pair.decode.pool[[10, 20, 30]] == pair.prefill.pool[[1, 2, 3]]).all()
        if len(order) == 4:
            assert decode_has and prefill_has
    pair.prefill.wait_idle()
    pair.decode.wait_idle()
    pair.prefill.seen = [event for event in pair.prefill.seen if not isinstance(event, PeerReady)]
