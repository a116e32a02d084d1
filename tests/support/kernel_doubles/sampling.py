"""Doubles of FlashInfer's sampling functions."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_lite.adapters.cpu.sampling import CpuSampling
from tests.support.kernel_doubles.capture import kernel
from tests.support.kernel_doubles.checks import require

_TORCH = CpuSampling()


def _check(probs: Tensor, per_row: Tensor | float | int, dtype: torch.dtype) -> Tensor:
    require(probs.dtype == torch.float32 and probs.dim() == 2 and probs.is_contiguous(), "sampling: float32 [b, V]")
    if isinstance(per_row, Tensor):
        require(per_row.dtype == dtype and per_row.shape == probs.shape[:1], f"sampling: {dtype} [b] a row")
        return per_row
    return torch.full(probs.shape[:1], per_row, dtype=dtype)


@kernel
def softmax(logits: Tensor, temperature: Tensor | float | None = None, enable_pdl: bool | None = None) -> Tensor:
    return _TORCH.softmax(logits, _check(logits, 1.0 if temperature is None else temperature, torch.float32))


@kernel
def top_k_renorm_probs(probs: Tensor, top_k: Tensor | int, is_deterministic: bool = False) -> Tensor:
    rows = _check(probs, top_k, torch.int32)
    require(bool((rows > 0).all()), "top_k_renorm: k must be positive")
    return _TORCH.keep_top_k(probs, rows)


@kernel
def top_p_renorm_probs(probs: Tensor, top_p: Tensor | float, is_deterministic: bool = False) -> Tensor:
    return _TORCH.keep_top_p(probs, _check(probs, top_p, torch.float32))


@kernel
def sampling_from_probs(
    probs: Tensor,
    deterministic: bool = True,
    check_nan: bool = False,
    seed: int | None = None,
    offset: int | None = None,
) -> Tensor:
    _check(probs, 1.0, torch.float32)
    require(seed is not None and offset is not None and offset % 4 == 0, "sampling: seed and offset, in fours")
    require(bool(((probs.sum(-1) - 1).abs() < 1e-3).all()), "sampling: probabilities do not add up to 1")
    return _TORCH.draw(probs, seed or 0, offset or 0)
