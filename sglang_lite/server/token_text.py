"""How a single token is shown to a client that asked for log-probabilities."""

from __future__ import annotations

from sglang_lite.frontend.tokenizer import Tokenizer

_CONTINUATION_MASK, _CONTINUATION = 0xC0, 0x80


def token_bytes(tokenizer: Tokenizer | None, token_id: int) -> bytes:
    """The bytes that the token stands for; empty without a tokenizer."""
    return b"" if tokenizer is None else tokenizer.token_bytes(token_id)


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """The token as text; one that is only a part of a character is shown as ``bytes:\\xc3``, as OpenAI does."""
    piece = token_bytes(tokenizer, token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def character_starts(piece: bytes) -> int:
    """How many characters begin in ``piece``."""
    return sum(byte & _CONTINUATION_MASK != _CONTINUATION for byte in piece)


class OffsetCounter:
    """Offsets of consecutive tokens in the text that they spell.

    A token that starts inside a character has the offset of that character.

    Attributes:
        characters: begun so far.
    """

    __slots__ = ("characters",)

    def __init__(self, characters: int = 0) -> None:
        self.characters = characters

    def next(self, piece: bytes) -> int:
        """The offset of the token with these bytes; the following call is about the token after it."""
        starts_inside = bool(piece) and piece[0] & _CONTINUATION_MASK == _CONTINUATION
        offset = self.characters - 1 if starts_inside and self.characters else self.characters
        self.characters += character_starts(piece)
        return offset
