"""A prefill and a decode core with their roles, and sessions between them that are played here."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from sglang_lite.disaggregation.base import (
    Event,
    FirstToken,
    KVArrived,
    KVFailed,
    KVQuiesced,
    KVSent,
    PeerReady,
    PrefillLost,
)
from sglang_lite.engine.core import EngineCore
from sglang_lite.engine.decode_role import DecodeRole
from sglang_lite.engine.frames import Keys
from sglang_lite.engine.local import LocalTransport
from sglang_lite.engine.messages import Abort, Pause, Resume
from sglang_lite.engine.prefill_role import PrefillRole
from sglang_lite.scheduler import Scheduler, SchedulerConfig
from sglang_lite.types import FinishCode, Int32Array, OutputColumns, RequestExtras, RequestFlags, TransferParams
from tests.support.null_executor import CheckingExecutor, context_token
from tests.support.scheduler_driver import request_columns

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
PARAMS = TransferParams("h", 1, 7, rid="r")


class Played:
    """Sessions of either role: writes down what it is told, and has the events that the test puts there."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.waiting: list[Event] = []
        self.pages: dict[int, list[int]] = {}
        self.last: dict[int, FirstToken] = {}

    def open(self, key: int, rid: str, params: TransferParams, *details: Any) -> None:
        self.told.append(("open", key))
        if len(details) == 3:
            self.pages[key] = details[0].tolist()

    def send(self, key: int, first_page: int, pages: Int32Array, last: FirstToken | None = None) -> None:
        sent = self.pages.setdefault(key, [])
        assert first_page == len(sent)
        sent += pages.tolist()
        if last is not None:
            self.last[key] = last

    def abort(self, key: int) -> None:
        self.told.append(("abort", key))

    def refuse(self, rid: str, params: TransferParams, message: str) -> None:
        self.told.append(("refuse", rid))

    def events(self) -> list[Event]:
        taken, self.waiting = self.waiting, []
        return taken

    def fileno(self) -> int:
        return 0

    def stats(self) -> Any:
        return None

    def close(self, grace_s: float) -> None:
        self.told.append(("close",))


class Side:
    """A core without a thread."""

    def __init__(self, kind: str, *, fallback: bool = False, rows: int = 4, **options: Any) -> None:
        config = SchedulerConfig(
            num_pages=32,
            page_size=4,
            context_length=64,
            max_running_requests=rows,
            chunked_prefill_size=4,
            reserved_decode_tokens=4,
            enable_radix_cache=kind == "prefill",
            **options,
        )
        self.scheduler = Scheduler(config)
        self.executor = CheckingExecutor(4, num_slots=128, page_size=4, vocab_size=30)
        self.sessions = Played()
        role: Any = PrefillRole(self.scheduler, self.sessions)
        if kind == "decode":
            role = DecodeRole(self.scheduler, self.sessions, fallback=fallback, vocab_size=30)
        self.rows: list[OutputColumns] = []
        self.transport = LocalTransport(self.rows.append, lambda event: None)
        self.core = EngineCore(self.scheduler, self.executor, self.transport, role=role)

    def request(self, key: int, count: int, prompt: list[int] = PROMPT, priority: int = 0) -> None:
        self.put(key, count, prompt, priority)
        self.turn()

    def put(self, key: int, count: int, prompt: list[int] = PROMPT, priority: int = 0) -> None:
        extras = {0: RequestExtras(transfer=PARAMS, token_ids_logprob=(2,))}
        flags = int(RequestFlags.RETURN_LOGPROB)
        options = {"max_new_tokens": count, "flags": flags, "top_logprobs": 2, "priority": priority}
        self.transport.put(request_columns([key], [prompt], extras=extras, **options))

    def turn(self, *events: Event) -> None:
        """Turns until there is nothing to do."""
        self.sessions.waiting += events
        for _ in range(50):
            self.core.step(0)
        self.scheduler.audit()

    def abort(self, key: int) -> None:
        self.transport.put(Keys(Abort(0, 0), np.array([key], dtype=np.int64)))
        self.turn()

    @property
    def tokens(self) -> list[int]:
        return [token for row in self.rows for token in row.token.tolist() if token >= 0]

    @property
    def ends(self) -> list[FinishCode]:
        return [FinishCode(code) for row in self.rows for code in row.finish.tolist() if code]

    @property
    def used_pages(self) -> int:
        stats = self.scheduler.stats()
        return stats.num_pages - stats.free_pages - stats.cached_pages


