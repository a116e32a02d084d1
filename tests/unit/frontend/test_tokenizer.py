"""Tokenizer directories: what is read from which file, and what a vocabulary knows of its ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from sglang_lite.frontend.detokenizer import WindowedDetokenizer
from sglang_lite.frontend.pieces import DecoderKind, classify_decoder
from sglang_lite.frontend.tokenizer import Tokenizer
from sglang_lite.types import RequestError, StartupError
from tests.unit.frontend.vocabularies import byte_fallback_backend, chain_backend, vocabulary, word_level_backend


def directory(path: Path, backend: Any = None, **files: Any) -> Path:
    (backend or chain_backend()).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)
    assert "tokenizer" in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": {"type": "Alien"}}'])
def test_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_config_is_named(tmp_path: Path, content: str) -> None:
    directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(StartupError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


def test_chain_vocabulary() -> None:
    tokenizer = vocabulary("chain")
    assert tokenizer.vocab_size == 260
    assert tokenizer.special_ids == {257, 258, 259}
    assert tokenizer.encode("XXX") == [256, 88]
    assert tokenizer.encode_batch(["A€", ""]) == [[65, 0xE2, 0x82, 0xAC], []]
    assert tokenizer.decode([103, 258]) == "g"
    assert tokenizer.decode([103, 258], skip_special_tokens=False) == "g<|eos|>"
    assert tokenizer.token_bytes(0xE2) == b"\xe2"
    assert tokenizer.token_text(0xE2) == "�"
    assert tokenizer.token_text(258) == "<|eos|>"
    assert (tokenizer.id_to_token(256), tokenizer.token_to_id("XX")) == ("XX", 256)


@pytest.mark.parametrize("token_id", [-1, 260, 2**31, 2**40])
def test_ids_outside_the_vocabulary_have_no_text(token_id: int) -> None:
    for name in ("chain", "byte fallback", "suffix"):
        tokenizer = vocabulary(name)
        token_id = token_id if token_id != 260 else tokenizer.vocab_size
        assert tokenizer.id_to_token(token_id) is None
        assert tokenizer.decode([token_id]) == ""
        assert tokenizer.token_bytes(token_id) == b""


def test_byte_fallback_tokens_have_bytes() -> None:
    tokenizer = vocabulary("byte fallback, stripped")
    byte = tokenizer.token_to_id("<0xE2>")
    word = tokenizer.token_to_id("▁fox")
    assert byte is not None
    assert word is not None
    assert tokenizer.token_bytes(byte) == b"\xe2"
    assert tokenizer.token_bytes(word) == b" fox"


def test_text_with_half_a_surrogate_pair_is_refused() -> None:
    tokenizer = vocabulary("chain")
    with pytest.raises(RequestError, match="character 2 is half of a surrogate pair") as caught:
        tokenizer.encode("ab\ud800")
    assert caught.value.field == "text"
    with pytest.raises(RequestError):
        tokenizer.encode_batch(["fine", "\udfff"])


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = chain_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert Tokenizer.load(directory(tmp_path, backend)).encode("abcd") == [97, 98, 99, 100]


def test_named_tokens(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<|bos|>"}, "eos_token": "<|pad|>", "unk_token": None}
    path = directory(tmp_path, tokenizer_config=config, special_tokens_map={"eos_token": "x", "pad_token": "<|pad|>"})
    tokenizer = Tokenizer.load(path)
    assert tokenizer.named_tokens == {"bos_token": "<|bos|>", "eos_token": "<|pad|>", "pad_token": "<|pad|>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (257, 259)


def test_config_given_by_the_caller(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(directory(tmp_path) / "tokenizer.json", {"eos_token": "<|eos|>"})
    assert tokenizer.eos_token_id == 258
    assert tokenizer.bos_token_id is None


def test_tokens_that_only_the_config_calls_special(tmp_path: Path) -> None:
    """They are special; naming a token the end token does not make it special."""
    backend = word_level_backend()
    added = {"2": {"content": "world", "special": True}, "3": {"content": "hi", "special": True}, "x": 5}
    path = directory(tmp_path, backend, tokenizer_config={"added_tokens_decoder": added, "eos_token": "!"})
    tokenizer = Tokenizer.load(path)
    assert tokenizer.special_ids == {2}
    assert tokenizer.decode([1, 2, 3]) == "hi !"


def test_ordinary_added_tokens_are_not_special() -> None:
    backend = chain_backend()
    backend.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer = Tokenizer(backend)
    assert tokenizer.vocab_size == 261
    assert 260 not in tokenizer.special_ids
    assert tokenizer.decode([260]) == "<tool>"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("T", {"default": "T"}),
        (
            [{"name": "default", "template": "T"}, {"name": "tool_use", "template": "U"}],
            {"default": "T", "tool_use": "U"},
        ),
        (None, {}),
    ],
)
def test_chat_template_in_the_config(tmp_path: Path, value: Any, expected: dict[str, str]) -> None:
    assert Tokenizer.load(directory(tmp_path, tokenizer_config={"chat_template": value})).chat_templates == expected


def test_chat_template_file_wins(tmp_path: Path) -> None:
    path = directory(tmp_path, tokenizer_config={"chat_template": "old"})
    (path / "chat_template.jinja").write_text("new")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert Tokenizer.load(path).chat_templates == {"default": "new", "tool_use": "tools"}


@pytest.mark.parametrize(
    ("description", "kind"),
    [
        (None, DecoderKind.TOKEN_LEVEL),
        ({"type": "ByteLevel"}, DecoderKind.BYTE_LEVEL),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}, DecoderKind.BYTE_LEVEL),
        ({"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Fuse"}]}, DecoderKind.OTHER),
        ({"type": "Metaspace"}, DecoderKind.TOKEN_LEVEL),
        ({"type": "BPEDecoder"}, DecoderKind.OTHER),
        ({"type": "Strip", "start": 0, "stop": 1}, DecoderKind.OTHER),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Replace"}]}, DecoderKind.OTHER),
    ],
)
def test_decoder_kinds(description: dict[str, Any] | None, kind: DecoderKind) -> None:
    assert classify_decoder(description) is kind


def test_leading_space_of_the_first_piece_only() -> None:
    tokenizer = Tokenizer(byte_fallback_backend(strip=True))
    fox = tokenizer.token_to_id("▁fox")
    assert fox is not None
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(fox), detokenizer.push(fox)] == ["fox", " fox"]


def test_window_of_an_unknown_decoder_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work for a token does not grow with the text."""
    tokenizer = vocabulary("suffix")
    detokenizer = tokenizer.detokenizer()
    assert isinstance(detokenizer, WindowedDetokenizer)
    longest = 0
    decode = detokenizer._decode

    def measured(self: WindowedDetokenizer, token_ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(token_ids)

    monkeypatch.setattr(WindowedDetokenizer, "_decode", measured)
    token_ids = tokenizer.encode("The quick brown fox jumps over the lazy dog, again and again. " * 20)
    deltas = [detokenizer.push(token_id) for token_id in token_ids]
    assert longest < 40
    monkeypatch.undo()
    assert "".join([*deltas, detokenizer.finish()]) == tokenizer.decode(token_ids)
