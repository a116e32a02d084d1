"""``--migrate-streams``: streams go on at another worker with what they would have been."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.router import migration
from sglang_lite.router.body import parse_head
from sglang_lite.router.migration import FIELD, HEADER, Movement, movement
from tests.support.null_workers import Answer, NullWorker, RouterUnderTest, router_over
from tests.support.router_process import router_for
from tests.support.server import ServerProcess, local_server

TOKENS = 250
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"text": "A", "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS}}),
    (
        "/generate",
        {
            "text": "A",
            "sampling_params": {
                "temperature": 1.5,
                "sampling_seed": 3,
                "max_new_tokens": TOKENS,
                "ignore_eos": True,
                "presence_penalty": 0.5,
            },
        },
    ),
    ("/v1/completions", {"prompt": "A", "max_tokens": TOKENS, "temperature": 1.2, "seed": 5, "ignore_eos": True}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "A"}],
            "max_tokens": TOKENS,
            "temperature": 1.3,
            "seed": 11,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
    ),
    ("/v1/completions", {"prompt": "A", "max_tokens": TOKENS, "temperature": 1, "seed": 5, "regex": "[A-Z]{99}[a-d]+"}),
]


def events_of(body: bytes) -> list[Any]:
    found = []
    for block in body.split(b"\n\n")[:-1]:
        assert block.startswith(b"data: "), block
        data = block.removeprefix(b"data: ")
        found.append(data if data == b"[DONE]" else msgspec.json.decode(data))
    return found


def told(body: bytes) -> tuple[str, list[int], Any, Any, set[Any]]:
    """Text, ids, ending, usage, and the (id, created) that occur: all that must not change."""
    events = events_of(body)
    assert events.pop() == b"[DONE]", body[-300:]
    assert not any("error" in event for event in events), body[-300:]
    if "meta_info" in events[-1]:
        last = events[-1]
        meta = last["meta_info"]
        usage = (meta["prompt_tokens"], meta["completion_tokens"])
        return last["text"], last["output_ids"], meta["finish_reason"], usage, {e["meta_info"]["id"] for e in events}
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    usage = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
    return text, [], ends, usage, {(event["id"], event["created"]) for event in events}


async def stream(router: RouterUnderTest, path: str, body: dict[str, Any], begun: asyncio.Semaphore) -> bytes:
    """The whole stream; ``begun`` is released when its first events are here."""
    parts = []
    async with router.session.post(router.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200 and HEADER not in response.headers, await response.read()
        async for part in response.content.iter_any():
            if not parts:
                begun.release()
            parts.append(part)
    return b"".join(parts)


async def check_all_survive(router: RouterUnderTest, kill: Any) -> None:
    """Every kind of request runs on both workers; one of the workers is killed in the middle."""
    begun = asyncio.Semaphore(0)
    wanted = [told(await stream(router, path, body, begun)) for path, body in REQUESTS]
    tasks = [asyncio.create_task(stream(router, path, body, begun)) for path, body in REQUESTS for _ in range(2)]
    for _ in range(len(REQUESTS) + 3):  # one of three in turn is at the first worker; the others follow at once
        await begun.acquire()
    kill()
    results = [told(await task) for task in tasks]
    for index, result in enumerate(results):
        assert result[:4] == wanted[index // 2][:4]
        assert len(result[4]) == 1, "the id or the time changed"
    metrics = (await router.get("/metrics"))[2].decode()
    moved = next(line for line in metrics.splitlines() if line.startswith("sgl_router_migrated_streams_total"))
    assert 0 < float(moved.split()[1]) <= len(REQUESTS)
    assert router.context.leases.total == 0


async def test_a_server_that_is_killed(chain_model: Path, tmp_path: Path) -> None:
    words = ["--model-path", str(chain_model), "--served-model-name", "chain", "--grammar-backend", "xgrammar"]
    with ServerProcess(words, tmp_path / "a") as one, ServerProcess(words, tmp_path / "b") as other:
        await asyncio.gather(asyncio.to_thread(one.wait_ready), asyncio.to_thread(other.wait_ready))
        async with router_for([one.url, other.url], policy="round_robin", migrate_streams=True) as router:
            await check_all_survive(router, one.process.kill)


async def test_an_engine_that_is_killed(chain_model: Path) -> None:
    """The server lives and says that it cannot go on."""
    before = set(psutil.Process().children(recursive=True))
    async with local_server(chain_model, grammar_backend="xgrammar") as one:
        cores = set(psutil.Process().children(recursive=True)) - before
        async with (
            local_server(chain_model, grammar_backend="xgrammar") as other,
            router_for([one.url, other.url], policy="round_robin", migrate_streams=True) as router,
        ):
            await check_all_survive(router, lambda: [core.send_signal(signal.SIGKILL) for core in cores])


ATOMS = st.lists(
    st.tuples(
        st.lists(st.sampled_from([b'{"text":"x"}', b'{"t":":sgl "}', b"[DONE]"]), max_size=3),
        st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=3), max_size=3),
    ),
    max_size=8,
)


@settings(deadline=None)
@given(ATOMS, st.data())
def test_marks_are_taken_out_however_the_bytes_come(atoms: Any, data: st.DataObject) -> None:
    body, shown = b"", b""
    for events, sent in atoms:
        frames = b"".join(b"data: " + event + b"\n\n" for event in events)
        shown += frames
        body += frames + b":sgl " + msgspec.json.encode({"sent": sent, "id": "i", "created": 1}) + b"\n\n"
    moving, place, got = Movement(), 0, b""
    while place < len(body):
        size = data.draw(st.integers(1, 40))
        got += moving.take(body[place : place + size])
        place += size
    assert got == shown and moving.rest() == b""
    sent = [portion for _, portions in atoms for portion in portions]
    again = msgspec.json.decode(moving.body(b'{"a":1}', parse_head(b'{"a":1}')))
    assert again == ({"a": 1, FIELD: {"sent": sent, "id": "i", "created": 1}} if sent else {"a": 1})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", b'{"stream":true}'),
        ("/generate", b'{"stream":false}'),
        ("/generate", b'{"stream":true,"resume_from":{}}'),
    ],
)
def test_what_does_not_move(path: str, body: bytes) -> None:
    assert movement(path, parse_head(body)) is None


def cut(*blocks: bytes, whole: bool = False, marked: bool = True) -> Answer:
    """A stream that breaks behind ``blocks``, or ends there."""

    async def answer(request: web.Request, data: bytes) -> web.StreamResponse:
        headers = {"content-type": "text/event-stream", **({HEADER: "1"} if marked else {})}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        for block in blocks:
            await response.write(block)
        if not whole:
            assert request.transport is not None
            request.transport.close()
        return response

    return answer


FIRST = (b'data: 1\n\n:sgl {"sent":[[5]],"id":"x","created":3}\n\n', b"data: 2\n\n")
LAST = b'data: 3\n\ndata: [DONE]\n\n:sgl {"sent":[[6]]}\n\n'


@asynccontextmanager
async def pair(first: Answer, second: Answer) -> AsyncIterator[tuple[RouterUnderTest, NullWorker]]:
    one, other = NullWorker(), NullWorker()
    one.answer, other.answer = first, second
    options = {"policy": "round_robin", "migrate_streams": True, "retry_max_retries": 2}
    async with router_over(one, other, **options) as router:
        yield router, other


async def test_what_has_no_mark_is_made_again() -> None:
    async with pair(cut(*FIRST), cut(LAST, whole=True)) as (router, other):
        status, headers, body = await router.post("/generate", {"text": "a", "stream": True})
        assert (status, body) == (200, b"data: 1\n\ndata: 3\n\ndata: [DONE]\n\n")
        assert HEADER not in headers
        asked = msgspec.json.decode(other.seen[0][2])
        assert asked[FIELD] == {"sent": [[5]], "id": "x", "created": 3}


@pytest.mark.parametrize(
    "second",
    [
        cut(*FIRST),
        cut(LAST, whole=True, marked=False),
        cut(b':sgl {"failed":true}\n\n', whole=True),
        cut(b":sgl 7\n\n"),
        cut(b"data: 2\n\n" * 500),
    ],
)
async def test_nobody_goes_on(second: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next worker breaks, begins again, gives up, talks nonsense or does not mark: an error event, no [DONE]."""
    monkeypatch.setattr(migration, "MOST_HELD", 1000)
    async with pair(cut(*FIRST), second) as (router, _):
        status, _, body = await router.post("/generate", {"text": "a", "stream": True})
        assert status == 200 and body.startswith(b"data: 1\n\n") and b"[DONE]" not in body and b":sgl" not in body
        assert b'"code":"upstream_unreachable"' in body and b"data: 2" not in body
        assert router.context.leases.total == 0


