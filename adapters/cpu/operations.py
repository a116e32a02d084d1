"""The operations of ``adapters.base`` on the host processor."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from sglang_lite.adapters.base import AttentionBatch, AttentionPlan, KVGeometry, PackedLinear
from sglang_lite.adapters.cpu.attention import CpuAttention, CpuAttentionPlan
from sglang_lite.adapters.cpu.grammar import CpuGrammar
from sglang_lite.adapters.cpu.latent_attention import CpuLatentAttention
from sglang_lite.adapters.cpu.linear import CpuLinear, LinearCalibration
from sglang_lite.adapters.cpu.lora import CpuAdapters
from sglang_lite.adapters.cpu.moe import CpuMoE
from sglang_lite.adapters.cpu.quantized import CpuQuantized
from sglang_lite.adapters.cpu.recurrent import CpuRecurrent
from sglang_lite.adapters.grammar import GrammarOperations
from sglang_lite.adapters.latent import LatentOperations
from sglang_lite.adapters.lora import AdapterOperations
from sglang_lite.adapters.moe import MoEOperations
from sglang_lite.adapters.quantized import QuantizedOperations
from sglang_lite.adapters.recurrent import RecurrentOperations

_FEW_TOKENS = 64
"""Up to this many tokens dispatch costs more than memory traffic, so fewer operations win."""


class CpuOperations:
    """Float32 and bfloat16 in torch. Float32 products keep full precision.

    Args:
        measure: choose linear engines by timing them at start (``linear.LinearCalibration``).
        workspace_bytes: memory the decode attention may use for copies of running sequences' keys and values; 0
            reads the pool directly.
    """

    def __init__(self, *, measure: bool = True, workspace_bytes: int = 0) -> None:
        self._calibration = LinearCalibration(measure=measure)
        self._attention = CpuAttention(workspace_bytes)
        self._latent = CpuLatentAttention()
        self._lora = CpuAdapters()
        self._grammar = CpuGrammar()
        self._moe = CpuMoE()
        self._quantized = CpuQuantized()
        self._recurrent = CpuRecurrent()
        self._floors: dict[tuple[float, int], Tensor] = {}
        self._scaled_weights: dict[int, tuple[Tensor, Tensor]] = {}  # by identity, with the weight itself
        self._whole_heads: tuple[Tensor, Tensor, Tensor] | None = None

    def release(self) -> None:
        """Let go of what is kept of pools and weights between steps; the next step makes it again."""
        self._attention.release()
        self._latent.release()
        self._scaled_weights.clear()
        self._whole_heads = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def grammar(self) -> GrammarOperations:
        return self._grammar

    @property
    def latent(self) -> LatentOperations:
        return self._latent

    @property
    def lora(self) -> AdapterOperations:
        return self._lora

    @property
    def moe(self) -> MoEOperations:
        return self._moe

    @property
    def quantized(self) -> QuantizedOperations:
        return self._quantized

    @property
    def recurrent(self) -> RecurrentOperations:
        return self._recurrent

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, shared: bool = False) -> PackedLinear:
        """Take over ``weight`` [out, in] in the layout measured fastest for its shape."""
        choice = self._calibration.choice(weight, has_bias=bias is not None, shared=shared)
        return CpuLinear(weight, bias, choice)

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """int64[T], [V, hidden] -> [T, hidden]."""
        return weight.index_select(0, token_ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension, in float32, cast back to x.dtype."""
        if x.dtype != torch.float32:
            return functional.rms_norm(x, weight.shape, weight, eps)
        # The same formula in fewer and wider operations than torch's composite: with n elements, the root of
        # mean(x^2) + eps is hypot(|x|, sqrt(n * eps)) / sqrt(n).
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.div(x, length.hypot_(self._floor(eps, x.shape[-1]))).mul_(self._scaled(weight))

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual), the sum written into ``residual``."""
        residual.add_(x)
        return self.rms_norm(residual, weight, eps), residual

    def _floor(self, eps: float, size: int) -> Tensor:
        """sqrt(size * eps) as a tensor."""
        if (eps, size) not in self._floors:
            with torch.inference_mode(False):
                self._floors[eps, size] = torch.tensor(math.sqrt(size * eps))
        return self._floors[eps, size]

    def _scaled(self, weight: Tensor) -> Tensor:
        """The weight of a norm times the root of its length; made once for each, which is kept with it."""
        held = self._scaled_weights.get(id(weight))
        if held is None or held[0] is not weight:
            with torch.inference_mode(False):
                held = weight, weight.detach().float() * math.sqrt(weight.shape[-1])
            self._scaled_weights[id(weight)] = held
        return held[1]

    def rotary_neox(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates in place where that is fastest; query and key that lie side by side are rotated together."""
        joined = adjacent_heads(query, key)
        if joined is not None and query.shape[0] <= _FEW_TOKENS and 2 * cos.shape[-1] == query.shape[-1]:
            rotated = self._rotate_whole(joined, cos, sin)
            return rotated[:, : query.shape[1]], rotated[:, query.shape[1] :]
        if joined is None:
            _rotate(query, cos, sin)
            _rotate(key, cos, sin)
        else:
            _rotate(joined, cos, sin)
        return query, key

    def rotary_interleaved(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """As ``rotary_neox`` for neighbouring pairs, in place."""
        rotate_pairs(query, cos, sin)
        rotate_pairs(key, cos, sin)
        return query, key

    def _rotate_whole(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, N, D] with all of each head rotating, in three operations."""
        if self._whole_heads is None or self._whole_heads[0] is not cos:  # every layer of a step passes the same
            self._whole_heads = cos, torch.cat([cos, cos], -1).unsqueeze(1), torch.cat([-sin, sin], -1).unsqueeze(1)
        _, cosines, sines = self._whole_heads
        halves_swapped = x.roll(cos.shape[-1], -1)
        return torch.addcmul(x * cosines, halves_swapped, sines).to(x.dtype)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2I] -> [T, I]: silu(first half) * second half."""
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate).mul_(up)

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2I] -> [T, I]: gelu(first half, tanh approximation) * second half."""
        gate, up = gate_up.chunk(2, -1)
        return functional.gelu(gate, approximate="tanh").mul_(up)

    def plan_attention(self, batch: AttentionBatch, geometry: KVGeometry) -> AttentionPlan:
        """Indices, masks and scratch of a step."""
        if geometry.num_tensors == 1:
            return self._latent.plan(batch, geometry)
        return self._attention.plan(batch, geometry)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pool: Tensor,
        layer: int,
        plan: AttentionPlan,
        *,
        scale: float,
        sliding_window: int | None,
        sinks: Tensor | None = None,
        logit_cap: float | None = None,
    ) -> Tensor:
        """Append key and value to the pool, then attend causally. Returns [T, H * D]."""
        if not isinstance(plan, CpuAttentionPlan):
            raise TypeError(f"the plan must come from plan_attention of these operations, not {type(plan).__name__}")
        return self._attention.run(query, key, value, pool, layer, plan, scale, sliding_window, sinks, logit_cap)

    def copy_pages(self, pool: Tensor, source: Tensor, destination: Tensor) -> None:
        """pool[destination] = pool[source] for int64[C] page indices, all layers."""
        pool.index_copy_(0, destination, pool.index_select(0, source))
        self._attention.pages_copied(destination)


def adjacent_heads(first: Tensor, second: Tensor) -> Tensor | None:
    """[T, H, D] and [T, G, D] as one view [T, H + G, D] when they are neighbours in memory, else None."""
    heads, head_dim = first.shape[1:]
    if (
        first.stride() != second.stride()
        or first.stride(1) != head_dim
        or first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
        or second.storage_offset() != first.storage_offset() + heads * head_dim
    ):
        return None
    return first.as_strided((first.shape[0], heads + second.shape[1], head_dim), first.stride())


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the pairs (2i, 2i + 1) of the first 2 * cos.shape[-1] elements of [T, N, D] in place."""
    width = 2 * cos.shape[-1]
    first, second = x[..., 0:width:2], x[..., 1:width:2]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    new_first = torch.addcmul(first * cos, second, sin, value=-1)
    new_second = torch.addcmul(second * cos, first, sin)
    first.copy_(new_first)
    second.copy_(new_second)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the pairs (i, i + R/2) of [T, N, D] in place; the arithmetic is float32 whatever the type of ``x``."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    new_first = torch.addcmul(first * cos, second, sin, value=-1)
    new_second = torch.addcmul(second * cos, first, sin)
    first.copy_(new_first)
    second.copy_(new_second)
