"""Stops do not depend on how the text is cut, never leak, and never swallow text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.frontend.stop import StopChecker

TEXT = st.text(alphabet="ab\n世", max_size=24)
STOPS = st.lists(st.text(alphabet="ab\n世", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)
PATTERNS = ("ab+a", "a.b", "(a|b)世", "b{2}", "a$", r"\bb", "^ab", "(a+)+b")


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def expected(text: str, stops: tuple[str, ...], *, keep: bool) -> tuple[str, str | None]:
    """The rule, character by character: (shown text, what matched)."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return (text[:end] if keep else text[: end - len(longest)]), longest
    return text, None


def run(checker: StopChecker, pieces: list[str]) -> tuple[list[str], str | None]:
    shown = [checker.push(piece) for piece in pieces]
    if checker.match is None:
        shown.append(checker.finish())
    return shown, None if checker.match is None else checker.match.matched


@settings(max_examples=250, deadline=None)
@given(text=TEXT, stops=STOPS, keep=st.booleans(), data=st.data())
def test_every_cut_equals_the_rule(text: str, stops: tuple[str, ...], keep: bool, data: st.DataObject) -> None:
    shown, matched = run(StopChecker(stops, no_stop_trim=keep), cut(text, data))
    assert ("".join(shown), matched) == expected(text, stops, keep=keep)


@settings(max_examples=150, deadline=None)
@given(text=TEXT, stops=STOPS, data=st.data())
def test_shown_text_is_final_and_held_text_is_needed(text: str, stops: tuple[str, ...], data: st.DataObject) -> None:
    """What was shown is a beginning of the result; what is held is the beginning of some stop string."""
    final, _ = expected(text, stops, keep=False)
    checker = StopChecker(stops)
    shown, seen = "", ""
    for piece in cut(text, data):
        shown += checker.push(piece)
        seen += piece
        assert final.startswith(shown)
        if checker.match is None:
            held = seen[len(shown) :]
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@settings(max_examples=150, deadline=None)
@given(text=TEXT, stops=STOPS | st.just(()), patterns=st.lists(st.sampled_from(PATTERNS), max_size=2), data=st.data())
def test_patterns(text: str, stops: tuple[str, ...], patterns: list[str], data: st.DataObject) -> None:
    """A pattern ends the text at the first character with which it matches; strings at the same place win."""
    result: tuple[str, str | None] = (text, None)
    for end in range(1, len(text) + 1):
        by_string = expected(text[:end], stops, keep=False)
        # Python's "$" also matches before a last line break; RE2's does not.
        found = [p for p in patterns if re.search(p.replace("$", r"\Z"), text[:end], re.ASCII)]
        if by_string[1] is not None or found:
            result = by_string if by_string[1] is not None else (text[:end], found[0])
            break
    shown, matched = run(StopChecker(stops, tuple(patterns)), cut(text, data))
    assert ("".join(shown), matched) == result


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "matched"),
    [
        (["ABC", "DEF", "G", "HI", "J"], ("DEFGHIJ",), "ABC", "DEFGHIJ"),
        (["1", "\n", "2", "\n", "3"], ("\n<|endoftext|>",), "1\n2\n3", None),
        (["What", " color", "?"], ("?\n",), "What color?", None),
        (["ABC", "DEF", "GHI"], ("DE",), "ABC", "DE"),
        (["ABC", "DEF", "GHI"], ("GH", "DE"), "ABC", "DE"),
        (["a", " b", " c", " d"], ("b c",), "a ", "b c"),
    ],
)
def test_known_faults(pieces: list[str], stops: tuple[str, ...], shown: str, matched: str | None) -> None:
    parts, found = run(StopChecker(stops), pieces)
    assert ("".join(parts), found) == (shown, matched)
