"""Causal convolution and the gated delta rule."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sglang_lite.adapters.recurrent import RecurrentBatch
from sglang_lite.adapters.verification.case import Case, Source, Subject, Tensors

_POOL_ROWS = 12


def recurrent_cases(source: Source) -> Iterator[Case]:
    """Steps of decode rows, of prompts, and of both."""
    decode, prefill = source.extent(1, 3), source.extent(1, 2)
    for rows, name in (((decode, 0), "decode"), ((0, prefill), "prefill"), ((decode, prefill), "mixed")):
        batch = _batch(source, *rows)
        yield _convolution(source, batch, name)
        yield _delta(source, batch, name, per_channel=False)
    yield _delta(source, _batch(source, decode, prefill), "mixed, decay by channel", per_channel=True)


def _batch(source: Source, decode_rows: int, prefill_rows: int) -> RecurrentBatch:
    lengths = [1] * decode_rows + [int(length) for length in source.integers(2, 90, prefill_rows)]
    rows = source.permutation(_POOL_ROWS)[: len(lengths)].tolist()
    fresh = [False] * decode_rows + [index % 2 == 0 for index in range(prefill_rows)]
    return RecurrentBatch(decode_rows, lengths, rows, fresh)


def _convolution(source: Source, batch: RecurrentBatch, name: str) -> Case:
    tokens, channels, taps = sum(batch.query_lens), source.extent(64, 192), 4
    inputs = {
        "x": source.normal(tokens, channels),
        "weight": source.normal(channels, taps),
        "state": source.normal(_POOL_ROWS, channels, taps - 1),
    }

    def convolve(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        recurrent = subject.operations.recurrent
        out = recurrent.causal_conv(given["x"], given["weight"], given["state"], recurrent.plan(batch))
        return out, given["state"]

    shape = f"{name}: [{tokens}, {channels}], {taps} taps"
    tolerance = source.within(8, 4)
    also = ("RecurrentOperations.plan",)
    return Case("RecurrentOperations.causal_conv", shape, inputs, convolve, tolerance, also=also)


def _delta(source: Source, batch: RecurrentBatch, name: str, *, per_channel: bool) -> Case:
    tokens, key_heads, value_heads, key_dim, value_dim = sum(batch.query_lens), 2, 4, 64, 64
    decay_shape = (tokens, value_heads, key_dim) if per_channel else (tokens, value_heads)
    inputs = {
        "query": source.normal(tokens, key_heads, key_dim),
        "key": source.normal(tokens, key_heads, key_dim),
        "value": source.normal(tokens, value_heads, value_dim),
        "log_decay": -source.uniform(*decay_shape),
        "beta": source.uniform(tokens, value_heads).to(source.dtype),
        "state": source.normal(_POOL_ROWS, value_heads, key_dim, value_dim, dtype=torch.float32),
    }

    def run(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        recurrent = subject.operations.recurrent
        out = recurrent.gated_delta(
            given["query"],
            given["key"],
            given["value"],
            given["log_decay"],
            given["beta"],
            given["state"],
            recurrent.plan(batch),
        )
        return out, given["state"]

    shape = f"{name}: {tokens} tokens, {key_heads}/{value_heads} heads of {key_dim}"
    tolerance = source.within(16, 8)
    also = ("RecurrentOperations.plan",)
    return Case("RecurrentOperations.gated_delta", shape, inputs, run, tolerance, also=also)