def alone(count: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(context_token(np.array(tokens, dtype=np.int32), 30))
    return tokens[len(PROMPT) :]


def copy_pages(source: Side, target: Side, key: int) -> None:
    for page, place in zip(source.sessions.pages[key], target.sessions.pages[key], strict=True):
        for name in ("_slot_token", "_slot_position"):
            getattr(target.executor, name)[place * 4 : place * 4 + 4] = getattr(source.executor, name)[
                page * 4 : page * 4 + 4
            ]


def test_prompt_there_and_output_here() -> None:
    """Chunks leave as they are computed, the answer only after delivery; tokens and scores are those of one engine."""
    prefill, decode = Side("prefill"), Side("decode")
    prefill.request(1, 6)
    decode.request(1, 6)
    assert decode.sessions.told == prefill.sessions.told == [("open", 1)]
    assert not prefill.sessions.pages  # nobody waits for it yet
    prefill.turn(PeerReady(1))
    assert len(prefill.sessions.pages[1]) == len(decode.sessions.pages[1]) == 3
    assert not prefill.rows
    copy_pages(prefill, decode, 1)
    first = prefill.sessions.last[1]
    decode.turn(KVArrived(1, first))
    prefill.turn(KVSent(1))
    assert prefill.tokens == alone(1)
    assert prefill.ends == decode.ends == [FinishCode.LENGTH]
    assert decode.tokens == alone(6)
    assert first.logprob is not None
    assert len(first.top_logprobs) == 2
    records = [record for row in decode.rows for record in row.logprobs]
    assert [int(record.token_ids[0]) for record in records] == alone(6)
    assert not any(record.prompt for record in records)
    assert records[0].logprobs[0] == np.float32(first.logprob)
    assert records[0].top_ids.shape == records[1].top_ids.shape
    assert records[0].extra_logprobs.shape == records[1].extra_logprobs.shape
    assert prefill.used_pages == decode.used_pages == 0


def test_one_token_is_the_prefill_sides() -> None:
    prefill, decode = Side("prefill"), Side("decode")
    prefill.request(1, 1)
    decode.request(1, 1)
    prefill.turn(PeerReady(1))
    decode.turn(KVArrived(1, prefill.sessions.last[1]))
    assert decode.tokens == alone(1)
    assert decode.ends == [FinishCode.LENGTH]
    assert decode.used_pages == 0


def test_an_abort_of_a_computed_prompt() -> None:
    """It is no request of the scheduler any more; its pages stay until they are quiet."""
    prefill = Side("prefill")
    prefill.request(1, 6)
    prefill.turn(PeerReady(1))
    prefill.abort(1)
    assert prefill.sessions.told == [("open", 1), ("abort", 1)]
    assert prefill.ends == [FinishCode.ABORTED]
    assert prefill.used_pages > 0
    prefill.turn(KVQuiesced(1))
    assert prefill.used_pages == 0


@pytest.mark.parametrize("quiesced", [True, False])
@pytest.mark.parametrize("computed", [True, False])
def test_a_failure_on_the_prefill_side(quiesced: bool, computed: bool) -> None:
    prefill = Side("prefill")
    prefill.request(1, 6)
    if computed:
        prefill.turn(PeerReady(1))
    prefill.turn(KVFailed(1, 500, "the decode server is gone", quiesced))
    assert prefill.ends == [FinishCode.ERROR]
    assert prefill.rows[-1].messages[1] == "the decode server is gone"
    assert ("abort", 1) not in prefill.sessions.told
    assert (prefill.used_pages > 0) == (computed and not quiesced)
    prefill.turn(KVQuiesced(1))
    assert prefill.used_pages == 0


def test_an_abort_before_the_prompt_arrives() -> None:
    decode = Side("decode")
    decode.request(1, 6)
    decode.abort(1)
    assert decode.sessions.told == [("open", 1), ("abort", 1)]
    decode.turn(KVArrived(1, FirstToken(3)))  # it was on its way
    assert decode.tokens == []
    assert decode.used_pages == 3
    decode.turn(KVQuiesced(1))
    assert decode.used_pages == 0


def test_a_request_that_never_opened_is_refused_to_the_peer() -> None:
    decode = Side("decode")
    decode.request(1, 6, prompt=[1] * 70)  # longer than the context
    assert decode.ends == [FinishCode.TOO_LONG]
    assert decode.sessions.told == [("refuse", "r")]


def test_a_request_that_the_prefill_side_refuses_is_told_to_the_peer() -> None:
    prefill = Side("prefill")
    prefill.request(1, 6, prompt=[1] * 70)
    assert prefill.ends == [FinishCode.TOO_LONG]
    assert prefill.sessions.told == [("refuse", "r")]


@pytest.mark.parametrize("is_aborted", [False, True])
def test_no_token_follows_a_pause(is_aborted: bool) -> None:
    """A prompt that arrives meanwhile goes on when the pause ends; when it is aborted, its pages come back."""
    prefill, decode = Side("prefill"), Side("decode")
    prefill.request(1, 6)
    decode.request(1, 6)
    prefill.turn(PeerReady(1))
    copy_pages(prefill, decode, 1)
    decode.transport.put(Pause(0, 0, "in_place"))
    decode.turn(KVArrived(1, prefill.sessions.last[1]))
    assert decode.tokens == []
    if is_aborted:
        decode.abort(1)
        decode.turn(KVQuiesced(1))
    decode.transport.put(Resume(0, 0))
    decode.turn()
    assert decode.tokens == ([] if is_aborted else alone(6))
    assert decode.used_pages == 0


@pytest.mark.parametrize(("reason", "computed_here"), [("peer_lost", True), ("duplicate", False)])
def test_fallback(reason: str, computed_here: bool) -> None:
    """With fallback the prompt is computed here when its prefill server fails, on other pages than those reserved."""
    decode = Side("decode", fallback=True)
    decode.request(1, 6)
    decode.turn(KVFailed(1, 500, "gone", False, reason))
    assert decode.used_pages == 3
    decode.turn(KVQuiesced(1))
    assert decode.used_pages == 0
    assert decode.tokens == (alone(6) if computed_here else [])
    assert decode.ends == [FinishCode.LENGTH if computed_here else FinishCode.ERROR]
    assert ("abort", 1) not in decode.sessions.told


@pytest.mark.parametrize("fallback", [False, True])
def test_those_that_wait_for_pages_when_their_prefill_server_goes(fallback: bool) -> None:
    """Whoever came before it went ends, or is computed here; who came later, or waits for another one, goes on."""
    side = Side("decode", fallback=fallback)
    for key in (1, 2, 3):
        side.request(key, 2, PROMPT * 7)
    until = time.monotonic()
    side.request(4, 2, PROMPT * 7)
    assert [told for told in side.sessions.told if told[0] == "open"] == [("open", 1)]
    side.turn(PrefillLost("other", 1, until, "gone"), PrefillLost("h", 2, until, "gone"))
    assert side.ends == []
    side.turn(PrefillLost("h", 1, until, "gone"))
    assert side.ends == [FinishCode.LENGTH if fallback else FinishCode.ERROR] * 2
    assert not any(told[0] == "refuse" for told in side.sessions.told)
    side.turn(KVArrived(1, FirstToken(3)))
    assert side.sessions.told[-1] == ("open", 4)
    side.turn(KVArrived(4, FirstToken(3)))
    assert side.ends[-1] is FinishCode.LENGTH and side.used_pages == 0


@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, [2, 3, 4]),
        ({"policy": "priority"}, [3, 4, 2]),
        ({"policy": "priority", "low_priority_first": True}, [2, 4, 3]),
        ({"policy": "priority", "starvation_limit": 1}, [3, 2, 4]),
    ],
)
def test_who_gets_pages_first(options: dict[str, Any], order: list[int]) -> None:
    """Each prompt needs half of the pool and a page more than that is free: one at a time."""
    side = Side("decode", **options)
    prompt = PROMPT * 7
    for key, priority in ((1, 0), (2, 0), (3, 5), (4, 2)):
        side.request(key, 2, prompt, priority)
    for key in (1, *order):
        assert side.sessions.told[-1] == ("open", key)
        side.turn(KVArrived(key, FirstToken(3)))
    assert side.ends == [FinishCode.LENGTH] * 4 and side.used_pages == 0


