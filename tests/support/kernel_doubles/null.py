"""Kernels and a device that compute nothing: what remains is the host's own work.

Outputs have the right shapes and undefined values. For measuring, and for tests that only watch shapes and devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_lite.adapters.base import PackedLinear
from sglang_lite.adapters.cuda.operations import CudaOperations
from sglang_lite.adapters.cuda.wheels import Wheels
from sglang_lite.execution.device import DeviceMemory, Event, Graph
from tests.support.kernel_doubles import HOPPER


class NullWrapper:
    """Any attention wrapper."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.num_plans = 0

    def plan(self, *arguments: Any, **options: Any) -> None:
        self.num_plans += 1

    def run(self, *arguments: Any, **options: Any) -> None:
        pass


def _nothing(*arguments: Any, **options: Any) -> None:
    pass


def _same(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return x


def _draw(probabilities: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return torch.zeros(len(probabilities), dtype=torch.int32, device=probabilities.device)


def null_wheels() -> Wheels:
    """Modules whose functions return at once."""
    flashinfer = SimpleNamespace(
        norm=SimpleNamespace(rmsnorm=_same, fused_add_rmsnorm=_nothing, gemma_rmsnorm=_same),
        rope=SimpleNamespace(apply_rope_with_cos_sin_cache_inplace=_nothing),
        page=SimpleNamespace(append_paged_kv_cache=_nothing, append_paged_mla_kv_cache=_nothing),
        activation=SimpleNamespace(silu_and_mul=_nothing, gelu_tanh_and_mul=_nothing),
        sampling=SimpleNamespace(
            softmax=_same, top_k_renorm_probs=_same, top_p_renorm_probs=_same, sampling_from_probs=_draw
        ),
        mla=SimpleNamespace(BatchMLAPagedAttentionWrapper=NullWrapper),
        BatchDecodeWithPagedKVCacheWrapper=NullWrapper,
        BatchPrefillWithPagedKVCacheWrapper=NullWrapper,
        BatchAttentionWithAttentionSinkWrapper=NullWrapper,
    )
    sgl_kernel = SimpleNamespace(silu_and_mul=_nothing, gelu_tanh_and_mul=_nothing, transfer_kv_per_layer_mla=_nothing)
    return Wheels(flashinfer=flashinfer, sgl_kernel=sgl_kernel)


class NullLinear:
    """A product that returns memory of its shape."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._outputs: dict[int, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        tokens = x.shape[0]
        if tokens not in self._outputs:
            self._outputs[tokens] = torch.zeros(tokens, self.out_features, dtype=x.dtype, device=x.device)
        return self._outputs[tokens]


class NullOperations(CudaOperations):
    """The adapters as they are, over kernels and products that compute nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, HOPPER, wheels=null_wheels(), workspace_bytes=64)

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, shared: bool = False) -> PackedLinear:
        return NullLinear(weight)


class NullEvent:
    """Always reached."""

    def record(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class NullGraph:
    """Launches nothing."""

    def replay(self) -> None:
        pass


class NullDevice:
    """An accelerator that is done as soon as something is queued. Tensors live on the named device of torch."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = torch.device(device)

    @property
    def torch_device(self) -> torch.device:
        return self._device

    @contextmanager
    def activate(self) -> Iterator[None]:
        yield

    @contextmanager
    def second_stream(self) -> Iterator[None]:
        yield

    def event(self) -> Event:
        return NullEvent()

    def pinned(self, length: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            return torch.zeros(length, dtype=dtype)

    def upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self._device)

    def share(self, tensor: Tensor) -> None:
        pass

    def capture(self, run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        return NullGraph(), run()

    def memory(self) -> DeviceMemory:
        return DeviceMemory(8 << 30, 6 << 30)

    def synchronize(self) -> None:
        pass
