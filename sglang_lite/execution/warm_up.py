"""A first pass over every kind of step, so that no request pays for lazily created buffers and code."""

from __future__ import annotations

import numpy as np

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.execution.base import Executor
from sglang_lite.scheduler.plan import FROM_DEVICE, SamplingColumns, StepPlan
from sglang_lite.types import NO_SEED


def warm_up(executor: Executor, geometry: KVGeometry, context_length: int) -> None:
    """Run a prefill and a decode step of row 0 on the first pages of the pool, which nobody uses yet.

    Raises:
        ExecutionError: a step failed.
    """
    capacity = min(context_length, geometry.num_pages * geometry.page_size)
    prompt = min(16, capacity)
    executor.submit(_plan(0, geometry, first=0, count=prompt))
    executor.collect()
    if prompt < capacity:
        executor.submit(_plan(1, geometry, first=prompt, count=1))
        executor.collect()


def _plan(step: int, geometry: KVGeometry, *, first: int, count: int) -> StepPlan:
    """Feed token 0 at ``count`` positions from ``first`` on, greedily."""
    stop = first + count
    decode = first > 0
    zero = np.zeros(1, dtype=np.float32)
    sampling = SamplingColumns(
        temperature=zero,
        top_p=zero + 1,
        top_k=np.full(1, -1, dtype=np.int32),
        min_p=zero,
        frequency_penalty=zero,
        presence_penalty=zero,
        repetition_penalty=zero + 1,
        seed=np.full(1, NO_SEED, dtype=np.int64),
        all_greedy=True,
        penalized=np.empty(0, dtype=np.int32),
    )
    num_pages = -(-stop // geometry.page_size)
    return StepPlan(
        step=step,
        num_decode=int(decode),
        rows=np.zeros(1, dtype=np.int32),
        query_lens=np.full(1, count, dtype=np.int32),
        input_ids=np.full(count, FROM_DEVICE if decode else 0, dtype=np.int32),
        positions=np.arange(first, stop, dtype=np.int32),
        slot_mapping=np.arange(first, stop, dtype=np.int64),
        kv_lens=np.full(1, stop, dtype=np.int32),
        page_table=np.arange(num_pages, dtype=np.int32).reshape(1, num_pages),
        sample_index=np.zeros(1, dtype=np.int32),
        sampling=sampling,
        generated=np.zeros(1, dtype=np.int32),
        suppressed={},
        resumed={},
        page_copies=np.empty((0, 2), dtype=np.int32),
        logprobs=[],
    )
