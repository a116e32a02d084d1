"""Stop patterns: what is refused, what a search costs at most, matches across long texts."""

from __future__ import annotations

import time

import pytest

from sglang_lite.frontend.stop import StopChecker, compile_stop_patterns
from sglang_lite.types import RequestError


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "missing )"),
        ("(?<=x)y", "look-around"),
        (r"(a)\1", "not a valid RE2 pattern"),
        ("a{1,100000}", "invalid repetition size"),
        ("a.{300}z", "over the limit of 1024 instructions"),
        ("|".join(["a.{999}b"] * 20), "too large when compiled"),
        ("x" * 257, "stop_regex is 257 bytes, over the 256-byte limit"),
        ("é" * 129, "stop_regex is 258 bytes, over the 256-byte limit"),
        ("\ud800", "stop_regex"),
    ],
)
def test_refused_patterns(pattern: str, message: str) -> None:
    with pytest.raises(RequestError, match=message.replace(")", r"\)")) as caught:
        compile_stop_patterns((pattern,))
    assert (caught.value.status, caught.value.field) == (400, "stop_regex")


def test_many_patterns_share_one_limit() -> None:
    compile_stop_patterns(("a.{100}z",))
    with pytest.raises(RequestError, match="instructions"):
        compile_stop_patterns(("a.{100}z", "b.{100}z"))


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|aa)+$", "a.{100}z", "a.{60}z*y", "(.*a){8}z"])
def test_hostile_patterns_cost_little_per_token(pattern: str) -> None:
    checker = StopChecker((), (pattern,))
    text = "aaca" * 8
    started = time.thread_time()
    for _ in range(1000):
        checker.push(text)
        checker.match = None
    assert time.thread_time() - started < 5.0, "more than 5 ms of processor time for 32 characters"


def test_match_far_from_the_start() -> None:
    checker = StopChecker((), ("END.[0-9]+;",))
    shown = [checker.push("x" * 50) for _ in range(1000)]
    shown += [checker.push(piece) for piece in ("EN", "D世", "12", "3;;")]
    assert "".join(shown) == "x" * 50000 + "END世123;"
    assert checker.match is not None
    assert checker.match.is_pattern


def test_start_anchor_means_the_start_of_the_text() -> None:
    checker = StopChecker((), ("^b+c",))
    text = "a" + "b" * 40000 + "c"
    shown = "".join(checker.push(text[i : i + 1000]) for i in range(0, len(text), 1000))
    assert shown == text
    assert checker.match is None


def test_string_before_pattern_at_the_same_character() -> None:
    checker = StopChecker(("bc",), ("a.c",))
    assert checker.push("xabcd") == "xa"
    assert checker.match is not None
    assert checker.match.matched == "bc"


def test_pattern_before_a_later_string() -> None:
    checker = StopChecker(("cd",), ("ab",))
    assert checker.push("xabcd") == "xab"
    assert checker.match is not None
    assert checker.match.matched == "ab"


def test_nothing_after_a_match() -> None:
    checker = StopChecker(("b",))
    assert checker.push("abc") == "a"
    assert (checker.push("abc"), checker.finish()) == ("", "")


def test_long_stop_string_held_and_released() -> None:
    stop = "a" * 8191 + "b"
    checker = StopChecker((stop,))
    assert checker.push("a" * 9000) == "a" * (9000 - 8191)
    assert checker.push("c") == "a" * 8191 + "c"