def test_those_that_wait_for_pages_are_not_put_in_order_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands may wait, and a turn comes with every step."""
    asked: list[int] = []
    order = Scheduler.without_pages

    def counted(scheduler: Scheduler) -> list[int]:
        asked.append(1)
        return order(scheduler)

    monkeypatch.setattr(Scheduler, "without_pages", counted)
    side = Side("decode", policy="priority")
    for key in (1, 2, 3):
        side.request(key, 2, PROMPT * 7)
    before = len(asked)
    side.turn()
    assert len(asked) == before <= 6
    side.abort(2)
    side.turn(KVArrived(1, FirstToken(3)))
    assert side.sessions.told[-1] == ("open", 3)


@pytest.mark.parametrize(
    "first",
    [FirstToken(30), FirstToken(-1), FirstToken(3, logprob=-0.5, top_logprobs=((-0.5, 30),), token_ids_logprobs=())],
)
def test_a_first_token_of_another_model(first: FirstToken) -> None:
    """One request fails and says why, before the model is fed a token that it does not have."""
    decode = Side("decode")
    decode.request(1, 6)
    decode.request(2, 1)
    decode.turn(KVArrived(1, first), KVArrived(2, FirstToken(alone(1)[0])))
    assert sorted(decode.ends) == [FinishCode.LENGTH, FinishCode.ERROR]
    assert decode.used_pages == 0


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [1, 2, 3]), ("priority", [3, 1, 2])])
def test_who_gets_a_row_first(policy: str, order: list[int]) -> None:
    """All prompts are here at once, and there is one row."""
    side = Side("decode", rows=1, policy=policy)
    for key, priority in ((1, 0), (2, 0), (3, 5)):
        side.request(key, 3, PROMPT, priority)
        for position, token in enumerate(PROMPT):
            slot = side.sessions.pages[key][position // 4] * 4 + position % 4
            side.executor._slot_token[slot], side.executor._slot_position[slot] = token, position
    side.turn(*(KVArrived(key, FirstToken(3)) for key in (1, 2, 3)))
    assert [key for row in side.rows for key in row.key[row.finish != 0].tolist()] == order


@pytest.mark.parametrize("leaves", [False, True])
def test_pages_of_a_request_that_a_plan_still_writes(leaves: bool) -> None:
    """Its plan is under way when it ends: a peer that heard of its pages at once could fill them before that plan."""
    prefill, decode = Side("prefill"), Side("decode")
    prefill.request(1, 50)
    prefill.turn(PeerReady(1))
    decode.request(1, 50)
    copy_pages(prefill, decode, 1)
    decode.sessions.waiting.append(KVArrived(1, prefill.sessions.last[1]))
    for _ in range(3):
        decode.core.step(0)
    decode.transport.put(Keys(Abort(0, 0), np.array([1], dtype=np.int64)))
    decode.put(2, 6)
    decode.core.step(0)
    assert ("open", 2) not in decode.sessions.told
    assert decode.used_pages == 3  # they are reserved meanwhile
    if leaves:
        decode.transport.put(Keys(Abort(0, 0), np.array([2], dtype=np.int64)))
    decode.core.step(0)
    assert (("open", 2) in decode.sessions.told) is not leaves
    assert (("refuse", "r") in [told[:2] for told in decode.sessions.told]) is leaves
    assert decode.used_pages == (0 if leaves else 3)
    decode.scheduler.audit()
