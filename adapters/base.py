"""Protocols of the operations that models are made of.

Shapes use T tokens of a step, B rows of a step, H query heads, G key/value heads, D head size.
Every implementation states dtype and layout here and nowhere else; a method that works in place says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sglang_lite.adapters.grammar import GrammarOperations
from sglang_lite.adapters.latent import LatentOperations
from sglang_lite.adapters.lora import AdapterOperations
from sglang_lite.adapters.moe import MoEOperations
from sglang_lite.adapters.quantized import QuantizedOperations
from sglang_lite.adapters.recurrent import RecurrentOperations
from sglang_lite.types import Int32Array


class OperationInputError(ValueError):
    """Arguments that an operation cannot work on, found before anything was computed or written."""


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of the KV pool: page -> layer -> tensor -> token -> head -> element, one contiguous allocation.

    With two tensors a layer keeps keys and values. With one it keeps a latent row per token (see ``adapters.latent``):
    one head, whose row is the key and whose first ``latent_width`` elements are the value.

    Attributes:
        num_pages, page_size, num_layers, num_kv_heads, head_dim: extents; ``num_layers`` counts layers that keep KV.
        dtype: element type of the pool.
        num_tensors: 2 for keys and values, 1 for latent rows.
        latent_width: elements of a latent row that are its value; 0 with two tensors.
    """

    num_pages: int
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    num_tensors: int = 2
    latent_width: int = 0

    @property
    def key_width(self) -> int:
        """Elements of one token's key in one layer, all heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Elements of one token's value in one layer, all heads."""
        return self.latent_width if self.num_tensors == 1 else self.key_width

    @property
    def pool_shape(self) -> tuple[int, int, int, int, int, int]:
        """[pages, layers, tensors, page_size, G, D]."""
        extents = (self.num_pages, self.num_layers, self.num_tensors)
        return (*extents, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers and tensors."""
        return self.num_layers * self.num_tensors * self.key_width * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and tensors: one span to register and to send."""
        return self.page_size * self.bytes_per_token


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What attention needs to know of a step, as tensors on the device plus host copies of the small columns.

    Attributes:
        num_decode: the first ``num_decode`` rows have one query token each; the rest are prefill chunks, behind the
            rows that verify.
        num_verify: that many rows behind the decode rows go on with their sequence as those do, by a few tokens at
            once, of which the last may be taken back. An implementation may handle them as prefill chunks.
        query_lens: list[int] of length B.
        kv_lens: list[int] of length B, sequence length after this step (queries are the last ``query_lens`` of it).
        slot_mapping: int64[T], pool slot of each token.
        page_table: int64[B, W], page indices; entries past a row's length are 0.
        rows: int32[B], what tells the sequences of a batch apart from step to step: a row is one sequence from its
            last prefill chunk on until it is seen in a prefill chunk again. None when nothing is known; an
            implementation may keep copies of a sequence's keys and values under its row.
    """

    num_decode: int
    query_lens: list[int]
    kv_lens: list[int]
    slot_mapping: Tensor
    page_table: Tensor
    rows: Int32Array | None = None
    num_verify: int = 0


class PackedLinear(Protocol):
    """A weight prepared for this device. ``in_features`` and ``out_features`` as in torch.nn.Linear."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], bias added when there is one."""


class AttentionPlan(Protocol):
    """Work common to all layers of one step, made once by ``Operations.plan_attention``."""


class Operations(Protocol):
    """The operations of one device. All tensors are on that device; outputs are new unless said otherwise."""

    @property
    def device(self) -> torch.device: ...

    @property
    def grammar(self) -> GrammarOperations: ...

    @property
    def latent(self) -> LatentOperations: ...

    @property
    def lora(self) -> AdapterOperations: ...

    @property
    def moe(self) -> MoEOperations: ...

    @property
    def quantized(self) -> QuantizedOperations: ...

    @property
    def recurrent(self) -> RecurrentOperations: ...

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, shared: bool = False) -> PackedLinear:
        """Take over ``weight`` [out, in] (and ``bias`` [out]); the caller drops its references.

        ``shared``: the weight is used elsewhere too (a tied embedding), so it is kept as it is and not copied.
        """

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """int64[T], [V, hidden] -> [T, hidden]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight over the last dimension, in float32, cast back to x.dtype."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual). May write into either input; use only the returned tensors."""

    def rotary_neox(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate pairs (i, i + R/2) of the first R = 2 * cos.shape[-1] elements of each head.

        query [T, H, D], key [T, G, D], cos and sin float32[T, R/2] already taken at the tokens' positions.
        May work in place; use only the returned tensors.
        """

    def rotary_interleaved(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """As ``rotary_neox``, for pairs (2i, 2i + 1): they stay where they are."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2I] -> [T, I]: silu(first half) * second half."""

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2I] -> [T, I]: gelu(first half, tanh approximation) * second half."""

    def plan_attention(self, batch: AttentionBatch, geometry: KVGeometry) -> AttentionPlan:
        """Prepare indices, masks and scratch of a step once for all layers."""

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
        """Append key and value to the pool, then attend causally over the paged sequences.

        query [T, H, D]; key, value [T, G, D]; pool [pages, layers, 2, page_size, G, D] (written at this layer).
        ``sliding_window=W``: the query at position i sees keys j with i - W < j <= i.
        ``sinks`` float32[H]: one more logit a head in the softmax's denominator, which contributes no value.
        ``logit_cap=c``: scaled scores s become c * tanh(s / c) before the softmax. Returns [T, H * D].
        """

    def copy_pages(self, pool: Tensor, source: Tensor, destination: Tensor) -> None:
        """pool[destination] = pool[source] for int64[C] page indices, all layers."""
