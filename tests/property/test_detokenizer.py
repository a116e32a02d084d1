"""Text that comes out token by token is the text of the whole list, for every kind of vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_lite.frontend.tokenizer import Tokenizer
from tests.unit.frontend.vocabularies import BUILDERS, CORPUS, vocabulary

MULTILINGUAL = "삼겹살 👩‍👩‍👧‍👦 Ünïcødé 中文"
NAMES = sorted(BUILDERS)


def streamed(tokenizer: Tokenizer, token_ids: list[int], *, skip_special_tokens: bool) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    deltas = [detokenizer.push(token_id) for token_id in token_ids]
    return [*deltas, detokenizer.finish()]


def check(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    for skip in (True, False):
        expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
        assert "".join(streamed(tokenizer, token_ids, skip_special_tokens=skip)) == expected


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_token_list(name: str, data: st.DataObject) -> None:
    tokenizer = vocabulary(name)
    ids = st.integers(0, tokenizer.vocab_size - 1)
    check(tokenizer, data.draw(st.lists(ids, max_size=40)))


@pytest.mark.parametrize("name", ["byte fallback", "byte fallback, stripped"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_runs_of_byte_tokens(name: str, data: st.DataObject) -> None:
    """Valid, broken and mixed runs of byte tokens between pieces and special tokens."""
    tokenizer = vocabulary(name)
    first_byte = tokenizer.token_to_id("<0x00>")
    assert first_byte is not None
    characters = st.sampled_from(["é", "世", "🙂", "a"]).map(lambda c: [first_byte + byte for byte in c.encode()])
    broken = st.lists(st.integers(0, 255).map(lambda byte: first_byte + byte), min_size=1, max_size=3)
    pieces = st.integers(0, tokenizer.vocab_size - 1).map(lambda token_id: [token_id])
    parts = data.draw(st.lists(st.one_of(characters, broken, pieces), max_size=12))
    check(tokenizer, [token_id for part in parts for token_id in part])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_byte_sequences_replaced_as_one_shot(data: st.DataObject) -> None:
    """Malformed UTF-8 gives the same replacement characters at the same places, however it is cut."""
    tokenizer = vocabulary("chain")
    raw = data.draw(
        st.lists(
            st.sampled_from([b"\xe4\xb8\x96", b"\xf0\x9f\x99\x82", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90", b"a"])
            | st.binary(min_size=1, max_size=4),
            max_size=10,
        ).map(b"".join)
    )
    check(tokenizer, list(raw))
    assert tokenizer.decode(list(raw)) == raw.decode("utf-8", "replace")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(text=st.sampled_from([MULTILINGUAL, *CORPUS]) | st.text(max_size=40))
def test_encoded_text(name: str, text: str) -> None:
    tokenizer = vocabulary(name)
    check(tokenizer, tokenizer.encode(text))


@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet=MULTILINGUAL + "ab", max_size=30))
def test_no_replacement_character_in_a_valid_text(text: str) -> None:
    tokenizer = vocabulary("chain")
    deltas = streamed(tokenizer, tokenizer.encode(text), skip_special_tokens=True)
    assert "".join(deltas) == text
    assert all("�" not in delta for delta in deltas)


@pytest.mark.demo_model
def test_demo_vocabulary(demo_model: Path) -> None:
    tokenizer = Tokenizer.load(demo_model)

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    def any_list(token_ids: list[int]) -> None:
        check(tokenizer, token_ids)

    any_list()
    token_ids = tokenizer.encode(MULTILINGUAL)
    for end in range(len(token_ids) + 1):
        check(tokenizer, token_ids[:end])
    deltas = streamed(tokenizer, token_ids, skip_special_tokens=True)
    assert "".join(deltas) == MULTILINGUAL
    assert all("�" not in delta for delta in deltas)
