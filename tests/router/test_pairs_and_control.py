"""Prefill and decode pools, and calls to all workers (C914 to C922)."""

from __future__ import annotations

import msgspec
import pytest
from aiohttp import web

from tests.router.test_proxy import CHAT, CHAT_PATH, code_of, fixed
from tests.support.null_workers import LAYOUT, NullWorker, router_over


def prefill(port: int | None = 8998, **info: object) -> NullWorker:
    return NullWorker(disaggregation_mode="prefill", disaggregation_bootstrap_port=port, **info)


def decode(**info: object) -> NullWorker:
    return NullWorker(disaggregation_mode="decode", **info)


async def test_both_sides_get_the_same_body() -> None:
    """C914."""
    one, other = prefill(), decode()
    async with router_over(one, other) as router:
        status, headers, body = await router.post(CHAT_PATH, {**CHAT, "bootstrap_room": 1})
        assert (status, msgspec.json.decode(body)["worker"]) == (200, other.url)
        assert one.seen[0][2] == other.seen[0][2]
        sent = msgspec.json.decode(other.seen[0][2])
        assert (sent["bootstrap_host"], sent["bootstrap_port"]) == ("127.0.0.1", 8998)
        assert 0 <= sent["bootstrap_room"] < 2**63
        assert headers["x-sgl-decode-url"] == other.url == one.seen[0][1]["x-sgl-decode-url"]
        assert headers["x-sgl-bootstrap-room"] == str(sent["bootstrap_room"])
        assert {name: sent[name] for name in CHAT} == CHAT
        await router.post("/generate", {"input_ids": [[1], [2], [3]]})
        batch = msgspec.json.decode(one.seen[-1][2])
        assert batch["bootstrap_host"] == ["127.0.0.1"] * 3 and len(set(batch["bootstrap_room"])) == 3


async def test_an_error_of_prefill_does_not_spoil_the_answer() -> None:
    one, other = prefill(), decode()
    one.answer = fixed(500)
    async with router_over(one, other) as router:
        assert (await router.post(CHAT_PATH, CHAT))[0] == 200


async def test_log_probabilities_of_the_prompt_come_from_prefill() -> None:
    one, other = prefill(), decode()
    one.answer = fixed(200, b'{"meta_info":{"input_token_logprobs":[1,2]}}')
    other.answer = fixed(200, b'{"text":"x","meta_info":{"input_token_logprobs":[3]}}')
    async with router_over(one, other) as router:
        _, _, body = await router.post("/generate", {"text": "a", "return_logprob": True})
        assert msgspec.json.decode(body) == {"text": "x", "meta_info": {"input_token_logprobs": [1, 2, 3]}}


@pytest.mark.parametrize(
    ("workers", "code"),
    [
        ([prefill, None], "no_decode_workers_available"),
        ([None, decode], "no_prefill_workers_available"),
        ([lambda: prefill(None), decode], "worker_misconfigured"),
        ([prefill, lambda: decode(kv_cache={**LAYOUT, "page_size": 32})], "no_decode_workers_available"),
        ([prefill, lambda: decode(kv_cache={**LAYOUT, "dtype": "bfloat16"})], "no_decode_workers_available"),
        ([prefill, lambda: decode(kv_cache={**LAYOUT, "kv_heads": 3})], "no_decode_workers_available"),
    ],
)
async def test_no_pair(workers: list, code: str) -> None:  # type: ignore[type-arg]
    """C916, C918: nobody is called."""
    made = [make() for make in workers if make is not None]
    async with router_over(*made) as router:
        status, _, body = await router.post(CHAT_PATH, CHAT)
        assert (status, code_of(body)) == (503, code)
        assert not any(worker.seen for worker in made)


@pytest.mark.parametrize(("workers", "status"), [([prefill], 503), ([decode], 503), ([prefill, decode], 200)])
async def test_one_half_is_not_ready(workers: list, status: int) -> None:  # type: ignore[type-arg]
    async with router_over(*(make() for make in workers)) as router:
        assert (await router.get("/readyz"))[0] == status


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/classify", "/v1/score", "/v1/responses"])
async def test_what_pairs_do_not_serve(path: str) -> None:
    """C919."""
    async with router_over(prefill(), decode()) as router:
        assert (await router.post(path, {"model": "m"}))[0] == 400


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/flush_cache", {}, "flushed_workers"),
        ("/abort_request", {"rid": "r"}, "affected_workers"),
        ("/abort_request", {"abort_all": True}, "affected_workers"),
        ("/pause_generation", {}, "affected_workers"),
        ("/continue_generation", {}, "affected_workers"),
        ("/start_profile", {}, "affected_workers"),
        ("/update_weights_from_disk", {"model_path": "p", "load_format": "auto"}, "updated_workers"),
        ("/update_weight_version", {"new_version": "2"}, "updated_workers"),
    ],
)
async def test_control_reaches_both_pools(path: str, body: dict[str, object], count: str) -> None:
    """C920."""
    one, other = prefill(), decode()
    async with router_over(one, other) as router:
        status, _, answer = await router.post(path, body)
        decoded = msgspec.json.decode(answer)
        assert (status, decoded[count], one.count(path), other.count(path)) == (200, 2, 1, 1)
        assert decoded["success"] is True and {"message", "model"} <= set(decoded)
        other.answer = fixed(409, b"busy", "text/plain")
        status, _, answer = await router.post(path, body)
        assert (status, answer) == (409, b"busy")


