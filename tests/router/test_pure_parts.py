"""Breaker, leases, prefix tree and policies against plain models of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.router.body import Head, parse_head
from sglang_lite.router.breaker import Breaker, BreakerLimits, BreakerState
from sglang_lite.router.errors import RouterError
from sglang_lite.router.leases import LeaseTable
from sglang_lite.router.policies import CacheAware, ConsistentHashing, PolicyLimits, PowerOfTwo, RoundRobin
from sglang_lite.router.prefix_tree import PAGE, PrefixTree
from sglang_lite.router.prompt import Prompt
from sglang_lite.router.workers import Registry, Worker


def make_workers(count: int) -> list[Worker]:
    registry = Registry(BreakerLimits(), lambda worker: None)
    return [registry.add(f"http://w{number}") for number in range(count)]


@given(st.lists(st.sampled_from(["ask", "send", "well", "badly", "gone", "wait"]), max_size=60))
def test_breaker(events: list[str]) -> None:
    limits = BreakerLimits(failures=3, successes=2, cooldown=10)
    breaker, now, running, in_a_row = Breaker(limits), 0.0, 0, 0
    for event in events:
        if event == "wait":
            now += 6
        elif event == "ask":
            before = (breaker.state, breaker.allows(now))
            assert (breaker.state, breaker.allows(now)) == before
        elif event == "send":
            expected = breaker.allows(now)
            assert breaker.acquire(now) == expected
            running += expected
            if breaker.state is BreakerState.HALF_OPEN:
                assert not breaker.allows(now), "one probe at a time"
        elif running:
            running -= 1
            if event == "badly":
                in_a_row += 1
                breaker.fail(now)
                if in_a_row >= limits.failures:
                    assert breaker.state is BreakerState.OPEN and not breaker.allows(now)
            elif event == "well":
                in_a_row = 0
                breaker.succeed()
            else:
                breaker.forget()
    later = now + limits.cooldown
    assert breaker.allows(later) or breaker.state is BreakerState.HALF_OPEN


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "wait"]), st.integers(0, 5)), max_size=80))
def test_leases(events: list[tuple[str, int]]) -> None:
    table, now, model = LeaseTable(10), 0.0, {}
    for event, number in events:
        if event == "take":
            model[table.acquire(number % 3, now)] = (number % 3, now)
        elif event == "give":
            assert table.release(number) == (model.pop(number, None) is not None)
        else:
            now += number
            stale = [lease for lease, (_, start) in model.items() if start + 10 <= now]
            assert table.expire(now) == stale
            for lease in stale:
                del model[lease]
        for worker in range(3):
            assert table.load(worker) == sum(owner == worker for owner, _ in model.values())
        assert table.total == len(model)


PIECES = [bytes([letter]) * PAGE for letter in b"abc"]


@given(
    st.lists(st.tuples(st.lists(st.sampled_from(PIECES), max_size=6), st.integers(0, 3), st.booleans()), max_size=30),
    st.lists(st.sampled_from(PIECES), max_size=6),
    st.integers(0, 15),
)
def test_prefix_tree(history: list[tuple[list[bytes], int, bool]], wanted: list[bytes], workers: int) -> None:
    tree, model = PrefixTree(1 << 20), set()
    for pieces, worker, leaves in history:
        if leaves:
            tree.remove_worker(worker)
            model = {entry for entry in model if entry[1] != worker}
        key = b"".join(pieces)
        tree.insert(key + b"rest", worker)
        model |= {(key[:end], worker) for end in range(PAGE, len(key) + 1, PAGE)}
    best: tuple[int, int] = (0, 0)
    key = b"".join(wanted)
    for end in range(PAGE, len(key) + 1, PAGE):
        holders = sum(1 << worker for worker in range(4) if (key[:end], worker) in model and workers >> worker & 1)
        if holders:
            best = (end, holders)
    assert tree.match(key, workers) == best
    assert tree.size == PAGE * len({prefix for prefix, _ in model})


def test_the_tree_drops_what_was_used_least() -> None:
    tree = PrefixTree(64 * PAGE)
    for number in range(200):
        tree.insert(b"kept" * PAGE, 0)
        tree.insert(number.to_bytes(PAGE, "big") * 4, 1)
        assert tree.size <= 64 * PAGE
    assert tree.match(b"kept" * PAGE, 1) == (4 * PAGE, 1)
    assert tree.match((0).to_bytes(PAGE, "big") * 4, 2) == (0, 0)
    assert tree.match((199).to_bytes(PAGE, "big") * 4, 2) == (4 * PAGE, 2)


def test_cache_aware() -> None:
    """C926: loads out of balance win over a match."""
    workers, policy, key = make_workers(3), CacheAware(PolicyLimits()), b"k" * 400
    policy.sent(workers[2], Prompt(key))
    assert policy.choose(workers, Prompt(key)) is workers[2]
    workers[2].running = 32
    assert policy.choose(workers, Prompt(key)) is workers[2]
    workers[2].running = 33
    assert policy.choose(workers, Prompt(key)) is not workers[2]
    workers[2].running, workers[0].running = 1, 1
    assert policy.choose(workers, Prompt(b"k" * 100 + b"x" * 300)) is workers[1]
    policy.forget(workers[2])
    assert policy.choose(workers, Prompt(key)) is workers[1]


def test_spreading_policies() -> None:
    workers = make_workers(4)
    turn = RoundRobin()
    assert [turn.choose(workers, Prompt(b"")) for _ in range(8)] == workers * 2
    workers[0].running = 9
    two = PowerOfTwo(random.Random(0))
    assert all(two.choose(workers, Prompt(b"")) is not workers[0] for _ in range(50))


def test_hashing_moves_only_the_keys_of_who_leaves() -> None:
    workers, ring = make_workers(5), ConsistentHashing()
    before = {key: ring.choose(workers, Prompt(b"", key)) for key in map(str, range(500))}
    assert len(set(map(id, before.values()))) == 5
    after = {key: ring.choose(workers[1:], Prompt(b"", key)) for key in before}
    assert all(after[key] is owner for key, owner in before.items() if owner is not workers[0])


@settings(deadline=None)
@given(st.data())
def test_bodies_with_many_ids_are_read_as_ever(data: st.DataObject) -> None:
    """Whatever stands around the ids, or in them: what is read is what the decoder alone reads."""
    ids = data.draw(
        st.sampled_from(
            ["[1,2, 3]", "[[1,2],[3]]", "[]", '["]",",",":[1]"]', "[1", "7", "null", '"[1]"', "[1e3, -2]", "[ 1 ]"]
        )
    )
    names = st.sampled_from(['"input_ids"', '"text"', '"a\\"input_ids"', '"messages"', '"model"', '"x"'])
    values = st.sampled_from(
        [ids, '"y"', '{"input_ids":[9]}', f'{{"a":{{"input_ids" : {ids}}}}}', '["input_ids"]', "1"]
    )
    fields = data.draw(st.lists(st.tuples(names, values), max_size=4))
    colon = data.draw(st.sampled_from([":", ": ", " :\n"]))
    parts = [f"{name}{colon}{value}" for name, value in fields]
    parts.insert(data.draw(st.integers(0, len(parts))), f'"pad"{colon}"{"z" * 3000}"')
    body = ("{" + ",".join(parts) + "}").encode()

    def read(decode: Callable[[bytes], Head]) -> dict[str, Any] | None:
        try:
            head = decode(body)
        except (RouterError, msgspec.DecodeError):
            return None
        found = {name: getattr(head, name) for name in head.__struct_fields__}
        return {name: bytes(value) if isinstance(value, msgspec.Raw) else value for name, value in found.items()}

    expected = read(msgspec.json.Decoder(Head).decode)
    if expected is not None:
        assert read(parse_head) == expected