async def test_marks_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held for a worker that promised marks and sends none has a limit; another worker begins anew."""
    monkeypatch.setattr(migration, "MOST_HELD", 1000)
    stopped = asyncio.Event()

    async def endless(request: web.Request, data: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", HEADER: "1"})
        await response.prepare(request)
        try:
            while True:
                await response.write(b"data: 1\n\n")
                await asyncio.sleep(0)
        finally:
            stopped.set()

    async with pair(endless, cut(LAST, whole=True)) as (router, other):
        status, _, body = await router.post("/generate", {"text": "a", "stream": True})
        assert (status, body) == (200, b"data: 3\n\ndata: [DONE]\n\n")
        assert FIELD not in msgspec.json.decode(other.seen[0][2])
        async with asyncio.timeout(10):
            await stopped.wait()


async def test_events_before_a_mark_that_says_no_more() -> None:
    """They may come in one portion with it: the next worker is told that the client has them."""
    async with pair(cut(FIRST[0] + b':sgl {"failed":true}\n\n'), cut(LAST, whole=True)) as (router, other):
        _, _, body = await router.post("/generate", {"text": "a", "stream": True})
        assert body == b"data: 1\n\ndata: 3\n\ndata: [DONE]\n\n"
        assert msgspec.json.decode(other.seen[0][2])[FIELD]["sent"] == [[5]]


def test_what_is_remembered_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "MOST_SENT", 5)
    moving = Movement()
    assert moving.take(b'data: 1\n\n:sgl {"sent":[[1,2],[]]}\n\ndata: 2\n\n:sgl {"sent":[[3]]}\n\n') == b"data: 1\n\n"
    assert moving.failed


async def test_workers_that_cannot_mark() -> None:
    """Their streams pass as they are, and end with an error when they break."""
    async with pair(cut(b"data: 1\n\n", marked=False), cut(LAST, whole=True)) as (router, other):
        _, _, body = await router.post("/generate", {"text": "a", "stream": True})
        assert body.startswith(b"data: 1\n\n") and b"upstream_unreachable" in body and not other.seen
