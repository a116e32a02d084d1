"""The operations of ``adapters.base`` on a CUDA device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionBatch, AttentionPlan, KVGeometry, OperationInputError, PackedLinear
from sglang_lite.adapters.cpu.attention import check_slots
from sglang_lite.adapters.cuda.arena import arena_of
from sglang_lite.adapters.cuda.attention import AttentionPlanner, CudaAttentionPlan, LayerInput, LayerViews
from sglang_lite.adapters.cuda.grammar import CudaGrammar
from sglang_lite.adapters.cuda.latent import CudaLatent
from sglang_lite.adapters.cuda.linear import CudaLinear
from sglang_lite.adapters.cuda.lora import MaskedAdapters
from sglang_lite.adapters.cuda.moe import CudaMoE
from sglang_lite.adapters.cuda.norms import CudaNorms
from sglang_lite.adapters.cuda.paging import HostBatch, arena_length, page_step
from sglang_lite.adapters.cuda.providers import DenseProviders, dense_providers
from sglang_lite.adapters.cuda.quantized import CudaQuantized
from sglang_lite.adapters.cuda.recurrent import CudaRecurrent
from sglang_lite.adapters.cuda.sampling import CudaSampling
from sglang_lite.adapters.cuda.selection import Selection
from sglang_lite.adapters.cuda.wheels import Wheels, load_wheels
from sglang_lite.adapters.cuda.wrappers import AttentionVariant, GraphBuffers, Variant, WrapperSettings
from sglang_lite.adapters.grammar import GrammarOperations
from sglang_lite.adapters.latent import LatentOperations
from sglang_lite.adapters.lora import AdapterOperations
from sglang_lite.adapters.moe import MoEOperations
from sglang_lite.adapters.quantized import QuantizedOperations
from sglang_lite.adapters.recurrent import RecurrentOperations
from sglang_lite.adapters.sampling import SamplingOperations
from sglang_lite.types import Int32Array

WORKSPACE_BYTES = 128 << 20
"""Float workspace of a lane's attention wrappers, as FlashInfer recommends."""

VECTOR_BYTES = 16
"""Rows of the gated activations must be a multiple of the widest load of ``sgl_kernel``."""

MAX_STEP_TOKENS = 1 << 16
"""Steps of up to this many tokens find their row numbers ready."""


