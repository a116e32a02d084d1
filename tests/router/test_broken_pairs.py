"""One side of a pair fails: what the client gets, and that the other side's request ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import msgspec
import pytest
from aiohttp import web

from sglang_lite.router import prefill_decode
from sglang_lite.router.breaker import BreakerState
from sglang_lite.router.pair_side import Arrivals
from tests.router.test_pairs_and_control import decode, prefill
from tests.router.test_proxy import CHAT, CHAT_PATH, code_of, fixed
from tests.support.null_workers import Answer, NullWorker, router_over


class Held(NullWorker):
    """Answers nothing; ``ended`` is set when one of its requests has ended."""

    def __init__(self, mode: str) -> None:
        super().__init__(disaggregation_mode=mode, disaggregation_bootstrap_port=8998)
        self.ended = asyncio.Event()
        self.answer = self._hold

    async def _hold(self, request: web.Request, data: bytes) -> web.StreamResponse:
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        raise AssertionError("unreachable")


async def drop(request: web.Request, data: bytes) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def until_ended(worker: Held) -> None:
    """It would hold its request for ever."""
    async with asyncio.timeout(20):
        await worker.ended.wait()


@pytest.mark.parametrize(("answer", "status"), [(fixed(500), 500), (fixed(503), 503), (drop, 502), (fixed(429), 429)])
async def test_prefill_fails_while_decode_waits(answer, status: int) -> None:  # type: ignore[no-untyped-def]
    one, other = prefill(), Held("decode")
    one.answer = answer
    async with router_over(one, other, disable_retries=True) as router:
        async with asyncio.timeout(20):
            assert (await router.post(CHAT_PATH, CHAT))[0] == status
        await until_ended(other)
        assert router.context.leases.total == 0


@pytest.mark.parametrize("answer", [fixed(500), fixed(503), drop])
async def test_decode_fails_while_prefill_computes(answer) -> None:  # type: ignore[no-untyped-def]
    one, other = Held("prefill"), decode()
    other.answer = answer
    async with router_over(one, other, disable_retries=True) as router:
        async with asyncio.timeout(20):
            assert (await router.post(CHAT_PATH, CHAT))[0] in (500, 502, 503)
        await until_ended(one)
        assert router.context.leases.total == 0


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("answer", [fixed(503), drop])
async def test_another_worker_of_that_side_takes_over(side: str, answer) -> None:  # type: ignore[no-untyped-def]
    """Also where the policy would choose the same pair again: it holds the beginning of the prompt."""
    bad, good, rest = (prefill(), prefill(), decode()) if side == "prefill" else (decode(), decode(), prefill())
    bad.answer = good.answer = fixed(200)
    async with router_over(bad, good, rest) as router:
        while not bad.seen:
            assert (await router.post(CHAT_PATH, CHAT))[0] == 200
            bad, good = (bad, good) if bad.seen else (good, bad)
        bad.answer = answer
        if side == "prefill":
            gone = asyncio.Event()

            async def wait(request: web.Request, data: bytes) -> web.StreamResponse:
                if not gone.is_set():
                    gone.set()
                    await asyncio.Event().wait()
                return web.Response(body=b"{}")

            rest.answer = wait
        async with asyncio.timeout(20):
            assert (await router.post(CHAT_PATH, CHAT))[0] == 200
        assert good.seen


async def test_a_probe_that_another_request_has_is_no_answer() -> None:
    """Both calls see that the breaker may be probed; the one that comes second goes elsewhere."""
    pairs = [prefill(), prefill()], [decode(), decode()]
    async with router_over(*pairs[0], *pairs[1], cb_failure_threshold=1, cb_timeout_duration_secs=0.05) as router:
        for worker in router.context.registry.workers.values():
            worker.breaker.fail(router.context.now)
        await asyncio.sleep(0.1)
        answers = await asyncio.gather(*(router.post(CHAT_PATH, CHAT) for _ in range(2)))
        assert [answer[0] for answer in answers] == [200, 200], [code_of(one[2]) for one in answers if one[0] != 200]


class Streaming(NullWorker):
    """A decode worker that sends the headers of a stream at once, ``parts`` after ``go``, and the end after ``finish``;
    ``left`` is set when its reader is gone before that."""

    def __init__(self, *parts: bytes) -> None:
        super().__init__(disaggregation_mode="decode")
        self.go, self.finish = asyncio.Event(), asyncio.Event()
        self.began, self.left = asyncio.Event(), asyncio.Event()
        self._parts = parts
        self.answer = self._stream

    async def _stream(self, request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        self.began.set()
        try:
            await self.go.wait()
            for part in self._parts:
                await response.write(part)
            await self.finish.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        await response.write(b"data: [DONE]\n\n")
        return response


def failing_after(event: asyncio.Event, answer: Answer) -> NullWorker:
    """A prefill worker that fails once ``event`` is set."""
    worker = prefill()

    async def fail(request: web.Request, data: bytes) -> web.StreamResponse:
        await event.wait()
        return await answer(request, data)

    worker.answer = fail
    return worker


FIRST, SECOND = b'data: {"index":0,"text":"a"}\n\n', b'data: {"text":"b", "index": 1}\n\n'
BATCH = {"text": ["x", "y"], "stream": True}
CUT = fixed(200, b'data: {"index":0}\n\ndata: {"error":{}}\n\n', "text/event-stream")


@pytest.mark.parametrize(("answer", "status"), [(fixed(500), 500), (drop, 502), (CUT, 502)])
async def test_headers_of_decode_alone_are_no_answer(answer: Answer, status: int) -> None:
    """The client gets the failure of prefill; with another pair it gets that one's answer, from a new room."""
    stuck, well = Streaming(), Streaming(FIRST)
    well.go.set()
    well.finish.set()
    async with router_over(failing_after(stuck.began, answer), stuck, disable_retries=True) as router:
        async with asyncio.timeout(20):
            assert (await router.post("/generate", {"text": "x", "stream": True}))[0] == status
            await stuck.left.wait()
        assert router.context.leases.total == 0
    stuck = Streaming()
    prefills = [failing_after(stuck.began, answer), prefill()]
    async with router_over(*prefills, stuck, well, policy="round_robin") as router:
        async with asyncio.timeout(20):
            for _ in range(2):
                body = (await router.post("/generate", {"text": "x", "stream": True}))[2]
                assert body == FIRST + b"data: [DONE]\n\n"
            await stuck.left.wait()
        rooms = [msgspec.json.decode(seen[2])["bootstrap_room"] for one in (stuck, well) for seen in one.seen]
        assert len(rooms) == len(set(rooms)) >= 3
        assert router.context.leases.total == 0


