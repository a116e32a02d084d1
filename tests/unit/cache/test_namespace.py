"""Name spaces as text and back, and what they do to published hashes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_lite.cache import PagePool, RadixCache
from sglang_lite.cache.block_hash import block_hashes
from sglang_lite.cache.events import BlockRemoved, BlockStored, KVEventLog
from sglang_lite.cache.namespace import (
    EVERYONE,
    EventFormat,
    Namespace,
    adapter_namespace,
    join_namespace,
    split_namespace,
)

IDS = np.arange(8, dtype=np.int32)


@given(st.text(max_size=6), st.text(max_size=6), st.none() | st.text("abc=-.", min_size=1, max_size=5))
def test_splitting_undoes_joining(salt: str, extra_key: str, adapter: str | None) -> None:
    identity = "" if adapter is None else "lora7"
    text = (
        join_namespace(salt, extra_key)
        if adapter is None
        else (adapter_namespace(7, adapter) + join_namespace(salt, extra_key))
    )
    assert split_namespace(text) == Namespace(salt or None, identity + extra_key or None, adapter)


def test_no_namespace_and_a_plain_salt() -> None:
    assert split_namespace("") == EVERYONE
    assert split_namespace("plain") == Namespace(salt="plain")


def events_of(namespace: str, form: EventFormat) -> tuple[list[BlockStored], list[int]]:
    """What is published for two pages in a name space, and the hashes of their removal."""
    log = KVEventLog(form=form)
    cache = RadixCache(PagePool(8, 4), events=log)
    cache.insert(IDS, cache.pool.allocate(2), namespace)
    stored = [event for event in log.drain() if isinstance(event, BlockStored)]
    cache.evict(2)
    (removed,) = [event for event in log.drain() if isinstance(event, BlockRemoved)]
    return stored, removed.block_hashes


def mixed(value: int, *parts: str | None) -> int:
    """The rule of the wire, written down a second time."""
    seed = b"sglang-kv-event-namespace-v1"
    for part in parts:
        encoded = (part or "").encode()
        seed += b"\0" if part is None else b"\1" + len(encoded).to_bytes(8, "little") + encoded
    digest = hashlib.sha256(hashlib.sha256(seed).digest() + value.to_bytes(8, "big", signed=True)).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


SALTED = block_hashes(IDS, 4, "s")
PLAIN = block_hashes(IDS, 4)


@pytest.mark.parametrize(
    ("namespace", "form", "expected", "salt", "adapter"),
    [
        ("", "default", PLAIN, None, None),
        ("", "dynamo", PLAIN, None, None),
        (join_namespace("s", ""), "default", SALTED, "s", None),
        (join_namespace("", "k"), "default", PLAIN, None, None),
        (join_namespace("s", "k"), "default", SALTED, "s", None),
        (join_namespace("", "k"), "dynamo", [mixed(value, "k", None) for value in PLAIN], None, None),
        (join_namespace("s", ""), "dynamo", [mixed(value, None, "s") for value in SALTED], "s", None),
        (join_namespace("s", "k"), "dynamo", [mixed(value, "k", "s") for value in SALTED], "s", None),
        ("lora3=sql:", "default", [mixed(value, "lora3", None) for value in PLAIN], None, "sql"),
        ("lora3=sql:1:sk", "default", [mixed(value, "lora3k", None) for value in SALTED], "s", "sql"),
    ],
)
def test_published_hashes(
    namespace: str, form: EventFormat, expected: list[int], salt: str | None, adapter: str | None
) -> None:
    stored, removed = events_of(namespace, form)
    assert [event.block_hashes for event in stored] == [[value] for value in expected]
    assert [event.parent_block_hash for event in stored] == [None, expected[0]]
    assert removed == expected
    assert {event.cache_salt or None for event in stored} == {salt}
    assert {event.lora_name or None for event in stored} == {adapter}
