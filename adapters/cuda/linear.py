"""Dense linear layers on CUDA: torch's product, which calls cuBLAS."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


class CudaLinear:
    """See ``adapters.base.PackedLinear``. The weight [out, in] is kept as it was read."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    @property
    def in_features(self) -> int:
        return int(self._weight.shape[1])

    @property
    def out_features(self) -> int:
        return int(self._weight.shape[0])

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return functional.linear(x, self._weight, self._bias)
