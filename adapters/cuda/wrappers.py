"""One FlashInfer attention wrapper and the arguments it is planned and run with.

``plan`` is host work with copies to the device and must stay outside a captured graph; ``run`` only launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cuda.wheels import Wheels

TENSOR_CORE_GROUP = 4
"""Query heads per key/value head from which decode on tensor cores is the faster kernel."""


class AttentionVariant(NamedTuple):
    """Everything that makes layers share a planned wrapper. A tuple, because every layer makes and looks up one.

    Attributes:
        num_heads, num_kv_heads, head_dim: of the layer.
        scale: factor on the scores.
        window_left: keys to the left of the query's own position that it sees; -1 for all.
        logit_cap: scores s become cap * tanh(s / cap); 0 for none.
        has_sinks: each head has one more logit in the denominator, without a value.
        query_dtype, kv_dtype: element types of the query and of the pool.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window_left: int
    logit_cap: float
    has_sinks: bool
    query_dtype: torch.dtype
    kv_dtype: torch.dtype


class LatentVariant(NamedTuple):
    """As ``AttentionVariant``, for layers that keep one latent row a token.

    Attributes:
        num_heads: query heads.
        latent_dim, rope_dim: widths of the two parts of a row.
        scale: factor on the scores.
        query_dtype, kv_dtype: element types of the query and of the pool.
    """

    num_heads: int
    latent_dim: int
    rope_dim: int
    scale: float
    query_dtype: torch.dtype
    kv_dtype: torch.dtype


Variant = AttentionVariant | LatentVariant
"""A kind of layer."""


@dataclass(frozen=True, slots=True)
class PageIndices:
    """What a wrapper is planned with: pointers and lengths on the host, page indices on the device.

    Attributes:
        qo_indptr, kv_indptr: int32[B + 1] on the host. last_page_len, kv_lens: int32[B] on the host.
        kv_indices: int32[N] on the device.
        page_size: tokens of a page.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    last_page_len: Tensor
    kv_lens: Tensor
    kv_indices: Tensor
    page_size: int


@dataclass(frozen=True, slots=True)
class GraphBuffers:
    """Device memory at fixed addresses that the wrappers of one captured batch size read.

    Attributes:
        qo_indptr, kv_indptr: int32[B + 1]. last_page_len, kv_lens: int32[B].
        kv_indices: int32, as many as the batch may have pages.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    last_page_len: Tensor
    kv_lens: Tensor
    kv_indices: Tensor


@dataclass(frozen=True, slots=True)
class WrapperSettings:
    """What all wrappers of a lane share.

    Attributes:
        wheels: the modules.
        workspace: uint8 float workspace on the device, shared by wrappers that never run at the same time.
        backend: of prefill and of sinks, ``fa2`` or ``fa3``; decode runs on ``fa2``.
        latent_backend: of latent attention, ``fa2`` or ``fa3``.
        enable_pdl: programmatic dependent launch.
    """

    wheels: Wheels
    workspace: Tensor
    backend: str
    latent_backend: str
    enable_pdl: bool


class PagedWrapper(Protocol):
    """A wrapper for one variant and one kind of row."""

    def plan(self, indices: PageIndices) -> None:
        """Prepare for a step's rows."""

    def run(self, query: Tensor, first: Tensor, second: Tensor, out: Tensor, extra: Tensor | None) -> None:
        """Write ``out``, of the query's shape.

        Keys and values: query [T, H, D]; ``first`` and ``second`` are their [pages, page_size, G, D], strided views of
        the pool; ``extra`` the sinks float32[H] where the variant has them.
        Latent rows: absorbed query [T, H, R]; ``first`` and ``second`` are the latent [pages, page_size, R] and rotary
        part [.., dr] of the rows; ``extra`` the rotary query [T, H, dr].
        """


def make_wrapper(
    settings: WrapperSettings, variant: Variant, *, decode: bool, buffers: GraphBuffers | None = None
) -> PagedWrapper:
    """The wrapper that serves a variant.

    Args:
        decode: rows have one query token each.
        buffers: given for captured graphs.

    Raises:
        OperationInputError: no kernel serves the combination.
    """
    if isinstance(variant, LatentVariant):
        return _LatentWrapper(settings, variant, buffers)
    if variant.has_sinks:
        return _SinkWrapper(settings, variant, buffers)
    return _DecodeWrapper(settings, variant, buffers) if decode else _PrefillWrapper(settings, variant, buffers)


def _backend(settings: WrapperSettings, variant: AttentionVariant) -> str:
    """Windows, logit caps and 8-bit keys and values under a 16-bit query are served by ``fa2``."""
    windowed = variant.window_left >= 0 and not variant.has_sinks
    if windowed or variant.logit_cap or variant.kv_dtype.itemsize == 1:
        return "fa2"
    return settings.backend


class _DecodeWrapper:
    def __init__(self, settings: WrapperSettings, variant: AttentionVariant, buffers: GraphBuffers | None) -> None:
        fixed: dict[str, Any] = {}
        if buffers is not None:
            fixed = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": buffers.kv_indptr,
                "paged_kv_indices_buffer": buffers.kv_indices,
                "paged_kv_last_page_len_buffer": buffers.last_page_len,
            }
        self._variant = variant
        self._enable_pdl = settings.enable_pdl
        self._wrapper: Any = settings.wheels.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            settings.workspace,
            kv_layout="NHD",
            use_tensor_cores=variant.num_heads // variant.num_kv_heads >= TENSOR_CORE_GROUP,
            backend="fa2",
            **fixed,
        )

    def plan(self, indices: PageIndices) -> None:
        variant = self._variant
        self._wrapper.plan(
            indices.kv_indptr,
            indices.kv_indices,
            indices.last_page_len,
            variant.num_heads,
            variant.num_kv_heads,
            variant.head_dim,
            indices.page_size,
            q_data_type=variant.query_dtype,
            kv_data_type=variant.kv_dtype,
            o_data_type=variant.query_dtype,
            sm_scale=variant.scale,
            window_left=variant.window_left,
            logits_soft_cap=variant.logit_cap,
            pos_encoding_mode="NONE",
            non_blocking=True,
        )

    def run(self, query: Tensor, first: Tensor, second: Tensor, out: Tensor, extra: Tensor | None) -> None:
        self._wrapper.run(query, (first, second), out=out, enable_pdl=self._enable_pdl)


