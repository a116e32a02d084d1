"""Grammars of a step: one mask over the logits of the rows that have one, and what was drawn told to their matchers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from sglang_lite.adapters.grammar import GrammarOperations, bitmask_width
from sglang_lite.execution.sampler import NO_TOKEN
from sglang_lite.execution.streams import LaunchedStep
from sglang_lite.grammar.base import UNDECIDED, TokenMatcher
from sglang_lite.scheduler.plan import StepOutput
from sglang_lite.types import Int32Array

Matchers = dict[int, TokenMatcher]
"""Row of the logits -> matcher."""

Suppressed = dict[int, tuple[int, ...]]

Guesses = Mapping[int, Sequence[int]]

NO_GUESSES: Guesses = MappingProxyType({})


class GrammarMasks:
    """Masks of one executor.

    Args:
        upload: puts an array on the device of the logits.
    """

    def __init__(self, ops: GrammarOperations, vocab_size: int, upload: Callable[[Int32Array], Tensor]) -> None:
        self._ops = ops
        self._width = bitmask_width(vocab_size)
        self._upload = upload

    def apply(
        self, logits: Tensor, matchers: Matchers, suppressed: Suppressed, guesses: Guesses = NO_GUESSES
    ) -> Suppressed:
        """Set the logits of forbidden tokens to -inf, in place, in one operation for all rows.

        Args:
            logits: float32[N, V].
            suppressed: row -> tokens that may not be drawn yet (ends before ``min_new_tokens``).
            guesses: row -> tokens; the k-th row behind it is masked as if the first k of them had been drawn. Rows
                behind one that its grammar forbids are not masked: a draw before them ends the chain.

        Returns:
            ``suppressed`` without the rows whose grammar allows nothing else: a complete text has to end.
        """
        if not matchers:
            return suppressed
        bits: Int32Array = np.full((logits.shape[0], self._width), UNDECIDED, dtype=np.int32)
        masked: list[int] = []
        for row, matcher in matchers.items():
            count = _fill_chain(matcher, bits[row:], guesses.get(row, ()))
            masked += range(row, row + count)
        rows = np.array(masked, dtype=np.int32)
        self._ops.apply_bitmask(logits, self._upload(bits), self._upload(rows))
        finished = {row for row in matchers if row in suppressed and not _allows_other(bits[row], suppressed[row])}
        return {row: ids for row, ids in suppressed.items() if row not in finished} if finished else suppressed


def _fill_chain(matcher: TokenMatcher, bits: Int32Array, guesses: Sequence[int]) -> int:
    """Fill the masks of a row and of those behind its guesses; returns how many. The matcher is left as it was."""
    matcher.fill(bits[0])
    taken = 0
    for token in guesses:
        if not matcher.accept(token):
            break
        taken += 1
        matcher.fill(bits[taken])
    matcher.rollback(taken)
    return taken + 1


def advance(matchers: Matchers, tokens: Int32Array, guesses: Guesses = NO_GUESSES) -> None:
    """Tell the matchers what was drawn for their rows: ``tokens`` int32[N], changed in place where that is impossible.

    A row that ended in the step before is drawn once more, because plans are made ahead; nobody sees that token. Of
    draws that confirm guesses, those up to the first that does not are the row's.
    """
    for row, matcher in matchers.items():
        for draw, guess in enumerate((*guesses.get(row, ()), NO_TOKEN), row):
            token = int(tokens[draw])
            if token != NO_TOKEN and not matcher.is_terminated and not matcher.accept(token):
                tokens[draw] = NO_TOKEN
            if tokens[draw] != guess:
                break


class ConstrainedStep:
    """A launched step with grammars: the next one of that kind needs its tokens on the host before it can be masked.

    By then its own forward pass is queued, so that the device works on while the masks are made.

    Args:
        pending: the step itself.
    """

    def __init__(self, pending: LaunchedStep, matchers: Matchers) -> None:
        self._pending = pending
        self._matchers = matchers
        self._output: StepOutput | None = None
        self._lock = threading.Lock()

    @property
    def step(self) -> int:
        """Number of the plan."""
        return self._pending.step

    def result(self) -> StepOutput:
        """Wait for the tokens and tell the matchers of them, once. Any thread may call this."""
        with self._lock:
            if self._output is None:
                self._output = self._pending.result()
                advance(self._matchers, self._output.tokens)
            return self._output


def _allows_other(bits: Int32Array, ids: tuple[int, ...]) -> bool:
    """Whether a mask allows any token but ``ids``."""
    left = bits.copy().view(np.uint32)
    for token in ids:
        left[token // 32] &= ~np.uint32(1 << (token % 32))
    return bool(left.any())


def upload_to_host(array: Int32Array) -> Tensor:
    """``upload`` for logits in host memory."""
    return torch.from_numpy(array)