async def test_loads_with_a_dead_worker() -> None:
    """C921."""
    one, other = NullWorker(), NullWorker()
    async with router_over(one, other) as router:
        dead = other.url
        await other.server.close()
        answer = msgspec.json.decode((await router.get("/v1/loads"))[2])
        assert {entry["worker"]: entry["load"] for entry in answer["loads"]} == {one.url: 7, dead: -1}
        assert (answer["total_workers"], answer["successful"], answer["failed"]) == (2, 1, 1)
        assert answer["aggregate"] == {"total_tokens": 7}


@pytest.mark.parametrize(
    "answer",
    [
        {"num_paused_requests": "many", "completed_batches": "x", "aggregate": {"total_tokens": 1e30}},
        {"num_paused_requests": -1, "completed_batches": [1], "aggregate": {"total_tokens": -5}},
        {"num_paused_requests": 2**63, "completed_batches": True, "aggregate": {"total_tokens": 2**63}},
        {"num_paused_requests": None, "pending_batches": {}, "aggregate": []},
        [1],
        "text",
    ],
)
async def test_workers_that_answer_control_calls_oddly(answer: object) -> None:
    """Their answers count as nothing; those of the others do."""
    odd, fine = NullWorker(), NullWorker()
    counts = {"num_paused_requests": 3, "completed_batches": 2, "pending_batches": 1, "more": [1]}
    odd.answer = fixed(200, msgspec.json.encode(answer))
    fine.answer = fixed(200, msgspec.json.encode({**counts, "aggregate": {"total_tokens": 7}}))
    async with router_over(odd, fine) as router:
        status, _, body = await router.post("/update_weights_from_disk", {"model_path": "m"})
        assert (status, msgspec.json.decode(body)["num_paused_requests"]) == (200, 3)
        status, _, body = await router.get("/poll_transfers")
        told = msgspec.json.decode(body)
        assert (status, told["completed_batches"], told["more"]) == (200, 2, [1])
        status, _, body = await router.get("/v1/loads")
        told = msgspec.json.decode(body)
        assert (status, told["aggregate"]["total_tokens"], told["failed"]) == (200, 7, 1)


async def test_a_control_call_that_one_of_three_does_not_get() -> None:
    first, gone, last = NullWorker(), NullWorker(), NullWorker()
    async with router_over(first, gone, last) as router:
        await gone.server.close()
        status, _, body = await router.post("/flush_cache", {})
        assert (status, code_of(body)) == (502, "upstream_unreachable")
        assert b"1 of 3 workers failed, the others got the call" in body
        assert first.count("/flush_cache") == last.count("/flush_cache") == 1


async def test_a_worker_that_is_well_answers_for_all() -> None:
    gone, fine = NullWorker(), NullWorker()
    async with router_over(gone, fine) as router:
        router.context.registry.workers[gone.url].healthy = False
        assert (await router.get("/model_info"))[0] == 200
        assert (gone.count("/model_info"), fine.count("/model_info")) == (0, 1)


async def test_engine_info_needs_a_rank() -> None:
    """C922."""
    worker = NullWorker()
    async with router_over(worker) as router:
        assert (await router.get("/remote_instance_transfer_engine_info"))[0] == 400
        assert worker.seen == []
        answer = msgspec.json.decode((await router.get("/remote_instance_transfer_engine_info?rank=0"))[2])
        assert (answer["queried_workers"], answer["worker_type"]) == (1, "regular")


async def test_transfers_add_up() -> None:
    one, other = prefill(), decode()

    async def answer(request: web.Request, data: bytes) -> web.StreamResponse:
        return web.json_response(
            {"completed_batches": 2, "pending_batches": 0, "completed_descriptor_checksums": ["a"]}
        )

    one.answer = other.answer = answer
    async with router_over(one, other) as router:
        assert msgspec.json.decode((await router.get("/poll_transfers"))[2]) == {
            "completed_batches": 4,
            "pending_batches": 0,
            "completed_descriptor_checksums": ["a", "a"],
        }


async def test_workers_come_and_go() -> None:
    worker = NullWorker()
    async with router_over(worker) as router:
        listed = msgspec.json.decode((await router.get("/workers"))[2])["workers"][0]
        assert (listed["url"], listed["is_healthy"], listed["model_id"]) == (worker.url, True, "m")
        assert (await router.post("/workers", {"url": worker.url + "/"}))[0] == 400
        async with router.session.delete(f"{router.url}/workers/{listed['id']}") as response:
            assert response.status == 202
        assert code_of((await router.post(CHAT_PATH, CHAT))[2]) == "no_healthy_workers"
        assert (await router.get(f"/workers/{listed['id']}"))[0] == 404
