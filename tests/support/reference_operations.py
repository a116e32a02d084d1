"""The operations of ``adapters.base`` written as plainly as possible: the oracle for every optimised adapter.

One row at a time, keys and values gathered into contiguous float32 tensors, an explicit mask and a softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionBatch, AttentionPlan, KVGeometry
from sglang_lite.adapters.cpu.grammar import CpuGrammar
from sglang_lite.adapters.cpu.lora import CpuAdapters
from sglang_lite.adapters.cpu.quantized import CpuQuantized
from sglang_lite.adapters.grammar import GrammarOperations
from sglang_lite.adapters.latent import LatentOperations
from sglang_lite.adapters.lora import AdapterOperations
from sglang_lite.adapters.moe import MoEOperations
from sglang_lite.adapters.quantized import QuantizedOperations
from tests.support.recurrent_reference import ReferenceRecurrent
from tests.support.reference_latent import ReferenceLatent, ReferencePlan
from tests.support.reference_moe import ReferenceMoE


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    """x @ weight.T + bias."""

    weight: Tensor
    bias: Tensor | None

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])

    def __call__(self, x: Tensor) -> Tensor:
        product = x @ self.weight.T
        return product if self.bias is None else product + self.bias


class ReferenceOperations:
    """See ``sglang_lite.adapters.base.Operations`` for the contracts."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def grammar(self) -> GrammarOperations:
        return CpuGrammar()

    @property
    def lora(self) -> AdapterOperations:
        return CpuAdapters()

    @property
    def quantized(self) -> QuantizedOperations:
        return CpuQuantized()

    @property
    def recurrent(self) -> ReferenceRecurrent:
        return ReferenceRecurrent()

    @property
    def latent(self) -> LatentOperations:
        return ReferenceLatent()

    @property
    def moe(self) -> MoEOperations:
        return ReferenceMoE()

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, shared: bool = False) -> ReferenceLinear:
        return ReferenceLinear(weight, bias)

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        return weight[token_ids]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rotary_neox(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return _rotate(query, cos, sin), _rotate(key, cos, sin)

    def rotary_interleaved(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return _rotate_interleaved(query, cos, sin), _rotate_interleaved(key, cos, sin)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + torch.tanh(inner)) * up

    def plan_attention(self, batch: AttentionBatch, geometry: KVGeometry) -> ReferencePlan:
        return ReferencePlan(batch, geometry.page_size)

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
        assert isinstance(plan, ReferencePlan)
        batch, page_size = plan.batch, plan.page_size
        for token, slot in enumerate(batch.slot_mapping.tolist()):
            page, offset = divmod(slot, page_size)
            pool[page, layer, 0, offset] = key[token]
            pool[page, layer, 1, offset] = value[token]
        outputs = []
        start = 0
        for row, (query_len, kv_len) in enumerate(zip(batch.query_lens, batch.kv_lens, strict=True)):
            pages = batch.page_table[row, : -(-kv_len // page_size)]
            keys, values = (pool[pages, layer, side].flatten(0, 1)[:kv_len].float() for side in (0, 1))
            rows = query[start : start + query_len].float()
            outputs.append(_attend(rows, keys, values, scale, sliding_window, sinks, logit_cap))
            start += query_len
        return torch.cat(outputs).flatten(1).to(query.dtype)

    def copy_pages(self, pool: Tensor, source: Tensor, destination: Tensor) -> None:
        pool[destination] = pool[source]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


def _rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The pairs (2i, 2i + 1) as complex numbers times exp(i angle)."""
    width = 2 * cos.shape[-1]
    turning = torch.view_as_complex(x[..., :width].float().unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(turning * torch.complex(cos, sin)[:, None, :]).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., width:]], dim=-1)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    sliding_window: int | None,
    sinks: Tensor | None,
    logit_cap: float | None,
) -> Tensor:
    """float32 [Q, H, D] against [N, G, D]: the queries are the last Q positions of the N."""
    num_queries, num_heads, _ = query.shape
    num_keys, num_kv_heads, _ = keys.shape
    keys = keys.repeat_interleave(num_heads // num_kv_heads, dim=1)
    values = values.repeat_interleave(num_heads // num_kv_heads, dim=1)
    query_positions = torch.arange(num_keys - num_queries, num_keys)[:, None]
    key_positions = torch.arange(num_keys)[None, :]
    visible = key_positions <= query_positions
    if sliding_window is not None:
        visible &= key_positions > query_positions - sliding_window
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    if logit_cap is not None:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, num_queries, 1)], dim=-1)
    probabilities = scores.softmax(dim=-1)[..., :num_keys]
    return torch.einsum("hqk,khd->qhd", probabilities, values)