class CudaOperations:
    """Float16 and bfloat16 over the kernel wheels. Checks arguments and calls a kernel, nothing else.

    Everything runs on the current stream and allocates from torch's caching allocator, so it can be captured; only
    planning (``plan_attention``) cannot. Steps of one lane run one after another.

    Args:
        device: a CUDA device (tests pass the host, with doubles of the wheels).
        selection: what the dispatch table chooses for the device.
        dtype: of the activations.
        providers: which wheel serves the dense operations; None asks the table.
        wheels: the modules; None imports them.
        workspace_bytes: of attention, a lane.

    Raises:
        OperationInputError: nothing serves a dense operation on the device.
        StartupError: a wheel cannot be imported.
    """

    def __init__(
        self,
        device: torch.device,
        selection: Selection,
        *,
        dtype: torch.dtype = torch.bfloat16,
        providers: DenseProviders | None = None,
        wheels: Wheels | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
    ) -> None:
        providers = providers or dense_providers(selection, dtype)
        self._device = device
        self._providers = providers
        self._wheels = wheels or load_wheels()
        self._workspace_bytes = workspace_bytes
        self._norms = CudaNorms(self._wheels, providers)
        self._views = LayerViews()
        self._recurrent = CudaRecurrent(self._wheels, device)
        self._sampling = CudaSampling(self._wheels, enable_pdl=providers.enable_pdl)
        self._variants: dict[Variant, None] = {}
        self._latent = CudaLatent(self._wheels)
        self._grammar = CudaGrammar(self._wheels)
        self._moe = CudaMoE(self._wheels, selection)
        self._quantized = CudaQuantized(self._wheels, selection, dtype)
        self._lora = MaskedAdapters(device)
        self._first_lane = self._lane_settings()
        self._planner = AttentionPlanner(self._first_lane, self._variants)
        self._token_numbers = torch.arange(MAX_STEP_TOKENS, dtype=torch.int32, device=device)
        self._rotation: tuple[Tensor, Tensor, Tensor] | None = None
        self._append: Any = self._wheels.flashinfer.page.append_paged_kv_cache
        self._rotate: Any = self._wheels.flashinfer.rope.apply_rope_with_cos_sin_cache_inplace
        by_wheel = {"flashinfer": self._wheels.flashinfer.activation, "sgl_kernel": self._wheels.sgl_kernel}
        self._activation: Any = by_wheel[providers.activation]
        self._activation_options = {"enable_pdl": providers.enable_pdl} if providers.activation == "flashinfer" else {}

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def recurrent(self) -> RecurrentOperations:
        """Recurrent layers."""
        return self._recurrent

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
    def sampling(self) -> SamplingOperations:
        return self._sampling

    def pack_linear(self, weight: Tensor, bias: Tensor | None, *, shared: bool = False) -> PackedLinear:
        """Keeps the weight as it is."""
        return CudaLinear(weight, bias)

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """int32 or int64[T], [V, hidden] -> [T, hidden]."""
        return weight.index_select(0, token_ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension; rows may be strided."""
        return self._norms.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual), both written in place."""
        return self._norms.add_rms_norm(x, residual, weight, eps)

    def rotary_neox(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """In place."""
        return self._rotary(query, key, cos, sin, is_neox=True)

    def rotary_interleaved(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """In place."""
        return self._rotary(query, key, cos, sin, is_neox=False)

    def _rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, is_neox: bool) -> tuple[Tensor, Tensor]:
        """The kernel looks rows up by position; cos and sin were taken at the tokens' positions already, so token i
        looks up row i. All layers of a step pass the same cos and sin."""
        if self._rotation is None or self._rotation[0] is not cos:
            self._rotation = cos, self._numbers(query.shape[0]), _joined(cos, sin)
        _, positions, table = self._rotation
        self._rotate(positions, query, key, query.shape[-1], table, is_neox=is_neox)
        return query, key

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2I] -> [T, I]: silu(first half) * second half."""
        return self._gated("silu_and_mul", gate_up)

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2I] -> [T, I]: gelu(first half, tanh approximation) * second half."""
        return self._gated("gelu_tanh_and_mul", gate_up)

    def _gated(self, name: str, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[-1] // 2
        if width * gate_up.element_size() % VECTOR_BYTES:
            raise OperationInputError(
                f"{name}: {width} elements of {gate_up.dtype} a row are no multiple of {VECTOR_BYTES} bytes"
            )
        out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
        getattr(self._activation, name)(gate_up, out=out, **self._activation_options)
        return out

    def plan_attention(self, batch: AttentionBatch, geometry: KVGeometry) -> AttentionPlan:
        """Plan a step whose columns come as tensors. Columns on the device are copied to the host first.

        Raises:
            OperationInputError: an empty step, slots or pages outside the pool, or contradictory columns.
        """
        check_slots(batch.slot_mapping.cpu(), geometry)
        host = HostBatch(
            batch.num_decode,
            np.array(batch.query_lens, dtype=np.int32),
            np.array(batch.kv_lens, dtype=np.int32),
            batch.page_table.cpu().numpy().astype(np.int32, copy=False),
        )
        arena = arena_of(arena_length(host, geometry.page_size), self._device)
        step = page_step(host, geometry.page_size, arena)
        _check_pages(step.kv_indices.array, geometry)
        arena.upload()
        return self._planner.plan(step)

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
        if not isinstance(plan, CudaAttentionPlan):
            raise TypeError(f"the plan must come from plan_attention of these operations, not {type(plan).__name__}")
        variant = AttentionVariant(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[2],
            scale=scale,
            window_left=-1 if sliding_window is None else sliding_window - 1,
            logit_cap=logit_cap or 0.0,
            has_sinks=sinks is not None,
            query_dtype=query.dtype,
            kv_dtype=pool.dtype,
        )
        keys, values = self._views.of(pool, layer)
        return plan.attend(LayerInput(query, key, value, sinks), keys, values, variant, self._append)

    def copy_pages(self, pool: Tensor, source: Tensor, destination: Tensor) -> None:
        """pool[destination] = pool[source] for int64[C] page indices: whole pages, all layers, in one call.

        No page may be both a source and a destination of one call.
        """
        self._wheels.sgl_kernel.transfer_kv_per_layer_mla(
            pool, pool, source, destination, item_size=pool[0].numel() * pool.element_size()
        )

    def new_planner(self, buffers: GraphBuffers | None = None) -> AttentionPlanner:
        """A planner for another lane, with a workspace of its own; or, with buffers, for one captured batch size of
        the first lane, whose workspace it shares."""
        settings = self._first_lane if buffers is not None else self._lane_settings()
        return AttentionPlanner(settings, self._variants, buffers)

    @property
    def planner(self) -> AttentionPlanner:
        """The planner of the first lane."""
        return self._planner

    def _lane_settings(self) -> WrapperSettings:
        workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=self._device)
        providers = self._providers
        return WrapperSettings(
            self._wheels, workspace, providers.prefill_backend, providers.latent_backend, providers.enable_pdl
        )

    def _numbers(self, count: int) -> Tensor:
        """int32[count]: 0, 1, 2, ... A view of memory that captured graphs keep reading, or a new tensor."""
        if count > MAX_STEP_TOKENS:
            return torch.arange(count, dtype=torch.int32, device=self._device)
        return self._token_numbers[:count]


def _check_pages(pages: Int32Array, geometry: KVGeometry) -> None:
    if int(pages.min()) < 0 or int(pages.max()) >= geometry.num_pages:
        wrong = int(pages[(pages < 0) | (pages >= geometry.num_pages)][0])
        raise OperationInputError(f"the page table names page {wrong}; the pool has {geometry.num_pages} pages")


def _joined(cos: Tensor, sin: Tensor) -> Tensor:
    """float32[T, R]: cosines, then sines. Views of one gather are seen as that again, without a copy."""
    tokens, pairs = cos.shape
    if (
        cos.stride() == sin.stride() == (2 * pairs, 1)
        and cos.untyped_storage().data_ptr() == sin.untyped_storage().data_ptr()
        and sin.storage_offset() == cos.storage_offset() + pairs
    ):
        return cos.as_strided((tokens, 2 * pairs), (2 * pairs, 1))
    return torch.cat([cos, sin], dim=-1)
