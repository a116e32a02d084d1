"""Operations on the host processor, in torch and NumPy."""

from sglang_lite.adapters.cpu.operations import CpuOperations

__all__ = ["CpuOperations"]
