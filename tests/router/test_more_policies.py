"""The policies ``bucket`` and ``manual``; why a choice was made."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_lite.router import manual_policy
from sglang_lite.router.bucket_policy import Bucket
from sglang_lite.router.manual_policy import Manual
from sglang_lite.router.options import RouterOptions, checked, parse_options
from sglang_lite.router.policies import CacheAware, PolicyLimits
from sglang_lite.router.prompt import Prompt
from sglang_lite.types import StartupError
from tests.router.test_pairs_and_control import decode, prefill
from tests.router.test_proxy import CHAT, CHAT_PATH
from tests.router.test_pure_parts import make_workers
from tests.support.null_workers import NullWorker, router_over


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def prompt(length: int = 0, key: str | None = None) -> Prompt:
    return Prompt(b"x" * length, key)


def test_lengths_have_ranges_with_equal_work() -> None:
    clock, workers = Clock(), make_workers(4)
    bucket = Bucket(5, 32, 1.1, random.Random(0), clock)
    lengths = [100] * 900 + [3000, 6000, 9000] * 100
    random.Random(1).shuffle(lengths)
    for length in lengths:
        bucket.choose(workers, prompt(length))
    assert bucket.reason == "load", "no boundaries before the first look"
    clock.now = 5
    work: Counter[str] = Counter()
    owners: dict[int, set[str]] = {}
    for length in lengths:
        worker = bucket.choose(workers, prompt(length))
        assert bucket.reason == "bucket"
        work[worker.name] += length
        owners.setdefault(length, set()).add(worker.name)
    assert owners[100] == {workers[0].name}, "short requests have a worker without long ones"
    assert workers[0].name not in owners[9000]
    assert max(work.values()) < 1.2 * min(work.values())


def test_boundaries_move_with_the_requests() -> None:
    clock, workers = Clock(), make_workers(2)
    bucket = Bucket(5, 32, 1.1, random.Random(0), clock)
    for scale, moment in ((1, 5), (100, 10)):
        for _ in range(4096):
            bucket.choose(workers, prompt(10 * scale))
            bucket.choose(workers, prompt(11 * scale))
        clock.now = moment
        assert bucket.choose(workers, prompt(scale)) is workers[0]
        assert bucket.choose(workers, prompt(20 * scale)) is workers[1]
    assert bucket.choose(workers, prompt(500)) is workers[0], "long before, short now"


def test_one_length_is_spread_and_balance_wins() -> None:
    clock, workers = Clock(), make_workers(3)
    bucket = Bucket(5, 32, 1.1, random.Random(0), clock)
    bucket.choose(workers, prompt(7))
    clock.now = 5
    assert {bucket.choose(workers, prompt(7)).name for _ in range(9)} == {worker.name for worker in workers}
    workers[0].running = 33
    assert bucket.choose(workers, prompt(1)) is not workers[0]
    assert bucket.reason == "balance"


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=60))
def test_shares_are_in_the_order_of_lengths(lengths: list[int]) -> None:
    clock, workers = Clock(), make_workers(1)
    bucket = Bucket(5, 32, 1.1, random.Random(0), clock)
    for length in lengths:
        bucket.choose(workers, prompt(length))
    clock.now = 5
    bucket.choose(workers, prompt(lengths[0]))
    before = (0.0, 0.0)
    for length in range(0, 10_001, 97):
        low, high = bucket.share(length)
        assert before[0] <= low <= high <= 1 and before[1] <= high
        before = (low, high)


@pytest.mark.parametrize("mode", ["random", "min_load", "min_group"])
def test_keys_stay_where_they_are(mode: str) -> None:
    workers, manual = make_workers(4), Manual(mode, 100, random.Random(0), Clock())
    owners = {f"k{number}": manual.choose(workers, prompt(key=f"k{number}")) for number in range(200)}
    for worker in workers:
        worker.running = random.Random(worker.index).randrange(100)
    assert all(manual.choose(workers, prompt(key=key)) is owner for key, owner in owners.items())
    assert manual.reason == "sticky"
    counts = Counter(worker.name for worker in owners.values())
    assert len(counts) == 4
    if mode == "min_group":
        assert set(counts.values()) == {50}


def test_min_load_takes_the_idle_worker() -> None:
    workers, manual = make_workers(3), Manual("min_load", 100, random.Random(0), Clock())
    workers[0].running = workers[2].running = 1
    assert {manual.choose(workers, prompt(key=str(number))).name for number in range(9)} == {workers[1].name}
    assert manual.choose(workers, prompt()) is workers[1] and manual.reason == "no_key" and len(manual) == 9


def test_a_key_moves_when_its_worker_is_gone_and_back_when_the_next_is() -> None:
    workers, manual = make_workers(3), Manual("min_group", 100, random.Random(0), Clock())
    first = manual.choose(workers, prompt(key="k"))
    rest = [worker for worker in workers if worker is not first]
    second = manual.choose(rest, prompt(key="k"))
    assert second is not first and manual.reason == "moved"
    assert manual.choose(workers, prompt(key="k")) is second, "its cache is there now"
    assert manual.choose([worker for worker in workers if worker is not second], prompt(key="k")) is first


def test_keys_that_nobody_uses_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, workers = Clock(), make_workers(2)
    manual = Manual("min_group", 10, random.Random(0), clock)
    manual.choose(workers, prompt(key="a"))
    manual.choose(workers, prompt(key="b"))
    clock.now = 9
    manual.choose(workers, prompt(key="a"))
    clock.now = 10
    manual.choose(workers, prompt(key="a"))
    assert len(manual) == 1 and sum(manual._groups.values()) == 1
    monkeypatch.setattr(manual_policy, "_MOST_KEYS", 20)
    for number in range(100):
        manual.choose(workers, prompt(key=str(number)))
    assert len(manual) == 20 == sum(manual._groups.values())


def test_reasons_of_cache_aware() -> None:
    workers, policy = make_workers(2), CacheAware(PolicyLimits())
    policy.sent(workers[0], prompt(400))
    assert (policy.choose(workers, prompt(400)), policy.reason) == (workers[0], "match")
    policy.choose(workers, Prompt(b"y" * 400))
    assert policy.reason == "load"
    workers[0].running = 40
    assert (policy.choose(workers, prompt(400)), policy.reason) == (workers[1], "balance")


def test_flags() -> None:
    words = [
        "--policy",
        "manual",
        "--assignment-mode",
        "min_group",
        "--max-idle-secs",
        "7",
        "--prefill-policy",
        "bucket",
    ]
    options = parse_options([*words, "--bucket-adjust-interval-secs", "3"])
    assert (options.policy, options.assignment_mode, options.max_idle_secs) == ("manual", "min_group", 7)
    assert (options.prefill_policy, options.bucket_adjust_interval_secs) == ("bucket", 3)
    for wrong in ({"policy": "bucket"}, {"decode_policy": "bucket"}, {"assignment_mode": "x"}, {"max_idle_secs": 0.0}):
        with pytest.raises(StartupError):
            checked(RouterOptions(**wrong))  # type: ignore[arg-type]


async def test_pools_have_policies_of_their_own() -> None:
    """Prefill goes by turns, decode by the caller's key; what decode went by is counted."""
    workers = [prefill(), prefill(), decode(), decode()]
    options = {"prefill_policy": "round_robin", "decode_policy": "manual", "assignment_mode": "min_group"}
    async with router_over(*workers, **options) as router:
        for key in "ababab":
            headers = {"x-sgl-route-key": key}
            assert (await router.post(CHAT_PATH, CHAT, headers=headers))[0] == 200
        for worker in workers:
            assert worker.count(CHAT_PATH) == 3
        keys = [{headers["x-sgl-route-key"] for _, headers, _ in worker.seen} for worker in workers]
        assert keys[2] in ({"a"}, {"b"}) and keys[2] != keys[3]
        metrics = (await router.get("/metrics"))[2].decode()
        assert 'sgl_router_decode_affinity_total{result="sticky"} 4.0' in metrics
        assert 'sgl_router_decode_affinity_total{result="new_key"} 2.0' in metrics


async def test_one_policy_for_all_of_a_router() -> None:
    workers = [NullWorker(), NullWorker()]
    async with router_over(*workers, policy="manual") as router:
        owners = set()
        for _ in range(8):
            _, _, body = await router.post(CHAT_PATH, CHAT, headers={"x-smg-routing-key": "mine"})
            owners.add(msgspec.json.decode(body)["worker"])
        assert len(owners) == 1
