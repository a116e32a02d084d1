"""Batching, readers, tokenization, replies, the load meter and the socket transport, one by one."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from sglang_lite.engine.batching import Submission, build_columns
from sglang_lite.engine.client import EngineClient
from sglang_lite.engine.frames import decode_event, encode_control
from sglang_lite.engine.limits import PreparedPrompt
from sglang_lite.engine.local import LocalTransport
from sglang_lite.engine.messages import Ping, Reply
from sglang_lite.engine.reader import RequestReader
from sglang_lite.engine.result import generation_result, result_options
from sglang_lite.engine.tokenization import INLINE_CHARACTERS, TokenizationPool
from sglang_lite.engine.transport import FRONT_SHIFT, ZmqTransport
from sglang_lite.frontend.request import (
    FinishReason,
    GenerateRequest,
    GenerationOutput,
    PromptVectors,
    TokenLogprobs,
)
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.types import NO_SEED, LogprobRecord, OutputColumns, RequestError, RequestFlags, SamplingParams
from tests.unit.engine.fakes import rows


def test_vectors_are_cut_with_their_prompt_and_have_a_name_space_of_their_own() -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    shared = PromptVectors(values)
    embeds = [shared, shared, PromptVectors(values), None]
    requests = [GenerateRequest(request_id=str(i), embeds=given, namespace="salt") for i, given in enumerate(embeds)]
    prompts = [np.zeros(length, np.int32) for length in (4, 3, 4, 2)]
    columns = build_columns(
        [
            Submission(key, request, PreparedPrompt(prompt, 5))
            for key, (request, prompt) in enumerate(zip(requests, prompts, strict=True))
        ]
    )
    assert {index: len(matrix) for index, matrix in columns.embeds.items()} == {0: 4, 1: 3, 2: 4}
    names = [columns.extras[index].namespace for index in range(4)]
    assert names[0] == names[1] and len(set(names)) == 3 and names[3] == "salt"


def test_columns_hold_what_the_requests_ask() -> None:
    prompts = [np.array([1, 2], np.int32), np.array([3], np.int32), np.array([4], np.int32)]
    requests = [
        GenerateRequest(request_id="a", sampling=SamplingParams(temperature=0.5, seed=3, top_k=7), priority=2),
        GenerateRequest(
            request_id="b",
            sampling=SamplingParams(ignore_eos=True, stop_token_ids=(9,), logit_bias={4: 1.5}),
            namespace="salt",
            timeout=1.5,
        ),
        GenerateRequest(
            request_id="c",
            sampling=SamplingParams(stop_token_ids=(9,)),
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=2,
            token_ids_logprob=(5,),
        ),
    ]
    submissions = [
        Submission(10 + index, request, PreparedPrompt(prompt, 20 + index))
        for index, (request, prompt) in enumerate(zip(requests, prompts, strict=True))
    ]
    columns = build_columns(submissions)
    assert columns.key.tolist() == [10, 11, 12]
    assert columns.num_tokens.tolist() == [2, 1, 1]
    assert columns.token_ids.tolist() == [1, 2, 3, 4]
    assert columns.max_new_tokens.tolist() == [20, 21, 22]
    assert columns.seed.tolist() == [3, NO_SEED, NO_SEED]
    assert columns.priority.tolist() == [2, 0, 0]
    assert columns.flags.tolist() == [0, int(RequestFlags.IGNORE_EOS), int(RequestFlags.RETURN_LOGPROB)]
    assert columns.logprob_start.tolist() == [-1, -1, 0]
    assert columns.timeout.tolist() == [0.0, 1.5, 0.0]
    assert sorted(columns.extras) == [1, 2]
    assert columns.extras[1].stop_token_ids == (), "ignore_eos ignores the request's stop ids too"
    assert columns.extras[1].namespace == "salt"
    assert columns.extras[1].logit_bias == {4: 1.5}
    assert columns.extras[2].stop_token_ids == (9,)
    assert columns.extras[2].token_ids_logprob == (5,)


async def test_a_reader_remembers_one_notice() -> None:
    reader = RequestReader()
    for _ in range(5):
        reader.notify()
    await asyncio.wait_for(reader.wait(), 1)
    waiting = asyncio.create_task(reader.wait())
    await asyncio.sleep(0)
    assert not waiting.done(), "notices that came together are one"
    reader.notify()
    await asyncio.wait_for(waiting, 1)


async def test_one_bad_text_does_not_spoil_its_batch(chain_model: Path) -> None:
    pool = TokenizationPool(Tokenizer.load(chain_model))
    good, bad = "A" * (INLINE_CHARACTERS + 1), "A" * INLINE_CHARACTERS + "\ud83d"
    texts = (good, bad, good)
    encoded = (pool.encode(text, add_special_tokens=True) for text in texts)
    results = await asyncio.gather(*encoded, return_exceptions=True)
    assert isinstance(results[1], RequestError)
    assert results[0] == results[2] == [65] * len(good)
    pool.close()


def test_a_reply_shows_log_probabilities_where_asked() -> None:
    output = GenerationOutput(
        request_id="r",
        text="hi",
        output_ids=[5],
        finish_reason=FinishReason("stop", matched=5),
        prompt_tokens=1,
        completion_tokens=1,
        cached_tokens=0,
        input_logprobs=[TokenLogprobs(7, None)],
        output_logprobs=[TokenLogprobs(5, -0.5, ((-0.5, 5),), ((-3.0, 6),))],
        received_at=1.0,
        finished_at=3.5,
    )
    plain = generation_result(output, result_options(GenerateRequest(request_id="r"), with_text=False))
    assert "text" not in plain
    assert "output_token_logprobs" not in plain["meta_info"]
    assert plain["meta_info"]["e2e_latency"] == 2.5
    request = GenerateRequest(request_id="r", return_logprob=True, top_logprobs_num=1, token_ids_logprob=(6,))
    info = generation_result(output, result_options(request, token_text=str))["meta_info"]
    assert info["input_token_logprobs"] == [[None, 7, "7"]]
    assert info["input_top_logprobs"] == [None]
    assert info["output_token_logprobs"] == [[-0.5, 5, "5"]]
    assert info["output_top_logprobs"] == [[[-0.5, 5, "5"]]]
    assert info["output_token_ids_logprobs"] == [[[-3.0, 6, "6"]]]


def test_a_command_wakes_the_local_transport() -> None:
    transport = LocalTransport(lambda columns: None, lambda event: None)
    timer = threading.Timer(0.05, transport.put, [Ping(0, 1)])
    timer.start()
    started = time.perf_counter()
    assert transport.receive(10.0) == [Ping(0, 1)]
    assert time.perf_counter() - started < 5.0
    assert transport.receive(0) == []


def _scores(key: int) -> LogprobRecord:
    token, none = np.zeros(1, np.int32), np.zeros((1, 0), np.float32)
    return LogprobRecord(
        key=key,
        prompt=True,
        token_ids=token,
        logprobs=np.zeros(1, np.float32),
        top_ids=token.reshape(1, 1)[:, :0],
        top_logprobs=none,
        extra_logprobs=none,
        hidden=none,
    )


def test_rows_go_to_the_front_that_owns_them(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoints = [f"ipc://{tmp_path}/front{index}" for index in range(2)]
    fronts = [context.socket(zmq.PULL) for _ in endpoints]
    for socket, endpoint in zip(fronts, endpoints, strict=True):
        socket.bind(endpoint)
    transport = ZmqTransport(context, f"ipc://{tmp_path}/core", endpoints)
    keys = [1, (1 << FRONT_SHIFT) + 1, 2]
    transport.send_output(rows(keys, token=3, messages={keys[1]: "for the second"}))
    # Chunks of prompts have scores and no row, beside rows of their front and alone.
    transport.send_output(rows([1], token=3, logprobs=[_scores(2), _scores(keys[1])]))
    transport.send(Reply(5), front=1)
    first, second = (decode_event(socket.recv_multipart()) for socket in fronts)
    assert isinstance(first, OutputColumns)
    assert isinstance(second, OutputColumns)
    assert first.key.tolist() == [1, 2]
    assert (second.key.tolist(), second.messages) == ([keys[1]], {keys[1]: "for the second"})
    first, second = (decode_event(socket.recv_multipart()) for socket in fronts)
    assert isinstance(first, OutputColumns)
    assert isinstance(second, OutputColumns)
    assert (first.key.tolist(), [record.key for record in first.logprobs]) == ([1], [2])
    assert (second.key.tolist(), [record.key for record in second.logprobs]) == ([], [keys[1]])
    assert decode_event(fronts[1].recv_multipart()) == Reply(5)
    transport.close(0)
    for socket in fronts:
        socket.close(0)
    context.term()


def test_a_wait_of_any_length_ends_with_a_command(tmp_path: Path) -> None:
    """A time-out of a month or more must not end the core."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    transport = ZmqTransport(context, f"ipc://{tmp_path}/core", [])
    sender = context.socket(zmq.PUSH)
    sender.connect(f"ipc://{tmp_path}/core")
    local = LocalTransport(lambda columns: None, lambda event: None)
    for seconds in (3e6, 1e300, float("inf")):
        sender.send_multipart(encode_control(Ping(0, 1)))
        assert transport.receive(seconds) == [Ping(0, 1)]
        threading.Timer(0.01, local.put, [Ping(0, 1)]).start()
        assert local.receive(seconds) == [Ping(0, 1)]
    sender.close(0)
    transport.close(0)
    context.term()


async def test_commands_that_the_socket_cannot_take_are_sent_later_in_order(tmp_path: Path) -> None:
    client: Any = EngineClient()
    core = client._context.socket(zmq.PULL)
    core.setsockopt(zmq.RCVHWM, 1)
    core.bind(f"ipc://{tmp_path}/ingress")
    client._ingress = client._context.socket(zmq.PUSH)
    client._ingress.setsockopt(zmq.SNDHWM, 1)
    client._ingress.connect(f"ipc://{tmp_path}/ingress")
    for number in range(200):
        client.finish([number])
    assert client._outbox, "more than the socket takes"
    received = []
    async with asyncio.timeout(10):
        while len(received) < 200:
            if core.poll(0):
                received.append(core.recv_multipart())
            else:
                await asyncio.sleep(0.001)
    numbers = [int(np.frombuffer(frame[1], np.int64)[0]) for frame in received]
    assert numbers == list(range(200))
    core.close(0)
    await client.close()
