"""Any life of sequences in the decode workspace gives the attention of the plain form.

Rows decode, verify guesses of which some are taken back, share prefixes, rest, end, and hand their pages and their
place in the request table on, with far too little memory for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_lite.adapters.cpu import CpuOperations, decode_slab, decode_workspace, shared_prefix
from tests.unit.adapters.test_cpu_attention import RandomSteps, Shape

NUM_ROWS, NUM_STEPS, MOST_TOKENS = 8, 25, 120


@dataclass(slots=True)
class Sequence:
    """``pages`` grow with it; the first ``shared`` of them it only reads. ``is_partial``: more chunks follow."""

    pages: list[int]
    length: int
    shared: int
    is_partial: bool


@dataclass(slots=True)
class Life:
    """What happens to the rows, step by step."""

    choice: Random
    steps: RandomSteps
    window: int | None
    rows: dict[int, Sequence] = field(default_factory=dict)
    prefixes: list[list[int]] = field(default_factory=list)

    def end_some(self) -> None:
        """Rows leave; their full pages become a prefix for others, or are free for anybody."""
        for row in [row for row in self.rows if self.choice.random() < 0.1]:
            sequence = self.rows.pop(row)
            whole = (sequence.length - 1) // self.steps.shape.page_size
            kept = whole if not sequence.shared and len(self.prefixes) < 3 else sequence.shared
            if kept > sequence.shared:
                self.prefixes.append(sequence.pages[:kept])
            self.steps.free.extend(sequence.pages[kept:])
        self.choice.shuffle(self.steps.free)
        in_use = {sequence.pages[0] for sequence in self.rows.values()}
        for prefix in [prefix for prefix in self.prefixes if prefix[0] not in in_use and self.choice.random() < 0.5]:
            self.prefixes.remove(prefix)
            self.steps.free.extend(reversed(prefix))  # so that the next sequence has them in the same order

    def arrive(self) -> Iterator[tuple[int, list[int], int, int]]:
        """First chunks of new sequences, and the next ones of those that have not finished."""
        for row, sequence in self.rows.items():
            if sequence.is_partial:
                count = self.choice.randint(2, 12)
                sequence.length, sequence.is_partial = sequence.length + count, False
                yield row, sequence.pages, sequence.length, count
        free = [row for row in range(NUM_ROWS) if row not in self.rows]
        for row in free[: self.choice.choice((0, 1, 1, 3))]:
            pages: list[int] = []
            if self.prefixes and self.choice.random() < 0.8:
                prefix = self.choice.choice(self.prefixes)
                pages = prefix[: self.choice.randint(1, len(prefix))]
            shared, count = len(pages), self.choice.randint(2, 30)
            length = shared * self.steps.shape.page_size + count
            self.rows[row] = Sequence(pages, length, shared, self.choice.random() < 0.3)
            yield row, pages, length, count

    def step(self, tolerance: float) -> None:
        """Some rows decode, some verify, some rest, others begin."""
        self.end_some()
        going = [row for row, sequence in self.rows.items() if not sequence.is_partial]
        chunks = list(self.arrive())
        going = [row for row in going if self.choice.random() < 0.9 and self.rows[row].length < MOST_TOKENS]
        self.choice.shuffle(going)
        verify, decode, kept = [], [], {}
        for row in going:
            sequence = self.rows[row]
            guesses = self.choice.choice((0, 0, 1, 5))
            kept[row] = self.choice.randint(1, 1 + guesses)
            stop = sequence.length + 1 + guesses
            if guesses:
                verify.append((row, sequence.pages, stop, 1 + guesses))
            else:
                decode.append((row, sequence.pages, stop))
        if not (decode or verify or chunks):
            return
        self.steps.run(decode, chunks, window=self.window, tolerance=tolerance, verify=verify)
        for row, count in kept.items():
            self.rows[row].length += count


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that sequences of a few tokens meet what long ones meet."""
    monkeypatch.setattr(shared_prefix, "MIN_SHARED_TOKENS", 8)
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_TOKENS", 8)
    monkeypatch.setattr(decode_slab, "_SMALLEST_CAPACITY", 8)
    monkeypatch.setattr(decode_workspace, "_HEADROOM", 2)
    monkeypatch.setattr(decode_workspace, "_RETRY_STEPS", 3)
    monkeypatch.setattr(decode_workspace, "_IDLE_STEPS", 2)


@given(
    seed=st.integers(0, 2**32 - 1),
    page_size=st.sampled_from([1, 4, 16]),
    groups=st.sampled_from([1, 2]),
    window=st.sampled_from([None, 3, 20]),
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
    tokens=st.sampled_from([60, 250, 5000]),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_life_of_rows(
    seed: int, page_size: int, groups: int, window: int | None, dtype: torch.dtype, tokens: int
) -> None:
    shape = Shape(page_size=page_size, heads=4, groups=groups, dtype=dtype)
    bytes_per_token = shape.layers * 2 * groups * shape.head_dim * dtype.itemsize
    budget = tokens * bytes_per_token
    ops = CpuOperations(measure=False, workspace_bytes=budget)
    steps = RandomSteps(ops, shape, seed=seed, num_pages=2048)
    life = Life(Random(seed), steps, window)
    for _ in range(NUM_STEPS):
        life.step(3e-2 if dtype == torch.bfloat16 else 1e-5)
        workspace = ops._attention._workspace
        assert workspace is None or workspace.num_bytes <= budget
