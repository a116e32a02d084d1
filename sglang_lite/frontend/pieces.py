"""How a vocabulary turns ids into text, so that text can be made one token at a time.

The decoders of the ``tokenizers`` library fall into three kinds:

* byte level: every token is a run of bytes and the text is the UTF-8 reading of all of them, malformed sequences
  replaced. GPT-2, Llama 3, Qwen, SmolLM.
* token level: every token is a piece of text that depends only on whether it is the first one, except ``<0xNN>``
  tokens, whose runs are read as UTF-8 together. SentencePiece style (Llama 2, Mistral, Gemma), Metaspace, WordPiece,
  and vocabularies without a decoder.
* anything else, where a later token may change the text of an earlier one in ways that cannot be seen from the
  decoder's description.

Pieces are looked up on first use: a vocabulary of 150,000 entries costs nothing at start-up.
"""

from __future__ import annotations

import enum
import re
from typing import Any, Protocol

import msgspec
import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_ANCHOR = "a"


class DecoderKind(enum.Enum):
    BYTE_LEVEL = "byte level"
    TOKEN_LEVEL = "token level"
    OTHER = "other"


class _TokenDecoder(Protocol):
    def decode(self, tokens: list[str]) -> str: ...


class _SpaceJoin:
    """What the library does for a tokenizer without a decoder."""

    def decode(self, tokens: list[str]) -> str:
        return " ".join(tokens)


def byte_level_alphabet() -> dict[str, int]:
    """Map of the 256 printable characters of byte-level vocabularies to the bytes they stand for.

    Printable Latin-1 bytes stand for themselves; the others take the code points from U+0100 on, in byte order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


def classify_decoder(description: dict[str, Any] | None) -> DecoderKind:
    """Kind of a decoder from its description in tokenizer.json (``None`` when there is none)."""
    if description is None:
        return DecoderKind.TOKEN_LEVEL
    name = description.get("type")
    if name == "Sequence":
        parts = description.get("decoders", [])
        if len(parts) == 1:
            return classify_decoder(parts[0])
        return DecoderKind.TOKEN_LEVEL if _is_token_level(parts) else DecoderKind.OTHER
    if name == "ByteLevel":
        return DecoderKind.BYTE_LEVEL
    return DecoderKind.TOKEN_LEVEL if _is_token_level([description]) else DecoderKind.OTHER


def _is_token_level(parts: list[dict[str, Any]]) -> bool:
    fused = False
    for part in parts:
        name = part.get("type")
        if name == "Strip":
            # Stripping up to one leading character of the whole text touches the first token only.
            if part.get("stop", 0) != 0 or part.get("start", 0) > 1:
                return False
        elif name == "Fuse":
            fused = True
        elif fused or name not in ("Replace", "ByteFallback", "Metaspace", "WordPiece"):
            return False
    return True


class TextCache(dict[int, str | None]):
    """Token id -> text that stands on its own, or None where the text depends on the neighbours."""

    def __init__(self, pieces: BytePieces | TokenPieces, skipped: frozenset[int]) -> None:
        super().__init__()
        self._pieces = pieces
        self._skipped = skipped

    def __missing__(self, token_id: int) -> str | None:
        text = "" if token_id in self._skipped else self._pieces.text(token_id)
        self[token_id] = text
        return text


class BytePieces:
    """Byte-level vocabulary: token id -> bytes. Ids outside the vocabulary are empty, as in the library."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._alphabet = byte_level_alphabet()
        self._bytes: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._bytes.get(token_id)
        if piece is None:
            piece = self._bytes[token_id] = self._read(token_id)
        return piece

    def _read(self, token_id: int) -> bytes:
        token = id_to_token(self._backend, token_id)
        if token is None:
            return b""
        try:
            return bytes([self._alphabet[character] for character in token])
        except KeyError:
            # An added token with a character outside the alphabet, such as a space, stands for itself.
            return token.encode()

    def text(self, token_id: int) -> str | None:
        try:
            return self.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return None


class TokenPieces:
    """Token-level vocabulary: token id -> text, asked from the library's own decoder one token at a time."""

    def __init__(self, backend: tokenizers.Tokenizer, *, byte_fallback: bool) -> None:
        self._backend = backend
        self._decoder: _TokenDecoder = backend.decoder if backend.decoder is not None else _SpaceJoin()
        self._byte_fallback = byte_fallback
        self._anchor_length = len(self._decoder.decode([_ANCHOR]))

    def byte(self, token_id: int) -> int | None:
        """The byte a ``<0xNN>`` token stands for, None for any other token."""
        if not self._byte_fallback:
            return None
        match = _BYTE_TOKEN.match(id_to_token(self._backend, token_id) or "")
        return int(match[1], 16) if match else None

    def text(self, token_id: int) -> str | None:
        """Text of a token after another one; None for a byte token."""
        return None if self.byte(token_id) is not None else self.join([token_id], first=False)

    def join(self, token_ids: list[int], *, first: bool) -> str:
        """Text of consecutive tokens, at the start of a text or after another token."""
        tokens = [token for token in (id_to_token(self._backend, i) for i in token_ids) if token is not None]
        if not tokens:
            return ""
        if first:
            return self._decoder.decode(tokens)
        return self._decoder.decode([_ANCHOR, *tokens])[self._anchor_length :]

    def known(self, token_id: int) -> bool:
        return id_to_token(self._backend, token_id) is not None


def id_to_token(backend: tokenizers.Tokenizer, token_id: int) -> str | None:
    """The vocabulary entry of an id, None where there is none (negative and too large ids included)."""
    return backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None


def read_pieces(backend: tokenizers.Tokenizer) -> BytePieces | TokenPieces | None:
    """The piece table for a tokenizer, None when its decoder is of the third kind."""
    description = None if backend.decoder is None else msgspec.json.decode(backend.decoder.__getstate__())
    kind = classify_decoder(description)
    if kind is DecoderKind.BYTE_LEVEL:
        return BytePieces(backend)
    if kind is DecoderKind.TOKEN_LEVEL:
        return TokenPieces(backend, byte_fallback=description is not None and "ByteFallback" in str(description))
    return None
