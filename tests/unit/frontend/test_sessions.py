"""The store of sessions against a naive one that keeps every turn's whole input, and its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.frontend.request import FinishReason, GenerationOutput
from sglang_lite.frontend.request_limits import LIMITS
from sglang_lite.frontend.session import TURN_BYTES, SessionParams, Turn
from sglang_lite.frontend.sessions import SessionStore
from sglang_lite.types import RequestError


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def output(ids: list[int], kind: str | None = "stop") -> GenerationOutput:
    reason = None if kind is None else FinishReason(kind)
    return GenerationOutput("r", "x" * len(ids), ids, reason, 1, len(ids), 0)


def whole(turn: Turn) -> list[int]:
    ids: list[int] = turn.history(turn.input_length).tolist()
    return ids


def begin(store: SessionStore, request_id: str, ids: list[int], session: str = "s", **params: object) -> Turn:
    return store.begin(request_id, SessionParams(id=session, **params), ids, None, len)  # type: ignore[arg-type]


@dataclass
class NaiveNode:
    ids: list[int]
    out: list[int]
    children: list[str] = field(default_factory=list)


class Naive:
    """What SGLang does, with copies and by name."""

    def __init__(self) -> None:
        self.nodes: dict[str, NaiveNode] = {}

    def drop(self, names: list[str]) -> None:
        for name in names:
            node = self.nodes.pop(name, None)
            if node is not None:
                self.drop(node.children)

    def add(self, name: str, ids: list[int], out: list[int], params: SessionParams) -> list[int]:
        if params.rid is None:
            if params.replace:
                self.nodes.clear()
            start: list[int] = []
        else:
            parent = self.nodes[params.rid]
            if params.replace:
                self.drop(parent.children)
                parent.children = []
            start = parent.ids if params.drop_previous_output else parent.ids + parent.out
            start = start[: params.offset] if params.offset else start
            parent.children.append(name)
        self.nodes[name] = NaiveNode(start + ids, out)
        return start + ids


_TOKENS = st.lists(st.integers(0, 9), max_size=4)
_TURN = st.tuples(_TOKENS, _TOKENS, st.integers(0, 9), st.integers(-6, 8), st.booleans(), st.booleans())


@settings(max_examples=300, deadline=None)
@given(st.lists(_TURN, max_size=12))
def test_a_store_builds_the_inputs_of_a_naive_one(
    turns: list[tuple[list[int], list[int], int, int, bool, bool]],
) -> None:
    store, naive = SessionStore(), Naive()
    store.open("s")
    for index, (ids, out, back, offset, replaces, drops) in enumerate(turns):
        rid = f"r{index - back}" if back and index >= back else None
        params = SessionParams(id="s", rid=rid, offset=offset, replace=replaces, drop_previous_output=drops)
        if rid is not None and rid not in naive.nodes:
            with pytest.raises(RequestError, match="Invalid request session id"):
                store.begin(f"r{index}", params, ids, None, len)
            continue
        expected = naive.add(f"r{index}", ids, out, params)
        turn = store.begin(f"r{index}", params, ids, None, len)
        assert whole(turn) == expected
        turn.observe(output(out))
    kept = sum(TURN_BYTES + 4 * (turn.length - turn.kept) for turn in store._sessions["s"].turns.values())
    assert store.num_bytes == kept
    assert set(store._sessions["s"].turns) == set(naive.nodes)
    store.close("s")
    assert store.num_bytes == 0


def test_a_conversation_under_one_id_stays_whole() -> None:
    store = SessionStore()
    store.open("s")
    begin(store, "r", [1]).observe(output([2]))
    begin(store, "r", [3], rid="r").observe(output([4]))
    assert whole(begin(store, "r", [5], rid="r")) == [1, 2, 3, 4, 5]
    store.close("s")
    assert store.num_bytes == 0


def test_long_conversations_do_not_recurse_and_cost_what_they_add() -> None:
    store = SessionStore()
    store.open("s")
    for index in range(5000):
        begin(store, f"r{index}", [index], rid=f"r{index - 1}" if index else None).observe(output([0]))
    assert len(whole(begin(store, "last", [], rid="r4999"))) == 10000
    assert store.num_bytes < 5001 * (TURN_BYTES + 16)
    begin(store, "other", [1], replace=True)
    assert store.num_bytes == TURN_BYTES + 4


def test_sessions_that_nobody_uses_end() -> None:
    clock = Clock()
    store = SessionStore(clock=clock)
    store.open("short", timeout=10)
    store.open("default")
    store.open("long", timeout=1e9)
    running = begin(store, "r", [1], "short")
    clock.now = 11
    assert store.expire() == 0  # it has a request
    running.observe(output([2]))
    clock.now = 20
    assert whole(begin(store, "r2", [3], "short", rid="r")) == [1, 2, 3]
    clock.now = LIMITS.session_seconds + 1
    store.expire()
    assert len(store) == 1  # the one whose request never ended
    assert not store.close("default") and not store.close("long")
    with pytest.raises(RequestError, match="does not exist"):
        begin(store, "r", [1], "long")


def test_there_are_no_more_sessions_than_may_be() -> None:
    clock = Clock()
    store = SessionStore(replace(LIMITS, sessions=2), clock)
    store.open("a", timeout=1)
    store.open("b")
    with pytest.raises(RequestError) as caught:
        store.open("c")
    assert caught.value.status == 429
    clock.now = 2
    assert store.open("c") == "c"


def test_sessions_hold_no_more_than_they_may() -> None:
    store = SessionStore(replace(LIMITS, session_bytes=3 * TURN_BYTES))
    store.open("a")
    begin(store, "r", [0] * 100, "a").observe(output([1]))
    held = store.num_bytes
    with pytest.raises(RequestError) as caught:
        begin(store, "r2", [0] * 1000, "a")
    assert (caught.value.status, store.num_bytes) == (429, held)
    store.close("a")
    store.open("b")
    begin(store, "r2", [0] * 100, "b")


def test_what_ends_after_its_session_or_its_replacement_counts_nowhere() -> None:
    store = SessionStore()
    store.open("s")
    first = begin(store, "r", [1])
    assert store.to_abort(SessionParams(id="s")) == []
    assert store.to_abort(SessionParams(id="s", replace=True)) == [first]
    begin(store, "r2", [1], replace=True)
    held = store.num_bytes
    first.observe(output([1] * 50, "abort"))
    assert store.num_bytes == held
    last = begin(store, "r3", [1])
    store.close("s")
    last.observe(output([1] * 50))
    assert store.num_bytes == 0


def test_a_replaced_turn_that_does_not_end_is_continued_as_far_as_it_was_seen() -> None:
    store = SessionStore()
    store.open("s")
    first = begin(store, "r", [1])
    first.observe(output([2, 3], None))
    params = SessionParams(id="s", rid="r", replace=True)
    assert store.to_abort(params) == [first]
    assert whole(store.begin("r2", params, [9], None, len)) == [1, 2, 3, 9]
    first.observe(output([2, 3, 4]))
    assert whole(begin(store, "r3", [], rid="r")) == [1, 2, 3]


def test_a_turn_that_the_engine_refused_is_forgotten() -> None:
    store = SessionStore()
    store.open("s")
    begin(store, "r", [1]).observe(output([2]))
    held = store.num_bytes
    refused = begin(store, "r2", [3], rid="r")
    assert not refused.was_seen
    store.discard(refused)
    assert store.num_bytes == held
    assert store.to_abort(SessionParams(id="s", rid="r", replace=True)) == []


def test_a_streaming_session_counts_its_last_turn_alone() -> None:
    store = SessionStore()
    store.open("s", streaming=True)
    for index in range(50):
        turn = begin(store, f"r{index}", [index])
        assert len(whole(turn)) == 2 * index + 1
        turn.observe(output([0]))
    assert store.num_bytes == TURN_BYTES + 4 * 100
    failed = begin(store, "r49", [7])
    failed.observe(output([1], "abort"))
    assert store.num_bytes == TURN_BYTES + 4 * 100
    assert len(whole(begin(store, "r50", []))) == 100