@pytest.mark.parametrize("answer", [fixed(500), drop, CUT])
async def test_a_prompt_of_a_stream_that_is_never_computed(answer: Answer) -> None:
    """Decode has begun with the other one, and would wait until its own limit."""
    other = Streaming(FIRST)
    other.go.set()
    shown = asyncio.Event()
    async with (
        router_over(failing_after(shown, answer), other) as router,
        router.session.post(router.url + "/generate", json=BATCH) as response,
        asyncio.timeout(20),
    ):
        assert await response.content.readany() == FIRST
        shown.set()
        rest = await response.content.read()
        assert b'"code":"upstream_unreachable"' in rest and b"[DONE]" not in rest
        await other.left.wait()
    assert router.context.leases.total == 0


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (BATCH, (FIRST + SECOND[:20], SECOND[20:])),
        ({"text": "x", "stream": True}, (b'data: {"text":"a"}\n\n',)),
        ({"text": "x", "stream": True, "sampling_params": {"n": 2}}, (SECOND, FIRST)),
        ({"text": ["x"], "stream": True, "sampling_params": [{"n": 2}]}, (FIRST, SECOND)),
        ({"prompt": "x", "stream": True, "n": 2}, (FIRST, SECOND)),
    ],
)
async def test_a_stream_with_all_its_pages_outlives_prefill(
    body: dict[str, object], parts: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_decode, "_DECODE_SECONDS", 0.01)
    other = Streaming(*parts)
    other.go.set()
    shown = asyncio.Event()
    path = "/v1/completions" if "prompt" in body else "/generate"
    async with (
        router_over(failing_after(shown, drop), other) as router,
        router.session.post(router.url + path, json=body) as response,
        asyncio.timeout(20),
    ):
        got = b""
        while len(got) < len(b"".join(parts)):
            got += await response.content.readany()
        shown.set()
        (one,) = (worker for worker in router.context.registry.workers.values() if worker.role == "prefill")
        while one.load:  # it has failed
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)  # and decode had its time to say something
        other.finish.set()
        assert got + await response.content.read() == b"".join(parts) + b"data: [DONE]\n\n"


