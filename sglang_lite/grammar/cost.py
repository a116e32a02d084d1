"""What a grammar costs the engine: walks through it before it gets there.

A library may compile in no time what then takes seconds a token (nested counts of something that may be empty). The
engine's executor would wait for that, and every request with it. So the process that compiles takes some steps first,
under its own limit of time.
"""

from __future__ import annotations

import time

import numpy as np

from sglang_lite.grammar.base import GrammarError, TokenMatcher, Vocabulary

WALKS = 3
STEPS = 24

MOST_SECONDS = 0.05
"""Processor time of one token, its mask included. Ordinary grammars take less than a thousandth of a second."""


def check_cost(matcher: TokenMatcher, vocabulary: Vocabulary, seed: int) -> None:
    """Walk through a grammar as a model might.

    Args:
        matcher: at the start; it is brought back there between walks.
        seed: of the walk; the first one takes what the grammar forces, and else its first token.

    Raises:
        GrammarError: a token takes too long.
    """
    random = np.random.default_rng(seed)
    bits = np.zeros(vocabulary.mask_width, dtype=np.int32)
    worst = 0.0
    for walk in range(WALKS):
        taken = 0
        while taken < STEPS and not matcher.is_terminated:
            started = time.process_time()
            matcher.fill(bits)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            allowed = allowed[~np.isin(allowed, vocabulary.end_ids)]
            if not len(allowed):
                break
            token = int(allowed[0] if walk == 0 else random.choice(allowed))
            if not matcher.accept(token):
                break
            taken += 1
            # The first steps may make what later ones find made.
            if taken > 2:
                worst = max(worst, time.process_time() - started)
        matcher.rollback(taken)
        if worst > MOST_SECONDS:
            raise GrammarError(
                f"a token of it takes {worst * 1000:.0f} ms to match, where {MOST_SECONDS * 1000:.0f} are allowed; "
                f"use fewer nested repetitions and shorter lists"
            )
