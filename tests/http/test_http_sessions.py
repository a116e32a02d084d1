"""Sessions over HTTP: what a request continues is put in front of its prompt, and the prefix cache finds it."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp
import pytest

from tests.support.server import LocalServer, greedy, read_event


async def opened(server: LocalServer, **fields: Any) -> str:
    reply = await server.post("/open_session", {"capacity_of_str_len": 1000, **fields})
    assert reply.status == 200, reply.text
    name: str = reply.json()
    return name


async def turn(
    server: LocalServer,
    session: str,
    text: str | list[int],
    tokens: int = 3,
    *,
    own_rid: str | None = None,
    **params: Any,
) -> Any:
    """A /generate that belongs to a session; checks that it works."""
    reply = await send(server, session, text, tokens, own_rid=own_rid, **params)
    assert reply.status == 200, reply.text
    return reply.json()


def body_of(
    session: str, text: str | list[int], tokens: int = 3, *, own_rid: str | None = None, **params: Any
) -> dict[str, Any]:
    prompt = {"text": text} if isinstance(text, str) else {"input_ids": text}
    own = {} if own_rid is None else {"rid": own_rid}
    return greedy(
        sampling={"max_new_tokens": tokens, "ignore_eos": True},
        return_prompt_token_ids=True,
        session_params={"id": session, **params},
        **prompt,
        **own,
    )


async def send(
    server: LocalServer,
    session: str,
    text: str | list[int],
    tokens: int = 3,
    *,
    own_rid: str | None = None,
    **params: Any,
) -> Any:
    return await server.post("/generate", body_of(session, text, tokens, own_rid=own_rid, **params))


def shown(result: Any) -> str:
    """The whole input as text."""
    return bytes(result["prompt_token_ids"]).decode()


async def test_a_turn_continues_input_and_output_of_the_one_it_names(server: LocalServer) -> None:
    session = await opened(server)
    first = await turn(server, session, "one A")
    assert (shown(first), first["text"]) == ("one A", "BCD")
    second = await turn(server, session, " two A", own_rid="second")
    assert shown(second) == " two A"  # without a rid nothing is continued
    third = (await server.post("/generate", _continuing(session, first, "xA"))).json()
    assert (shown(third), third["text"]) == ("one ABCDxA", "BCD")
    assert third["meta_info"]["cached_tokens"] == len("one ABC")  # the newest token was never fed
    fourth = (await server.post("/generate", _continuing(session, third, ""))).json()
    assert shown(fourth) == "one ABCDxABCD" and fourth["text"] == "ABC"


def _continuing(session: str, result: Any, text: str, **params: Any) -> dict[str, Any]:
    body = body_of(session, text, **params)
    if not text:
        del body["text"]
        body["input_ids"] = []
    body["session_params"]["rid"] = result["meta_info"]["id"]
    return body


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, "seven ABCD+A"),
        ({"offset": 5}, "seven+A"),
        ({"offset": 0}, "seven ABCD+A"),
        ({"offset": 99}, "seven ABCD+A"),
        ({"offset": -2}, "seven AB+A"),
        ({"drop_previous_output": True}, "seven A+A"),
        ({"drop_previous_output": True, "offset": 6}, "seven +A"),
    ],
)
async def test_offset_and_dropped_output(server: LocalServer, params: dict[str, Any], expected: str) -> None:
    session = await opened(server)
    first = await turn(server, session, "seven A")
    reply = await server.post("/generate", _continuing(session, first, "+A", **params))
    assert shown(reply.json()) == expected


async def test_a_begin_token_is_left_out_of_what_continues(server: LocalServer) -> None:
    session = await opened(server)
    first = await turn(server, session, [257, 65])
    body = _continuing(session, first, "")
    body["input_ids"] = [257, 65]
    reply = await server.post("/generate", body)
    assert reply.json()["prompt_token_ids"] == [257, 65, 66, 67, 68, 65]


async def test_replace_drops_what_continued_the_same_request(server: LocalServer) -> None:
    session = await opened(server)
    first = await turn(server, session, "0A")
    left = (await server.post("/generate", _continuing(session, first, "lA"))).json()
    child = (await server.post("/generate", _continuing(session, left, "cA"))).json()
    right = (await server.post("/generate", _continuing(session, first, "rA", replace=True))).json()
    assert shown(right) == "0ABCDrA"
    for gone in (left, child):
        reply = await server.post("/generate", _continuing(session, gone, "x"))
        assert reply.status == 400 and "Invalid request session id" in reply.text
    assert (await server.post("/generate", _continuing(session, right, "A"))).status == 200
    fresh = await turn(server, session, "new A", replace=True)
    assert shown(fresh) == "new A"
    assert (await server.post("/generate", _continuing(session, first, "A"))).status == 400


async def test_ids_of_sessions(server: LocalServer) -> None:
    assert await opened(server, session_id="mine") == "mine"
    again = await server.post("/open_session", {"capacity_of_str_len": 10, "session_id": "mine"})
    assert again.status == 400 and "still open" in again.json()["error"]["message"]
    reply = await server.call("GET", "/close_session", {"session_id": "mine"})
    assert (reply.status, reply.body) == (200, b"")
    assert (await server.post("/close_session", {"session_id": "mine"})).status == 200
    gone = await send(server, "mine", "A")
    assert gone.status == 400 and "does not exist" in gone.json()["error"]["message"]
    assert len({await opened(server) for _ in range(3)}) == 3


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"capacity_of_str_len": "x"},
        {"capacity_of_str_len": -1},
        {"capacity_of_str_len": 5, "timeout": 0},
        {"capacity_of_str_len": 5, "session_id": ""},
        {"capacity_of_str_len": 5, "streaming": "no"},
    ],
)
async def test_sessions_that_cannot_be_opened(server: LocalServer, body: dict[str, Any]) -> None:
    assert (await server.post("/open_session", body)).status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"session_params": {"id": "x", "offset": "1"}},
        {"session_params": {"id": 5}},
        {"session_params": [1]},
        {"session_params": {"id": "x"}, "session_id": "x"},
        {"session_id": 7},
    ],
)
async def test_wrong_session_fields(server: LocalServer, fields: dict[str, Any]) -> None:
    assert (await server.post("/generate", greedy("A", **fields))).status == 400


async def test_batches_continue_and_choices_do_not(server: LocalServer) -> None:
    session = await opened(server)
    first = await turn(server, session, "b A")
    body = _continuing(session, first, "x")
    body["text"] = ["1A", "2A"]
    results = (await server.post("/generate", body)).json()
    assert [shown(result) for result in results] == ["b ABCD1A", "b ABCD2A"]
    body["session_params"]["replace"] = True
    assert (await server.post("/generate", body)).status == 400
    body = _continuing(session, first, "x")
    body["sampling_params"]["n"] = 2
    assert (await server.post("/generate", body)).status == 400


async def test_an_identity_alone_changes_nothing(server: LocalServer) -> None:
    result = await server.generate("A", session_id="s1", sampling={"max_new_tokens": 4})
    assert result["text"] == "BCDA"
    for path in ("/v1/completions", "/v1/chat/completions"):
        prompt = {"prompt": "A"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "A"}]}
        assert (await server.post(path, {**prompt, "session_id": "s1", "max_tokens": 2})).status == 200


async def test_completions_and_chats_continue_a_session(server: LocalServer) -> None:
    session = await opened(server)
    body = {"prompt": "cA", "max_tokens": 3, "temperature": 0, "rid": "comp1", "session_params": {"id": session}}
    first = (await server.post("/v1/completions", body)).json()
    assert first["choices"][0]["text"] == "BCD" and first["usage"]["prompt_tokens"] == 2
    body |= {"rid": "comp2", "session_params": {"id": session, "rid": "comp1"}}
    second = (await server.post("/v1/completions", body)).json()
    assert second["usage"]["prompt_tokens"] == 7
    chat = {
        "messages": [{"role": "user", "content": "A"}],
        "max_tokens": 2,
        "session_params": {"id": session, "rid": "comp2"},
    }
    assert (await server.post("/v1/chat/completions", chat)).json()["usage"]["prompt_tokens"] == 10 + len("user:A")
    assert (await server.post("/v1/completions", body | {"rid": "comp3", "echo": True})).status == 400
    message = {"role": "user", "content": "A"}
    for path, other in (
        ("/v1/embeddings", {"input": "A"}),
        ("/v1/responses", {"input": "A"}),
        ("/v1/messages", {"model": "default", "messages": [message], "max_tokens": 1}),
    ):
        refused = await server.post(path, {**other, "session_params": {"id": session}})
        assert refused.status == 400 and "session_params" in refused.text
        assert (await server.post(path, {**other, "session_id": "one"})).status == 200


async def test_capacity_bounds_the_characters(server: LocalServer) -> None:
    session = await opened(server, capacity_of_str_len=10)
    first = await turn(server, session, "12345A", 4)
    over = await server.post("/generate", _continuing(session, first, "A"))
    assert over.status == 400 and "capacity_of_str_len=10" in over.text and "11 characters" in over.text
    assert (await server.post("/generate", _continuing(session, first, "A", offset=9))).status == 200


async def events_of(response: aiohttp.ClientResponse) -> list[Any]:
    return [read_event(block.strip()) for block in (await response.read()).split(b"\n\n") if block.strip()]


async def test_a_stream_is_continued_as_it_was_sent(server: LocalServer) -> None:
    session = await opened(server)
    body = body_of(session, "s A", 5) | {"stream": True, "rid": "stream1"}
    reply = await server.post("/generate", body)
    assert reply.events[-2]["text"] == "BCDAB"
    body = body_of(session, "+A", 2) | {"stream": True}
    body["session_params"]["rid"] = "stream1"
    event = (await server.post("/generate", body)).events[-2]
    assert shown(event) == "s ABCDAB+A"


async def test_nobody_continues_a_request_that_runs_and_replace_ends_it(server: LocalServer) -> None:
    session = await opened(server)
    body = body_of(session, "r A", 900) | {"stream": True, "rid": "running"}
    async with server.session.post(server.url + "/generate", json=body) as stream:
        await stream.content.readline()
        follow = body_of(session, "+A", 2)
        follow["session_params"]["rid"] = "running"
        early = await server.post("/generate", follow)
        assert early.status == 400 and "hasn't finished" in early.text
        twice = await server.post("/generate", body_of(session, "other", 1) | {"rid": "running"})
        assert twice.status == 400 and "Duplicate" in twice.text
        follow["session_params"]["replace"] = True
        result = (await server.post("/generate", follow)).json()
        events = await events_of(stream)
    last = events[-2]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert shown(result) == "r A" + last["text"] + "+A"


async def test_a_reader_that_leaves_frees_everything_and_can_be_continued(server: LocalServer) -> None:
    session = await opened(server)
    body = body_of(session, "d A", 900) | {"stream": True, "rid": "left"}
    response = await server.session.post(server.url + "/generate", json=body)
    await response.content.readline()
    response.close()
    await server.idle()
    follow = body_of(session, "+A", 2)
    follow["session_params"]["rid"] = "left"
    async with asyncio.timeout(20):
        while (reply := await server.post("/generate", follow)).status == 400:
            assert "hasn't finished" in reply.text
            await asyncio.sleep(0.01)
    text = shown(reply.json())
    assert text.startswith("d AB") and text.endswith("+A")


async def test_an_aborted_request_can_be_continued(server: LocalServer) -> None:
    session = await opened(server)
    body = body_of(session, "k A", 900) | {"rid": "aborted"}
    task = asyncio.create_task(server.post("/generate", body))
    async with asyncio.timeout(20):
        while not (await server.post("/abort_request", {"rid": "aborted"})).json()["success"]:
            await asyncio.sleep(0.005)
    first = (await task).json()
    assert first["meta_info"]["finish_reason"]["type"] == "abort"
    second = (await server.post("/generate", _continuing(session, first, "+A"))).json()
    assert shown(second) == "k A" + first["text"] + "+A"


async def test_refused_requests_leave_no_turn_behind(server: LocalServer) -> None:
    session = await opened(server)
    held = server.context.sessions.num_bytes
    too_long = body_of(session, [65] * 2000) | {"rid": "long"}
    assert (await server.post("/generate", too_long)).status == 400
    assert server.context.sessions.num_bytes == held
    follow = body_of(session, "A")
    follow["session_params"]["rid"] = "long"
    assert "Invalid request session id" in (await server.post("/generate", follow)).text


async def test_a_streaming_session_goes_on_by_itself(server: LocalServer) -> None:
    session = await opened(server, streaming=True)
    first = await turn(server, session, "1A")
    second = await turn(server, session, "2A")
    assert (shown(first), shown(second)) == ("1A", "1ABCD2A")
    for params in ({"replace": True}, {"offset": 1}, {"drop_previous_output": True}):
        reply = await send(server, session, "A", **params)
        assert reply.status == 400 and "Streaming sessions do not support" in reply.text
    body = body_of(session, "xA", 900) | {"stream": True, "rid": "busy"}
    async with server.session.post(server.url + "/generate", json=body) as stream:
        await stream.content.readline()
        assert "active request" in (await send(server, session, "A")).text
        await server.post("/abort_request", {"rid": "busy"})
        await stream.read()
    # What was aborted never happened.
    assert shown(await turn(server, session, "3A")) == "1ABCD2ABCD3A"


async def test_closing_frees_the_tokens_of_a_session(server: LocalServer) -> None:
    sessions = [await opened(server) for _ in range(3)]
    held = server.context.sessions.num_bytes
    for session in sessions:
        first = await turn(server, session, "f A")
        await server.post("/generate", _continuing(session, first, "A"))
    assert server.context.sessions.num_bytes > held
    for session in sessions:
        await server.post("/close_session", {"session_id": session})
    assert server.context.sessions.num_bytes == held


async def test_sessions_in_turmoil(server: LocalServer) -> None:
    """Streams, aborts, readers that leave, replacements and closed sessions at once: what is shown fits together, and
    nothing stays behind."""
    choice, store = random.Random(7), server.context.sessions
    before, held = len(store), store.num_bytes
    sessions = [await opened(server, streaming=index == 0) for index in range(4)]
    known: dict[str, list[tuple[str, str]]] = {session: [] for session in sessions}
    wrong: list[str] = []

    async def one(number: int) -> None:
        session = choice.choice(sessions)
        parent = choice.choice(known[session]) if known[session] and choice.random() < 0.7 else None
        body = body_of(session, f"{number} A", choice.choice([1, 3, 200])) | {"rid": f"turmoil{number}"}
        if session != sessions[0]:
            body["session_params"] |= {"replace": choice.random() < 0.2}
            body["session_params"] |= {"rid": parent[0]} if parent is not None else {}
        how = choice.choice(["whole", "whole", "stream", "abort", "leave"])
        if how == "leave":
            async with server.session.post(server.url + "/generate", json=body | {"stream": True}) as response:
                await response.content.readline()
            return
        task = asyncio.create_task(server.post("/generate", body | {"stream": how == "stream"}))
        if how == "abort":
            await asyncio.sleep(choice.random() / 50)
            await server.post("/abort_request", {"rid": f"turmoil{number}"})
        reply = await task
        if reply.status == 400:
            return  # what it continues was replaced, runs still, or the session is busy
        result = reply.events[-2] if how == "stream" else reply.json()
        if reply.status != 200 or "error" in result:
            wrong.append(reply.text[:300])
            return
        prompt = shown(result)
        if session != sessions[0] and prompt != (parent[1] if parent is not None else "") + f"{number} A":
            wrong.append(f"{prompt!r} continues {parent}")
        known[session].append((f"turmoil{number}", prompt + result["text"]))

    for start in range(0, 160, 16):
        await asyncio.gather(*(one(number) for number in range(start, start + 16)))
    assert wrong == []
    assert sum(map(len, known.values())) > 40
    await server.idle()
    for session in sessions:
        await server.post("/close_session", {"session_id": session})
    assert (len(store), store.num_bytes) == (before, held)
