"""Step plans made by hand, for tests that drive an executor or a model runner without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_lite.scheduler.plan import FROM_DEVICE, LogprobRequest, SamplingColumns, StepPlan
from sglang_lite.types import NO_SEED, Int32Array


def sampling_columns(num_rows: int, **columns: Any) -> SamplingColumns:
    """Columns of greedy rows, with some replaced: each value is a scalar or one number per row."""

    def column(name: str, default: float, dtype: type[np.generic]) -> np.ndarray[Any, Any]:
        return np.full(num_rows, columns.pop(name, default), dtype=dtype)

    temperature = column("temperature", 0.0, np.float32)
    top_k = column("top_k", -1, np.int32)
    frequency = column("frequency_penalty", 0.0, np.float32)
    presence = column("presence_penalty", 0.0, np.float32)
    repetition = column("repetition_penalty", 1.0, np.float32)
    penalized = np.flatnonzero((frequency != 0) | (presence != 0) | (repetition != 1)).astype(np.int32)
    logit_bias = columns.pop("logit_bias", {})
    greedy = bool(((temperature == 0) | (top_k == 1)).all()) and not len(penalized) and not logit_bias
    result = SamplingColumns(
        temperature=temperature,
        top_p=column("top_p", 1.0, np.float32),
        top_k=top_k,
        min_p=column("min_p", 0.0, np.float32),
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        seed=column("seed", NO_SEED, np.int64),
        all_greedy=greedy,
        penalized=penalized,
        logit_bias=logit_bias,
    )
    assert not columns, f"unknown columns {sorted(columns)}"
    return result


@dataclass(slots=True)
class PlannedSequence:
    """A sequence that a test feeds step by step.

    Attributes:
        row: row of the request table.
        pages: pages in order; grows with the sequence.
        num_tokens: tokens whose KV is in the pool.
    """

    row: int
    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0


class PlanMaker:
    """Numbers plans and hands out pages in a scattered order.

    Args:
        page_size: tokens per page.
        num_pages: pages of the pool.
    """

    def __init__(self, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self._free = np.random.default_rng(7).permutation(num_pages).tolist()
        self._step = 0

    def plan(
        self,
        decode: Sequence[PlannedSequence],
        prefill: Sequence[tuple[PlannedSequence, Sequence[int]]] = (),
        *,
        sampling: SamplingColumns | None = None,
        sample: Sequence[int] | None = None,
        logprobs: Sequence[LogprobRequest] = (),
    ) -> StepPlan:
        """One token for each of ``decode`` and a chunk for each of ``prefill``; all rows sample by default."""
        sequences = [*decode, *(sequence for sequence, _ in prefill)]
        counts = [1] * len(decode) + [len(tokens) for _, tokens in prefill]
        positions: list[int] = []
        slots: list[int] = []
        for sequence, count in zip(sequences, counts, strict=True):
            stop = sequence.num_tokens + count
            while len(sequence.pages) * self.page_size < stop:
                sequence.pages.append(self._free.pop())
            span = range(sequence.num_tokens, stop)
            positions += span
            slots += [sequence.pages[p // self.page_size] * self.page_size + p % self.page_size for p in span]
            sequence.num_tokens = stop
        ids = [FROM_DEVICE] * len(decode) + [token for _, tokens in prefill for token in tokens]
        sample_index = np.arange(len(sequences)) if sample is None else np.asarray(sample)
        self._step += 1
        return StepPlan(
            step=self._step - 1,
            num_decode=len(decode),
            rows=np.array([sequence.row for sequence in sequences], dtype=np.int32),
            query_lens=np.array(counts, dtype=np.int32),
            input_ids=np.array(ids, dtype=np.int32),
            positions=np.array(positions, dtype=np.int32),
            slot_mapping=np.array(slots, dtype=np.int64),
            kv_lens=np.array([sequence.num_tokens for sequence in sequences], dtype=np.int32),
            page_table=self._table(sequences),
            sample_index=sample_index.astype(np.int32),
            sampling=sampling or sampling_columns(len(sample_index)),
            generated=np.zeros(len(sample_index), dtype=np.int32),
            suppressed={},
            resumed={},
            page_copies=np.empty((0, 2), dtype=np.int32),
            logprobs=list(logprobs),
        )

    def _table(self, sequences: Sequence[PlannedSequence]) -> Int32Array:
        table = np.zeros((len(sequences), max(len(sequence.pages) for sequence in sequences)), dtype=np.int32)
        for index, sequence in enumerate(sequences):
            table[index, : len(sequence.pages)] = sequence.pages
        return table
