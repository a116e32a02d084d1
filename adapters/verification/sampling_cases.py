"""Probabilities, filters and draws."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sglang_lite.adapters.sampling import SamplingOperations
from sglang_lite.adapters.verification.case import Case, Source, Subject, Tensors, Tolerance

_DRAWS = 20_000


def sampling_cases(source: Source) -> Iterator[Case]:
    """Of ``adapters.sampling``; only for devices that have it."""
    rows, vocabulary = source.extent(1, 7, 40), source.extent(333, 2048)
    logits = source.normal(rows, vocabulary, scale=3.0, dtype=torch.float32)
    inputs = {
        "logits": logits,
        "temperature": source.uniform(rows) + 0.3,
        "probabilities": logits.softmax(-1),
        "top_k": source.integers(1, 60, rows, dtype=torch.int32),
        "top_p": source.uniform(rows) * 0.9 + 0.05,
    }
    shape = f"[{rows}, {vocabulary}]"
    yield Case("SamplingOperations.softmax", shape, inputs, _softmax, Tolerance(1e-6, 1e-4))
    yield Case("SamplingOperations.keep_top_k", shape, inputs, _keep_top_k, Tolerance(1e-6, 1e-4))
    yield Case("SamplingOperations.keep_top_p", shape, inputs, _keep_top_p, Tolerance(1e-6, 1e-4))
    shares = torch.tensor([0.5, 0.0, 0.25, 0.125, 0.125])
    # Six standard deviations of a share of one half.
    allowed = 6 * (0.25 / _DRAWS) ** 0.5
    drawn = {"probabilities": shares.repeat(_DRAWS, 1), "shares": shares}
    yield Case("SamplingOperations.draw", f"[{_DRAWS}, 5]", drawn, _frequencies, Tolerance(allowed), expected=_shares)


def _sampling(subject: Subject) -> SamplingOperations:
    if subject.sampling is None:
        raise ValueError("this device does not sample")
    return subject.sampling


def _softmax(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
    return (_sampling(subject).softmax(given["logits"], given["temperature"]),)


def _keep_top_k(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
    return (_sampling(subject).keep_top_k(given["probabilities"], given["top_k"]),)


def _keep_top_p(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
    return (_sampling(subject).keep_top_p(given["probabilities"], given["top_p"]),)


def _frequencies(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
    tokens = _sampling(subject).draw(given["probabilities"], 12345, 0)
    return (tokens.long().bincount(minlength=given["shares"].numel()).float() / _DRAWS,)


def _shares(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
    return (given["shares"],)