async def test_indexes_that_come_in_pieces() -> None:
    text = b'data: {"index": 10,"text":"\\"index\\":3,"}\n\ndata: {"x":1,"index":2}\n\n'
    for size in range(1, 20):
        parts = iter([*(text[place : place + size] for place in range(0, len(text), size)), b""])

        class Content:
            async def readany(self, parts: Iterator[bytes] = parts) -> bytes:
                return next(parts)

        arrivals = Arrivals()
        content, got = await arrivals.begin(Content()), b""
        while data := await content.readany():
            got += data
        assert got == text and arrivals.has(2) and not arrivals.has(3), size


async def test_one_side_does_not_open_the_breaker_of_the_other() -> None:
    """A prefill server that leaves makes its partners answer 500, which says nothing about them."""
    leaving, other, last = prefill(), decode(), prefill()
    leaving.answer = fixed(503)

    def rooms_of(worker: NullWorker) -> set[int]:
        return {msgspec.json.decode(seen[2])["bootstrap_room"] for seen in worker.seen}

    async def answer(request: web.Request, data: bytes) -> web.StreamResponse:
        room = msgspec.json.decode(data)["bootstrap_room"]
        while room not in rooms_of(leaving) | rooms_of(last):
            await asyncio.sleep(0.001)
        return web.Response(status=500 if room in rooms_of(leaving) else 200, body=b"{}")

    other.answer = answer
    async with router_over(leaving, last, other, policy="round_robin", cb_failure_threshold=1) as router:
        async with asyncio.timeout(20):
            assert {(await router.post(CHAT_PATH, CHAT))[0] for _ in range(6)} == {200}
        assert router.context.registry.workers[other.url].breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_probe_that_fails_opens_the_breaker_of_its_side_again(side: str) -> None:
    """What a side's own 500 means is known when its call has ended; the other side waits, or has answered."""
    bad, rest = (prefill(), Held("decode")) if side == "prefill" else (decode(), prefill())
    bad.answer = fixed(500)

    async def fail_behind_prefill(request: web.Request, data: bytes) -> web.StreamResponse:
        while rest_of.load:  # until prefill has answered
            await asyncio.sleep(0.001)
        return web.Response(status=500)

    if side == "decode":
        bad.answer = fail_behind_prefill
    async with router_over(bad, rest, disable_retries=True, cb_timeout_duration_secs=0.0) as router:
        breaker = router.context.registry.workers[bad.url].breaker
        rest_of = router.context.registry.workers[rest.url]
        for _ in range(3):
            breaker.fail(router.context.now)
        async with asyncio.timeout(20):
            assert (await router.post(CHAT_PATH, CHAT))[0] == 500
        assert breaker.state is BreakerState.OPEN


async def test_a_client_that_leaves_while_prefill_is_waited_for() -> None:
    one, other = Held("prefill"), decode()

    async def stream(request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: [DONE]\n\n")
        return response

    other.answer = stream
    async with router_over(one, other) as router, aiohttp.ClientSession() as session:
        answer = await session.post(router.url + CHAT_PATH, json={**CHAT, "stream": True})
        await answer.content.readany()
        await asyncio.sleep(0.1)  # decode is done, and the answer of prefill is waited for
        answer.close()
        await until_ended(one)
        async with asyncio.timeout(20):
            while router.context.leases.total:
                await asyncio.sleep(0.01)
