"""Doubles of latent attention: the append kernel and the paged wrapper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.kernel_doubles.capture import host_only, is_recording, kernel
from tests.support.kernel_doubles.checks import (
    KernelError,
    Precision,
    check_float,
    check_int32,
    check_last_contiguous,
    require,
)

WIDTHS = (512, 64)


def _check_widths(latent_dim: int, rope_dim: int) -> None:
    require(
        (latent_dim, rope_dim) == WIDTHS or Precision.allow_float32,
        f"latent rows of {latent_dim} + {rope_dim}; only {WIDTHS[0]} + {WIDTHS[1]} is compiled",
    )


@kernel
def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    check_last_contiguous("append_mla", append_ckv, append_kpe, ckv_cache, kpe_cache)
    check_int32("append_mla", batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    _check_widths(append_ckv.shape[1], append_kpe.shape[1])
    require(append_ckv.dtype == append_kpe.dtype == ckv_cache.dtype == kpe_cache.dtype, "append_mla: mixed types")
    require(ckv_cache.dim() == kpe_cache.dim() == 3, "append_mla: caches are [pages, page_size, width]")
    page_size = ckv_cache.shape[1]
    for token, (row, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        start, stop = int(kv_indptr[row]), int(kv_indptr[row + 1])
        length = (stop - start - 1) * page_size + int(kv_last_page_len[row])
        require(0 <= position < length, f"append_mla: position {position} of a sequence of {length} tokens")
        page = int(kv_indices[start + position // page_size])
        ckv_cache[page, position % page_size] = append_ckv[token]
        kpe_cache[page, position % page_size] = append_kpe[token]


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        require(backend in ("auto", "fa2", "fa3"), f"backend {backend}")
        self._buffers = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_len_arr": kv_len_arr}
        self._indices_buffer = kv_indices
        for name, buffer in {**self._buffers, "kv_indices": kv_indices}.items():
            require((buffer is not None) == use_cuda_graph, f"{name}: given exactly with use_cuda_graph")
        self._use_cuda_graph = use_cuda_graph
        self._state: dict[str, Any] = {}

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        host_only("plan")
        check_int32("plan", qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        _check_widths(head_dim_ckv, head_dim_kpe)
        require(len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1, "plan: pointers are one longer than the batch")
        require(int(qo_indptr[0]) == int(kv_indptr[0]) == 0, "plan: pointers start at 0")
        pages = -(-kv_len_arr // page_size)
        require(bool((kv_indptr.diff() == pages).all()), "plan: pages do not fit the lengths")
        vectors = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_len_arr": kv_len_arr}
        if self._use_cuda_graph and self._indices_buffer is not None:
            for name, vector in vectors.items():
                buffer = self._buffers[name]
                require(buffer is not None and len(buffer) == len(vector), f"plan: {name} does not fit its buffer")
                vectors[name] = buffer.copy_(vector)  # type: ignore[union-attr]
            require(len(kv_indices) <= len(self._indices_buffer), "plan: more pages than the buffer holds")
            self._indices_buffer[: len(kv_indices)].copy_(kv_indices)
            kv_indices = self._indices_buffer
        self._state = {
            **vectors,
            "kv_indices": kv_indices,
            "widths": (num_heads, head_dim_ckv, head_dim_kpe),
            "page_size": page_size,
            "causal": causal,
            "scale": sm_scale,
            "types": (q_data_type, kv_data_type),
        }

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, out: Tensor) -> Tensor:
        if is_recording() and not self._use_cuda_graph:
            raise KernelError("run: a wrapper without use_cuda_graph reads memory that the next plan replaces")
        return self._launch(q_nope, q_pe, ckv_cache, kpe_cache, out)

    def _attend(self, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, out: Tensor) -> Tensor:
        state = self._state
        require(bool(state), "run before plan")
        check_float("run", q_nope, q_pe)
        check_last_contiguous("run", q_nope, q_pe, ckv, kpe)
        heads, latent_dim, rope_dim = state["widths"]
        page_size = state["page_size"]
        tokens = int(state["qo_indptr"][-1])
        require(tuple(q_nope.shape) == tuple(out.shape) == (tokens, heads, latent_dim), f"run: {list(q_nope.shape)}")
        require(tuple(q_pe.shape) == (tokens, heads, rope_dim), f"run: rotary query {list(q_pe.shape)}")
        require((q_nope.dtype, ckv.dtype) == state["types"], f"run: {q_nope.dtype} over {ckv.dtype}")
        require(
            ckv.shape[1:] == (page_size, latent_dim) and kpe.shape[1:] == (page_size, rope_dim), "run: cache shapes"
        )
        queries, pages, lengths = (state[name].tolist() for name in ("qo_indptr", "kv_indptr", "kv_len_arr"))
        for row, length in enumerate(lengths):
            chosen = state["kv_indices"][pages[row] : pages[row + 1]].long()
            require(bool(((chosen >= 0) & (chosen < len(ckv))).all()), "run: a page outside the pool")
            latent, rotary = (cache[chosen].flatten(0, 1)[:length].float() for cache in (ckv, kpe))
            span = slice(queries[row], queries[row + 1])
            scores = torch.einsum("qhr,kr->hqk", q_nope[span].float(), latent)
            scores = (scores + torch.einsum("qhr,kr->hqk", q_pe[span].float(), rotary)) * state["scale"]
            count = span.stop - span.start
            if state["causal"]:
                later = torch.arange(length) > torch.arange(length - count, length)[:, None]
                scores = scores.masked_fill(later, float("-inf"))
            out[span] = torch.einsum("hqk,kr->qhr", scores.softmax(-1), latent).to(out.dtype)
        return out

    _launch = kernel(_attend)
