"""Which grammar backends there are, which one is used, and what a grammar is called."""

from __future__ import annotations

import hashlib
import importlib.util

from sglang_lite.grammar.base import GrammarBackend, Vocabulary
from sglang_lite.grammar.limits import MAX_GRAMMAR_CHARACTERS
from sglang_lite.grammar.locating import pointer_to_nul
from sglang_lite.types import Grammar, RequestError

BACKENDS = ("xgrammar", "llguidance", "none")


def installed_backend(wanted: str | None) -> str:
    """The backend to use: ``wanted``, or the first one that is installed. Loads nothing."""
    if wanted is not None:
        return wanted
    return next((name for name in BACKENDS[:-1] if importlib.util.find_spec(name)), "none")


def make_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    """Load a backend.

    Raises:
        ImportError: its library is not installed.
    """
    if name == "xgrammar":
        from sglang_lite.grammar.xgrammar_backend import XgrammarBackend

        return XgrammarBackend(vocabulary)
    from sglang_lite.grammar.llguidance_backend import LlguidanceBackend

    return LlguidanceBackend(vocabulary)


def identity(grammar: Grammar) -> str:
    """Name of a grammar made of its content."""
    return hashlib.sha256(f"{grammar.kind}\0{grammar.compact:d}\0{grammar.text}".encode()).hexdigest()


def check_text(grammar: Grammar) -> None:
    """Refuse what no library should see.

    Raises:
        RequestError: 400, the text is too long, empty or has NUL characters.
    """
    if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
        raise RequestError(
            f"{grammar.kind} has {len(grammar.text)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed",
            field=grammar.kind,
        )
    escaped = grammar.kind in ("json_schema", "structural_tag") and "\\u0000" in grammar.text
    if "\0" in grammar.text or escaped:
        place = f" at {pointer_to_nul(grammar.text)}" if escaped else ""
        raise RequestError(f"Invalid {grammar.kind}{place}: NUL bytes (\\u0000) are not allowed", field=grammar.kind)
    try:
        grammar.text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{grammar.kind} is not Unicode text: {error.reason}", field=grammar.kind) from error
