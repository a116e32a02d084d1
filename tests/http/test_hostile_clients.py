"""Clients that break the protocol or send odd values: an error reply at most, and the server serves on."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.chain_model import HIDDEN_SIZE
from tests.support.server import LocalServer

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"


async def check_alive(server: LocalServer) -> None:
    assert (await server.generate("A", sampling={"max_new_tokens": 1}))["text"] == "B"


async def send_raw(server: LocalServer, data: bytes, *, patience: float = 10) -> bytes:
    """Send bytes and return whatever comes back before the server closes, or within ``patience`` seconds."""
    address = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(patience):
            return await reader.read()
    except (ConnectionError, TimeoutError):
        return b""
    finally:
        writer.close()


def request(path: str, headers: bytes = b"", body: bytes = b"", method: str = "POST") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n".encode()
    return head + b"Content-Type: application/json\r\n" + headers + b"\r\n" + body


def status_of(reply: bytes) -> int:
    return int(reply.split(b" ", 2)[1])


GOOD = json.dumps({"text": "G", "sampling_params": {"temperature": 0}}).encode()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (gzip.compress(GOOD), 200),
        (b"no gzip at all", 400),
        (gzip.compress(GOOD)[:-12], 400),
        (gzip.compress(b" " * (64 * 2**20)), 413),
    ],
    ids=["sound", "not-compressed", "cut", "bomb"],
)
async def test_compressed_bodies(server: LocalServer, body: bytes, status: int) -> None:
    reply = await send_raw(server, request(GENERATE, b"Content-Encoding: gzip\r\n", body))
    assert status_of(reply) == status, reply[-300:]
    await check_alive(server)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
        b"BREW /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["bare", "nonsense", "cut", "negative", "chunks", "both-lengths", "method", "long-header", "tls"],
)
async def test_broken_protocol(server: LocalServer, data: bytes) -> None:
    reply = await send_raw(server, data, patience=0.5)
    assert not reply.startswith(b"HTTP/1.1 5"), reply[:300]
    await check_alive(server)


async def test_headers_that_are_no_text(server: LocalServer, uncached_server: LocalServer) -> None:
    keyed = await send_raw(uncached_server, request("/v1/models", b"Authorization: Bearer \xff\xfe\r\n", method="GET"))
    assert status_of(keyed) == 401
    for name in (b"Origin", b"X-Request-Id", b"X-Data-Parallel-Rank"):
        reply = await send_raw(server, request(COMPLETIONS, name + b": \xff\xfe\r\n", b'{"prompt": "G"}'))
        assert status_of(reply) == (200 if name == b"Origin" else 400), reply
    preflight = b"Origin: x\xff\r\nAccess-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: \xff\r\n"
    assert status_of(await send_raw(server, request(CHAT, preflight, method="OPTIONS"))) == 200


@pytest.mark.parametrize(
    "path",
    ["/health/../v1/models", "/health/%2e%2e/v1/models", "//v1/models", "/metrics/../v1/models", "/%76%31/models"],
)
async def test_paths_do_not_go_around_the_key(uncached_server: LocalServer, path: str) -> None:
    assert status_of(await send_raw(uncached_server, request(path, method="GET"))) in (401, 404)


@pytest.mark.parametrize("query", ["dp_rank=--5", "dp_rank=" + "9" * 5000, "dp_rank=%C2%B2", "dp_rank=", "include=%ff"])
async def test_load_queries_that_are_wrong(server: LocalServer, query: str) -> None:
    reply = await send_raw(server, request(f"/v1/loads?{query}", method="GET"))
    assert status_of(reply) == 400, reply
    assert query.partition("=")[0].encode() in reply


async def test_empty_include_is_everything(server: LocalServer) -> None:
    assert "num_running_reqs" in (await server.get("/v1/loads?include=")).json()["loads"][0]


@pytest.mark.parametrize("timeout", ["-1", "nan", "inf", "1e999", "x", "", "3601"])
async def test_flush_waits_a_sane_time(server: LocalServer, timeout: str) -> None:
    reply = await server.post(f"/flush_cache?timeout={timeout}")
    assert reply.status == 400
    assert "timeout" in reply.json()["error"]["message"]


ODD_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 5.0, 1.5, 1e308, -1e308, 2**63, -(2**63) - 1, 10**400, float("nan"), float("inf")),
    *("", "x", "🙂", [], {}, [None], [[]], [{}], {"a": 1}, [1], ["x"]),
]

NATIVE_FIELDS = """
    text input_ids input_embeds image_data sampling_params rid request_id stream return_logprob logprob_start_len
    top_logprobs_num token_ids_logprob return_text_in_logprobs return_prompt_token_ids return_hidden_states
    lora_path session_id session_params priority extra_key cache_salt routed_dp_rank data_parallel_rank bootstrap_host
    bootstrap_room max_thinking_tokens custom_labels
"""
SAMPLING_FIELDS = """
    max_new_tokens min_new_tokens temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty
    stop stop_token_ids stop_token_id stop_regex ignore_eos skip_special_tokens spaces_between_special_tokens
    no_stop_trim n json_schema regex ebnf structural_tag choice logit_bias sampling_seed stream_interval beam_width
    custom_params watermark
