"""Small parts of the server: keys, ids, bodies, offsets, refused fields, the shown command line."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_lite.config import ServerConfig
from sglang_lite.server.auth import is_allowed
from sglang_lite.server.bodies import decode_json
from sglang_lite.server.context import ServerContext
from sglang_lite.server.identity import Identity
from sglang_lite.server.run import launch_command
from sglang_lite.server.sequences import choice_sampling, namespace_of
from sglang_lite.server.token_text import OffsetCounter
from sglang_lite.server.unsupported import refuse_unsupported, wanted_replica
from sglang_lite.types import RequestError, SamplingParams
from tests.support.fake_engine import FakeEngine


@pytest.mark.parametrize(
    ("path", "keys", "sent", "allowed"),
    [
        ("/generate", (None, None), "", True),
        ("/generate", ("user", None), "Bearer user", True),
        ("/generate", ("user", None), "Bearer \udcff", False),
        ("/generate", ("ké", None), "Bearer ké", True),
        ("/generate", ("user", None), "Bearer other", False),
        ("/generate", ("user", None), "Bearer üser", False),
        ("/generate", ("user", None), "", False),
        ("/generate", (None, "admin"), "", True),
        ("/generate", ("user", "admin"), "Bearer user", True),
        ("/generate", ("user", "admin"), "Bearer admin", False),
        ("/flush_cache", (None, None), "", True),
        ("/flush_cache", ("user", None), "bearer user", True),
        ("/flush_cache", (None, "admin"), "", False),
        ("/flush_cache", (None, "admin"), "Bearer admin", True),
        ("/flush_cache", ("user", "admin"), "Bearer user", False),
        ("/flush_cache", ("user", "admin"), "Bearer admin", True),
        ("/health_generate", ("user", "admin"), "", True),
        ("/ready", ("user", None), "", True),
        ("/metrics", ("user", None), "", True),
    ],
)
def test_which_key_opens_what(path: str, keys: tuple[str | None, str | None], sent: str, allowed: bool) -> None:
    assert is_allowed("POST", path, sent, *keys) is allowed
    assert is_allowed("OPTIONS", path, sent, *keys)


@pytest.mark.parametrize("body", [b"", b" ", b"{", b"\xff", b"[" * 60_000, b'{"a":' * 60_000, b'"\\ud800 NaN"'])
def test_bad_json(body: bytes) -> None:
    with pytest.raises(RequestError):
        decode_json(body)


def test_numbers_that_json_does_not_have() -> None:
    value = decode_json(b'{"a": NaN, "b": Infinity, "c": 1e999, "d": 12345678901234567890123}')
    assert value["a"] != value["a"]
    assert value["b"] == value["c"] == float("inf")
    assert value["d"] == 12345678901234567890123


def test_header_ids_are_shown_but_are_no_keys() -> None:
    context = ServerContext(FakeEngine())
    one, two = [Identity.read(context, {}, {"X-Request-Id": "x"}, "cmpl-") for _ in range(2)]
    assert one.shown == two.shown == "cmpl-x"
    assert one.base != two.base and one.base.startswith("cmpl-x-")
    given = Identity.read(context, {"rid": "mine"}, {"X-Request-Id": "x"}, "cmpl-")
    assert (given.shown, given.base) == ("cmpl-mine", "mine")
    made = Identity.read(context, {}, {}, "cmpl-")
    assert made.shown == made.base and made.base.startswith("cmpl-")


def test_offsets_of_tokens_inside_characters() -> None:
    counter = OffsetCounter()
    pieces = ["é".encode()[:1], "é".encode()[1:], b"ab", b"", "🙂".encode()[:2], "🙂".encode()[2:], b"c"]
    assert [counter.next(piece) for piece in pieces] == [0, 0, 1, 3, 3, 3, 4]


def test_choices_have_seeds_of_their_own() -> None:
    seeded = SamplingParams(seed=2**63 - 1, n=3)
    assert [choice_sampling(seeded, choice).seed for choice in range(3)] == [2**63 - 1, 0, 1]
    assert choice_sampling(SamplingParams(), 2).seed is None


def test_name_spaces() -> None:
    assert namespace_of({}) == ""
    assert namespace_of({"cache_salt": "ab"}) != namespace_of({"cache_salt": "a", "extra_key": "b"})
    assert namespace_of({"cache_salt": "a", "extra_key": "b\x1f"}) != namespace_of({"cache_salt": "a\x1fb"})
    assert namespace_of({"cache_salt": ["x", "y"]}, 1, 2) == namespace_of({"cache_salt": "y"})
    for wrong in ({"cache_salt": ["x"]}, {"extra_key": "x" * 1025}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            namespace_of(wrong, 0, 2)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"bootstrap_room": 0}, 501),
        ({"watermark": {}}, 0),
        ({"suffix": "a"}, 400),
        ({"image_data": ["x"]}, 400),
        ({"session_params": {}}, 0),
        ({"session_id": [None, None], "return_hidden_states": False, "bootstrap_room": [None]}, 0),
    ],
)
def test_unsupported_fields(body: dict[str, Any], status: int) -> None:
    config = ServerConfig(model_path="m", device="cpu")
    if not status:
        refuse_unsupported(body, config)
        return
    with pytest.raises(RequestError) as caught:
        refuse_unsupported(body, config)
    assert caught.value.status == status
    assert caught.value.field == next(iter(body))


def test_ranks() -> None:
    assert wanted_replica({}, None, 2) is None
    assert wanted_replica({"disagg_prefill_dp_rank": 1}, None, 2) is None
    assert wanted_replica({"routed_dp_rank": 0}, None, 1) == 0
    assert wanted_replica({"routed_dp_rank": 9}, "1", 2) == 1
    for body, header in (({"data_parallel_rank": 1}, None), ({}, "x"), ({}, "2"), ({"routed_dp_rank": "0"}, None)):
        with pytest.raises(RequestError):
            wanted_replica(body, header, 1)


def test_secrets_are_not_shown() -> None:
    shown = launch_command(["serve", "--api-key", "secret", "--admin-api-key=hidden", "--port", "1"])
    assert shown == "serve --api-key ****** --admin-api-key=****** --port 1"
    assert launch_command(["--admin", "hidden", "--api=secret", "-a"]) == "--admin ****** --api=****** -a"
