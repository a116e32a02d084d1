"""What the kernels refuse, checked by their doubles with the same strictness."""

from __future__ import annotations

import torch
from torch import Tensor


class KernelError(RuntimeError):
    """Arguments that the kernel would reject, or read and write out of bounds with."""


class Precision:
    """Element types that the doubles take. The kernels take 16-bit types; comparing tokens with another device needs
    float32, where rounding does not decide."""

    allow_float32 = False


def require(condition: bool, message: str) -> None:
    """Raise KernelError unless the condition holds."""
    if not condition:
        raise KernelError(message)


def check_float(name: str, *tensors: Tensor) -> None:
    """float16 or bfloat16, all of one type."""
    allowed = {torch.float16, torch.bfloat16} | ({torch.float32} if Precision.allow_float32 else set())
    for tensor in tensors:
        require(tensor.dtype in allowed, f"{name}: {tensor.dtype} is not supported, only float16 and bfloat16")
        require(tensor.dtype == tensors[0].dtype, f"{name}: mixed types {tensor.dtype} and {tensors[0].dtype}")


def check_last_contiguous(name: str, *tensors: Tensor) -> None:
    """The last dimension lies together."""
    for tensor in tensors:
        require(tensor.stride(-1) == 1, f"{name}: the last dimension must be contiguous, strides {tensor.stride()}")


def check_int32(name: str, *tensors: Tensor) -> None:
    """int32, one dimension, contiguous."""
    for tensor in tensors:
        require(
            tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous(),
            f"{name}: must be a contiguous int32 vector, got {tensor.dtype}{list(tensor.shape)}",
        )
