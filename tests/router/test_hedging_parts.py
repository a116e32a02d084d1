"""Hedging without sockets: options, delays, the budget, and which requests it is for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_lite.router.body import parse_head
from sglang_lite.router.context import RouterContext
from sglang_lite.router.hedging import HEDGED, Hedging, may_be_hedged
from sglang_lite.router.option_groups import HedgeOptions
from sglang_lite.router.options import RouterOptions, parse_options
from sglang_lite.types import StartupError

KIND = ("/generate", True)


def test_off_by_default_and_refused_where_it_cannot_be() -> None:
    assert RouterContext(RouterOptions()).hedging is None
    pair = ["--prefill", "http://p", "1", "--decode", "http://d"]
    for words, named in (
        ([*pair, "--hedge-after-secs", "1"], "--hedge-after-secs"),
        ([*pair, "--hedge-quantile", "0.9"], "--hedge-quantile"),
        (["--hedge-after-secs", "5", "--request-timeout-secs", "5"], "--request-timeout-secs"),
        (["--hedge-after-secs", "0"], "--hedge-after-secs"),
        (["--hedge-quantile", "1"], "--hedge-quantile"),
        (["--hedge-max-percent", "0"], "--hedge-max-percent"),
    ):
        with pytest.raises(StartupError, match=named):
            parse_options(words)
    options = parse_options(["--hedge-quantile", "0.9", "--hedge-max-percent", "2.5"])
    assert (options.is_hedging, options.hedge_after_secs, options.hedge_max_percent) == (True, None, 2.5)


@given(st.lists(st.booleans(), max_size=400), st.sampled_from([0.5, 5.0, 7.0, 30.0, 100.0]))
def test_hedges_are_a_share_of_the_requests_at_every_moment(wanted: list[bool], percent: float) -> None:
    hedging = Hedging(HedgeOptions(hedge_after_secs=1, hedge_max_percent=percent))
    sent = 0
    for number, hedge in enumerate(wanted, 1):
        hedging.arrive()
        sent += hedge and hedging.take()
        assert sent <= number * percent / 100 + 1e-6


def test_what_was_saved_up_is_bounded() -> None:
    hedging = Hedging(HedgeOptions(hedge_after_secs=1, hedge_max_percent=50))
    for _ in range(1000):
        hedging.arrive()
    assert sum(hedging.take() for _ in range(100)) == 10


def test_the_delay_is_a_quantile_of_what_was_seen() -> None:
    hedging = Hedging(HedgeOptions(hedge_quantile=0.9))
    for number in range(99):
        hedging.note(KIND, number / 100)
    assert hedging.delay(KIND) is None
    hedging.note(KIND, 0.99)
    assert hedging.delay(KIND) == pytest.approx(0.9, abs=0.02)
    assert hedging.delay(("/generate", False)) is None  # whole answers are another matter
    for _ in range(2000):
        hedging.note(KIND, 7.0)  # the old times are forgotten
    assert hedging.delay(KIND) == 7.0
    floor = Hedging(HedgeOptions(hedge_quantile=0.9, hedge_after_secs=0.5))
    assert floor.delay(KIND) == 0.5
    for seconds, delay in ((0.1, 0.5), (2.0, 2.0)):
        for _ in range(1024):
            floor.note(KIND, seconds)
        assert floor.delay(KIND) == delay


def test_hedges_that_win_do_not_shorten_the_delay() -> None:
    """A fifth of the requests would take 10 s; each is answered by the other worker 0.1 s after its hedge."""
    hedging = Hedging(HedgeOptions(hedge_quantile=0.75))
    for number in range(5000):
        slow, delay = number % 5 == 0, hedging.delay(KIND)
        own = 10.0 if slow else 1.0 + number % 7 / 10
        hedging.note(KIND, own if delay is None or own <= delay else min(own, delay + 0.1))
    assert 1.0 <= (hedging.delay(KIND) or 0) <= 1.7


@pytest.mark.parametrize(
    ("path", "body", "may"),
    [
        ("/generate", b"{}", True),
        ("/v1/chat/completions", b'{"session_params": null, "background": false}', True),
        ("/v1/embeddings", b"{}", True),
        ("/v1/responses", b"{}", False),
        ("/tokenize", b"{}", False),
        ("/flush_cache", b"{}", False),
        ("/generate", b'{"session_params": {"id": "s"}}', False),
        ("/generate", b'{"session_id": "s"}', False),
        ("/generate", b'{"bootstrap_room": 0}', False),
        ("/generate", b'{"background": true}', False),
    ],
)
def test_what_may_be_at_two_workers(path: str, body: bytes, may: bool) -> None:
    assert may_be_hedged(path, parse_head(body)) is may
    assert "/open_session" not in HEDGED