def _prefill_plan(variant: AttentionVariant, indices: PageIndices) -> dict[str, Any]:
    return {
        "qo_indptr": indices.qo_indptr,
        "paged_kv_indptr": indices.kv_indptr,
        "paged_kv_indices": indices.kv_indices,
        "paged_kv_last_page_len": indices.last_page_len,
        "num_qo_heads": variant.num_heads,
        "num_kv_heads": variant.num_kv_heads,
        "head_dim_qk": variant.head_dim,
        "page_size": indices.page_size,
        "causal": True,
        "pos_encoding_mode": "NONE",
        "sm_scale": variant.scale,
        "window_left": variant.window_left,
        "q_data_type": variant.query_dtype,
        "kv_data_type": variant.kv_dtype,
        "o_data_type": variant.query_dtype,
        "non_blocking": True,
    }


def _prefill_buffers(buffers: GraphBuffers | None) -> dict[str, Any]:
    if buffers is None:
        return {}
    return {
        "use_cuda_graph": True,
        "qo_indptr_buf": buffers.qo_indptr,
        "paged_kv_indptr_buf": buffers.kv_indptr,
        "paged_kv_indices_buf": buffers.kv_indices,
        "paged_kv_last_page_len_buf": buffers.last_page_len,
    }


class _PrefillWrapper:
    def __init__(self, settings: WrapperSettings, variant: AttentionVariant, buffers: GraphBuffers | None) -> None:
        self._variant = variant
        self._enable_pdl = settings.enable_pdl
        self._wrapper: Any = settings.wheels.flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            settings.workspace, kv_layout="NHD", backend=_backend(settings, variant), **_prefill_buffers(buffers)
        )

    def plan(self, indices: PageIndices) -> None:
        self._wrapper.plan(logits_soft_cap=self._variant.logit_cap, **_prefill_plan(self._variant, indices))

    def run(self, query: Tensor, first: Tensor, second: Tensor, out: Tensor, extra: Tensor | None) -> None:
        self._wrapper.run(query, (first, second), out=out, enable_pdl=self._enable_pdl)


class _SinkWrapper:
    """Serves decode rows too: the plain wrappers do not apply sinks on these backends."""

    def __init__(self, settings: WrapperSettings, variant: AttentionVariant, buffers: GraphBuffers | None) -> None:
        if variant.logit_cap:
            raise OperationInputError(
                f"attention with sinks and a logit cap of {variant.logit_cap}: no kernel of the wheels does both"
            )
        self._variant = variant
        self._enable_pdl = settings.enable_pdl
        self._wrapper: Any = settings.wheels.flashinfer.BatchAttentionWithAttentionSinkWrapper(
            settings.workspace,
            kv_layout="NHD",
            backend=_backend(settings, variant),
            pos_encoding_mode="NONE",
            q_data_type=variant.query_dtype,
            kv_data_type=variant.kv_dtype,
            head_dim_qk=variant.head_dim,
            head_dim_vo=variant.head_dim,
            window_left=variant.window_left,
            **_prefill_buffers(buffers),
        )

    def plan(self, indices: PageIndices) -> None:
        self._wrapper.plan(**_prefill_plan(self._variant, indices))

    def run(self, query: Tensor, first: Tensor, second: Tensor, out: Tensor, extra: Tensor | None) -> None:
        # Sinks and scale are the two extra arguments of the kernel that this wrapper compiles.
        self._wrapper.run(query, (first, second), extra, self._variant.scale, out=out, enable_pdl=self._enable_pdl)


class _LatentWrapper:
    def __init__(self, settings: WrapperSettings, variant: LatentVariant, buffers: GraphBuffers | None) -> None:
        fixed: dict[str, Any] = {}
        if buffers is not None:
            fixed = {
                "use_cuda_graph": True,
                "qo_indptr": buffers.qo_indptr,
                "kv_indptr": buffers.kv_indptr,
                "kv_indices": buffers.kv_indices,
                "kv_len_arr": buffers.kv_lens,
            }
        self._variant = variant
        self._wrapper: Any = settings.wheels.flashinfer.mla.BatchMLAPagedAttentionWrapper(
            settings.workspace, backend=settings.latent_backend, **fixed
        )

    def plan(self, indices: PageIndices) -> None:
        variant = self._variant
        self._wrapper.plan(
            qo_indptr=indices.qo_indptr,
            kv_indptr=indices.kv_indptr,
            kv_indices=indices.kv_indices,
            kv_len_arr=indices.kv_lens,
            num_heads=variant.num_heads,
            head_dim_ckv=variant.latent_dim,
            head_dim_kpe=variant.rope_dim,
            page_size=indices.page_size,
            causal=True,
            sm_scale=variant.scale,
            q_data_type=variant.query_dtype,
            kv_data_type=variant.kv_dtype,
        )

    def run(self, query: Tensor, first: Tensor, second: Tensor, out: Tensor, extra: Tensor | None) -> None:
        self._wrapper.run(q_nope=query, q_pe=extra, ckv_cache=first, kpe_cache=second, out=out)
