"""Constrained decoding: grammars, what compiles them, and which tokens they allow. Nothing here loads a library."""
