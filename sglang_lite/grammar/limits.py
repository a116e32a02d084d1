"""How large a grammar may be."""

from __future__ import annotations

MAX_GRAMMAR_CHARACTERS = 256 * 1024
"""Longest text of a grammar."""

MAX_SCHEMA_PROPERTIES = 4096
"""Most entries of ``properties`` in all of a schema together."""

TOO_LARGE = "the grammar is too large"
HOW_TO_SHRINK = "make it smaller: of a schema, properties that may be left out cost most, then nested repetitions"
NO_MEMORY = f"{TOO_LARGE}: compiling it takes too much memory; {HOW_TO_SHRINK}"
