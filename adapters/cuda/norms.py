"""RMS norms of either wheel, behind one call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_lite.adapters.cuda.providers import DenseProviders
from sglang_lite.adapters.cuda.wheels import Wheels


class CudaNorms:
    """float16 and bfloat16 [T, hidden] or [T, H, D], rows strided, last dimension contiguous.

    The functions of ``sgl_kernel`` hand over to ``flashinfer`` where that is installed; its operators do not, so they
    are called directly.
    """

    def __init__(self, wheels: Wheels, providers: DenseProviders) -> None:
        self._enable_pdl = providers.enable_pdl
        self._operators: Any = None
        self._norm: Any = wheels.flashinfer.norm
        if providers.norm == "sgl_kernel":
            self._operators = torch.ops.sgl_kernel

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, gemma: bool = False) -> Tensor:
        """A new tensor: x / rms(x) * weight, or * (1 + weight) with ``gemma``."""
        if self._operators is not None:
            return self._run_operator(self._operator("rmsnorm", gemma), x, weight, eps)
        function = self._norm.gemma_rmsnorm if gemma else self._norm.rmsnorm
        result: Tensor = function(x, weight, eps=eps, enable_pdl=self._enable_pdl)
        return result

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, gemma: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Both in place: residual += x, then x = norm(residual)."""
        if self._operators is not None:
            self._operator("fused_add_rmsnorm", gemma)(x, residual, weight, eps, self._enable_pdl)
            return x, residual
        function = self._norm.gemma_fused_add_rmsnorm if gemma else self._norm.fused_add_rmsnorm
        function(x, residual, weight, eps=eps, enable_pdl=self._enable_pdl)
        return x, residual

    def _operator(self, name: str, gemma: bool) -> Callable[..., None]:
        operator: Callable[..., None] = getattr(self._operators, f"gemma_{name}" if gemma else name).default
        return operator

    def _run_operator(self, operator: Callable[..., None], x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The operator takes contiguous matrices only."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty_like(rows)
        operator(out, rows, weight, eps, self._enable_pdl)
        return out.view(x.shape)