"""
OPENAI_FIELDS = """
    model max_tokens temperature top_p n stream stream_options logprobs echo best_of user suffix stop seed logit_bias
    presence_penalty frequency_penalty top_k min_p repetition_penalty min_tokens regex response_format stop_token_ids
    stop_regex no_stop_trim ignore_eos skip_special_tokens rid cache_salt priority session_id session_params
"""
COMPLETION_FIELDS = f"prompt {OPENAI_FIELDS}"
CHAT_FIELDS = f"""
    messages max_completion_tokens top_logprobs tools tool_choice parallel_tool_calls reasoning_effort
    chat_template_kwargs continue_final_message add_generation_prompt input_ids {OPENAI_FIELDS}
"""


def odd_bodies(path: str) -> list[tuple[str, Any]]:
    """(field, body) with every field at every odd value, and few tokens otherwise."""
    message = {"role": "user", "content": "A"}
    if path == GENERATE:
        plain = {"sampling_params": {"max_new_tokens": 2}}
        bodies = [
            (name, {**({} if name == "input_ids" else {"text": "A"}), **plain, name: value})
            for name in NATIVE_FIELDS.split()
            for value in ODD_VALUES
        ]
        return bodies + [
            (name, {"text": "A", "sampling_params": {"max_new_tokens": 2, name: value}})
            for name in SAMPLING_FIELDS.split()
            for value in ODD_VALUES
        ]
    names, base = (
        (COMPLETION_FIELDS, {"prompt": "A"}) if path == COMPLETIONS else (CHAT_FIELDS, {"messages": [message]})
    )
    return [(name, {**base, "max_tokens": 2, name: value}) for name in names.split() for value in ODD_VALUES]


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, CHAT])
async def test_odd_values_of_every_field(server: LocalServer, path: str) -> None:
    """A value is served or refused by name; nothing is a fault of the server."""
    gate, wrong = asyncio.Semaphore(32), []

    async def send(name: str, body: Any) -> None:
        async with gate:
            headers = {"Content-Type": "application/json"}
            reply = await server.call("POST", path, data=json.dumps(body).encode(), headers=headers)
        words = reply.text.lower().replace("_", " ")
        named = name.removesuffix("s").replace("_", " ") in words or "unknown field `a`" in words
        if reply.status not in (200, 400, 501) or (reply.status != 200 and not named):
            wrong.append((name, body, reply.status, reply.text[:200]))

    await asyncio.gather(*(send(name, body) for name, body in odd_bodies(path)))
    assert wrong == [], "\n".join(str(w)[:400] for w in wrong)
    await server.idle()
    await check_alive(server)


SESSION_ROUTES = {
    "/open_session": ({"capacity_of_str_len": 5}, "capacity_of_str_len session_id streaming timeout"),
    "/close_session": ({"session_id": "s"}, "session_id"),
    "/vertex_generate": ({"instances": [{"text": "G"}]}, "instances parameters"),
    "/classify": ({"text": "A"}, "text input_ids"),
    "/set_internal_state": ({}, "server_args"),
    "/resume_memory_occupation": ({}, "tags"),
}


async def test_odd_values_of_sessions_and_vectors(server: LocalServer) -> None:
    """Nothing is a fault of the server, and nothing stays behind."""
    sessions = server.context.sessions
    before, held = len(sessions), sessions.num_bytes
    session = (await server.post("/open_session", {"capacity_of_str_len": 0})).json()
    few = {"sampling_params": {"max_new_tokens": 1}}
    bodies = [
        ("/generate", {"text": "A", **few, "session_params": {"id": session, name: value}})
        for name in ("id", "rid", "offset", "replace", "drop_previous_output")
        for value in ODD_VALUES
    ]
    row = [0.0] * HIDDEN_SIZE
    odd_rows = [[row, value] for value in ODD_VALUES] + [[[*row[1:], value]] for value in ODD_VALUES]
    bodies += [("/generate", {"input_embeds": rows, **few}) for rows in odd_rows]
    for path, (base, names) in SESSION_ROUTES.items():
        bodies += [(path, {**base, name: value}) for name in names.split() for value in ODD_VALUES]
    gate, wrong, opened = asyncio.Semaphore(32), [], []

    async def send(path: str, body: Any) -> None:
        async with gate:
            reply = await server.call("POST", path, data=json.dumps(body).encode())
        if path == "/open_session" and reply.status == 200:
            opened.append(reply.json())
        if reply.status not in (200, 400, 501):
            wrong.append((path, body, reply.status, reply.text[:200]))

    await asyncio.gather(*(send(path, body) for path, body in bodies))
    assert wrong == [], "\n".join(str(w)[:400] for w in wrong)
    for name in (session, *opened):
        await server.post("/close_session", {"session_id": name})
    assert (len(sessions), sessions.num_bytes) == (before, held)
    await server.idle()
    await check_alive(server)
