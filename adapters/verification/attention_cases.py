"""Attention over a paged pool: keys and values, and latent rows. Steps mix decode rows and chunks of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionBatch, KVGeometry
from sglang_lite.adapters.verification.case import Case, Source, Subject, Tensors

_PAGE_SIZE = 16
_LATENT, _ROPE, _NOPE, _VALUE = 512, 64, 128, 128


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of a step: decode rows first.

    Attributes:
        num_decode: rows with one query token.
        query_lens, kv_lens: of each row.
        page_table: int64[B, W].
        num_pages: of the pool; pages lie in it in random order.
    """

    num_decode: int
    query_lens: list[int]
    kv_lens: list[int]
    page_table: Tensor
    num_pages: int

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return sum(self.query_lens)

    def slots(self) -> Tensor:
        """int64[T], pool slot of each query token."""
        found = []
        for row, (queries, length) in enumerate(zip(self.query_lens, self.kv_lens, strict=True)):
            positions = torch.arange(length - queries, length)
            found.append(self.page_table[row, positions // _PAGE_SIZE] * _PAGE_SIZE + positions % _PAGE_SIZE)
        return torch.cat(found)


def random_step(source: Source, decode_rows: int, prefill_rows: int, longest: int) -> Step:
    """Rows of random lengths with prefixes that are in the pool already."""
    kv_lens = [int(length) for length in source.integers(1, longest, decode_rows + prefill_rows)]
    query_lens = [1] * decode_rows
    for length in kv_lens[decode_rows:]:
        query_lens.append(int(source.integers(1, length + 1, 1)))
    widths = [-(-length // _PAGE_SIZE) for length in kv_lens]
    num_pages = sum(widths) + 2
    order = source.permutation(num_pages)
    table = torch.zeros(len(kv_lens), max(widths), dtype=torch.int64)
    taken = 0
    for row, width in enumerate(widths):
        table[row, :width] = order[taken : taken + width]
        taken += width
    return Step(decode_rows, query_lens, kv_lens, table, num_pages)


def attention_cases(source: Source) -> Iterator[Case]:
    """Grouped-query attention with each of its options, then latent attention."""
    decode, prefill = source.extent(1, 3, 9), source.extent(1, 2)
    for rows, name in (((decode, 0), "decode"), ((0, prefill), "prefill"), ((decode, prefill), "mixed")):
        yield _case(source, random_step(source, *rows, longest=90), name)
    step = random_step(source, decode, prefill, longest=120)
    yield _case(source, step, "mixed, window 37", sliding_window=37)
    yield _case(source, step, "mixed, logit cap 20", logit_cap=20.0)
    yield _case(source, step, "mixed, sinks", sinks=True)
    yield _case(source, step, "mixed, sinks, window 37", sinks=True, sliding_window=37)
    for rows, name in (((decode, 0), "decode"), ((decode, prefill), "mixed")):
        yield _latent_case(source, random_step(source, *rows, longest=70), name)


def _planned_inputs(step: Step) -> Tensors:
    return {"slots": step.slots(), "page_table": step.page_table}


def _batch(step: Step, given: Tensors) -> AttentionBatch:
    return AttentionBatch(
        step.num_decode, list(step.query_lens), list(step.kv_lens), given["slots"], given["page_table"]
    )


def _case(
    source: Source,
    step: Step,
    name: str,
    *,
    sliding_window: int | None = None,
    logit_cap: float | None = None,
    sinks: bool = False,
) -> Case:
    kv_heads, head_dim, layers = source.extent(1, 2), source.extent(64, 128), 2
    heads = kv_heads * source.extent(1, 4)
    inputs = _planned_inputs(step) | {
        "query": source.normal(step.num_tokens, heads, head_dim),
        "key": source.normal(step.num_tokens, kv_heads, head_dim),
        "value": source.normal(step.num_tokens, kv_heads, head_dim),
        "pool": source.normal(step.num_pages, layers, 2, _PAGE_SIZE, kv_heads, head_dim),
    }
    if sinks:
        inputs["sinks"] = source.normal(heads, dtype=torch.float32)

    def call(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        ops, pool = subject.operations, given["pool"]
        geometry = KVGeometry(step.num_pages, _PAGE_SIZE, layers, kv_heads, head_dim, pool.dtype)
        plan = ops.plan_attention(_batch(step, given), geometry)
        out = ops.attention(
            given["query"],
            given["key"],
            given["value"],
            pool,
            1,
            plan,
            scale=head_dim**-0.5,
            sliding_window=sliding_window,
            sinks=given.get("sinks"),
            logit_cap=logit_cap,
        )
        return out, pool

    shape = f"{name}: {len(step.kv_lens)} rows, {step.num_tokens} tokens, {heads}/{kv_heads} heads of {head_dim}"
    tolerance = source.within(6, 4)
    return Case("Operations.attention", shape, inputs, call, tolerance, also=("Operations.plan_attention",))


def _latent_case(source: Source, step: Step, name: str) -> Case:
    heads, layers = source.extent(2, 4), 2
    inputs = _planned_inputs(step) | {
        "query_nope": source.normal(step.num_tokens, heads, _NOPE),
        "query_rope": source.normal(step.num_tokens, heads, _ROPE),
        "rows": source.normal(step.num_tokens, _LATENT + _ROPE),
        "weight": source.normal(heads * (_NOPE + _VALUE), _LATENT, scale=_LATENT**-0.5),
        "pool": source.normal(step.num_pages, layers, 1, _PAGE_SIZE, 1, _LATENT + _ROPE),
    }

    def call(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        ops, pool = subject.operations, given["pool"]
        geometry = KVGeometry(
            step.num_pages, _PAGE_SIZE, layers, 1, _LATENT + _ROPE, pool.dtype, num_tensors=1, latent_width=_LATENT
        )
        projection = ops.latent.pack_projection(given["weight"], heads, _NOPE)
        out = ops.latent.attention(
            given["query_nope"],
            given["query_rope"],
            given["rows"],
            projection,
            pool,
            1,
            ops.plan_attention(_batch(step, given), geometry),
            scale=(_NOPE + _ROPE) ** -0.5,
        )
        return out, pool

    shape = f"{name}: {len(step.kv_lens)} rows, {step.num_tokens} tokens, {heads} heads"
    tolerance = source.within(16, 8)
    also = ("LatentOperations.pack_projection", "Operations.plan_attention")
    return Case("LatentOperations.attention", shape, inputs, call, tolerance, also=also)
