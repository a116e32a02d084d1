"""Ids of requests."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_lite.frontend.request_ids import RequestIds, parse_request_id, with_prefix
from sglang_lite.types import RequestError


def test_made_ids_are_unique_and_none_begins_another() -> None:
    ids = RequestIds()
    made = [ids.make(0xABC, "cmpl-") for _ in range(300)]
    assert made[0] == "cmpl-abc-00000001"
    assert not any(a != b and b.startswith(a) for a in made for b in made)


def test_prefix_is_not_doubled() -> None:
    assert with_prefix("chatcmpl-", "chatcmpl-abc") == "chatcmpl-abc"
    assert with_prefix("chatcmpl-", "abc") == "chatcmpl-abc"


@pytest.mark.parametrize("value", ["", "x" * 257, "x" * 1_000_000, "a\nb", "a\x00", 5, None, ["a"]])
def test_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="rid") as caught:
        parse_request_id(value)
    assert caught.value.field == "rid"
    assert len(caught.value.message) < 600


def test_accepted() -> None:
    assert parse_request_id("my-1 é") == "my-1 é"
