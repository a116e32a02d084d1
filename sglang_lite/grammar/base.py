"""What a grammar backend offers, and what it is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from sglang_lite.types import Grammar, Int32Array

UNDECIDED = -1
"""All bits of a word of a mask: every token is allowed."""


class GrammarError(Exception):
    """A grammar that cannot be used. The message is for the client: what, where, what to do."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model as grammars see them.

    Attributes:
        tokens: bytes of every token id; empty for ids that no text has (special tokens).
        size: width of the logits; ids from ``len(tokens)`` on are never drawn.
        end_ids: tokens that end a text; allowed where the grammar is complete.
        markers: special tokens that structural tags see as the bytes given here, and other grammars do not see.
    """

    tokens: list[bytes]
    size: int
    end_ids: tuple[int, ...]
    markers: dict[int, bytes] = field(default_factory=dict)

    def with_markers(self) -> Vocabulary:
        """As structural tags see it."""
        tokens = [self.markers.get(index, token) for index, token in enumerate(self.tokens)]
        return Vocabulary(tokens, self.size, self.end_ids)

    @property
    def mask_width(self) -> int:
        """Words of a row of a mask: a bit for each of ``size`` tokens."""
        return -(-self.size // 32)


class TokenMatcher(Protocol):
    """Where one sequence stands in its grammar. Used by one thread at a time."""

    def accept(self, token: int) -> bool:
        """Go on by a token; False, and nothing changed, when the grammar does not allow it."""

    def fill(self, bits: Int32Array) -> None:
        """Write which tokens are allowed next into ``bits``, int32[``Vocabulary.mask_width``].

        Bit ``t % 32`` of word ``t // 32`` is 1 where token t is allowed. After the end every token is.
        """

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` tokens that were accepted."""

    def forced(self) -> list[int]:
        """Tokens of the text that has to follow, empty where there is a choice.

        They spell that text in one of the ways the vocabulary has; the model may prefer another, so they are a guess.
        """

    @property
    def is_terminated(self) -> bool:
        """An end token was accepted: the sequence is over."""


class CompiledGrammar(Protocol):
    """A grammar ready to match many sequences."""

    def matcher(self) -> TokenMatcher:
        """A matcher at the start of the grammar."""


class GrammarBackend(Protocol):
    """A library that compiles grammars for one vocabulary."""

    def compile(self, grammar: Grammar) -> bytes:
        """The compiled form, to be given to ``load``. Called in a process of its own, which may be ended meanwhile.

        Raises:
            GrammarError: it is malformed, has no match, or asks for something that the library would ignore.
        """

    def load(self, compiled: bytes) -> CompiledGrammar:
        """What ``compile`` made, perhaps in another process. Takes milliseconds to hundredths of a second."""
