"""Doubles of the append kernel and of the paged attention wrappers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.kernel_doubles.capture import host_only, is_recording, kernel
from tests.support.kernel_doubles.checks import (
    KernelError,
    check_float,
    check_int32,
    check_last_contiguous,
    require,
)

_BACKENDS = ("auto", "fa2", "fa3")


@kernel
def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    keys, values = paged_kv_cache
    check_last_contiguous("append", append_key, append_value, keys, values)
    require(keys.stride() == values.stride(), "append: k/v strides must be identical")
    require(kv_layout == "NHD", f"append: layout {kv_layout}")
    check_int32("append", batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    require(append_key.dtype == append_value.dtype == keys.dtype, "append: rows and cache differ in type")
    require(
        append_key.shape == append_value.shape == (len(batch_indices), *keys.shape[2:]), "append: shape of the rows"
    )
    require(len(positions) == len(batch_indices), "append: one position a row")
    page_size = keys.shape[1]
    for token, (row, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        start, stop = int(kv_indptr[row]), int(kv_indptr[row + 1])
        length = (stop - start - 1) * page_size + int(kv_last_page_len[row])
        require(0 <= position < length, f"append: position {position} of a sequence of {length} tokens")
        page = int(kv_indices[start + position // page_size])
        keys[page, position % page_size] = append_key[token]
        values[page, position % page_size] = append_value[token]


class PagedAttention:
    """What all paged wrappers share: the plan, the checks and the arithmetic."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        buffers: dict[str, Tensor | None],
    ) -> None:
        require(float_workspace_buffer.dtype in (torch.uint8, torch.int8), "the workspace is bytes")
        require(kv_layout == "NHD" and backend in _BACKENDS, f"layout {kv_layout}, backend {backend}")
        for name, buffer in buffers.items():
            require((buffer is not None) == use_cuda_graph, f"{name}: given exactly with use_cuda_graph")
            if buffer is not None:
                check_int32(name, buffer)
        self.is_cuda_graph_enabled = use_cuda_graph
        self._buffers = buffers
        self._planned: dict[str, Any] | None = None

    def _plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        qo_indptr: Tensor,
        sizes: dict[str, Any],
    ) -> None:
        host_only("plan")
        check_int32("plan", indptr, indices, last_page_len, qo_indptr)
        rows = len(last_page_len)
        require(len(indptr) == len(qo_indptr) == rows + 1, "plan: pointers are one longer than the batch")
        require(int(indptr[0]) == 0 and int(qo_indptr[0]) == 0, "plan: pointers start at 0")
        require(bool((indptr.diff() >= 1).all() and (qo_indptr.diff() >= 1).all()), "plan: every row has something")
        require(int(indptr[-1]) <= len(indices), f"plan: pointers end at {int(indptr[-1])} of {len(indices)} indices")
        full = (last_page_len >= 1) & (last_page_len <= sizes["page_size"])
        require(bool(full.all()), f"plan: last page lengths {last_page_len.tolist()}")
        require(sizes["num_qo_heads"] % sizes["num_kv_heads"] == 0, "plan: heads are no multiple of key/value heads")
        require(
            isinstance(sizes["q_data_type"], torch.dtype), "plan: q_data_type was not given (the default is float16)"
        )
        if self.is_cuda_graph_enabled:
            indptr, indices, last_page_len, qo_indptr = self._into_buffers(indptr, indices, last_page_len, qo_indptr)
        self._planned = {
            **sizes,
            "indptr": indptr,
            "indices": indices,
            "last_page_len": last_page_len,
            "qo_indptr": qo_indptr,
        }

    def _into_buffers(self, *vectors: Tensor) -> list[Tensor]:
        placed = []
        names = ("kv_indptr", "kv_indices", "last_page_len", "qo_indptr")
        for name, vector in zip(names, vectors, strict=True):
            buffer = self._buffers.get(name)
            if buffer is None:  # decode wrappers have no query pointers
                placed.append(vector)
                continue
            exact = name != "kv_indices"
            require(
                len(vector) == len(buffer) if exact else len(vector) <= len(buffer),
                f"plan: {name} has {len(vector)} entries and its buffer {len(buffer)}",
            )
            buffer[: len(vector)].copy_(vector)
            placed.append(buffer)
        return placed

    def _run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        out: Tensor | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if is_recording() and not self.is_cuda_graph_enabled:
            raise KernelError("run: a wrapper without use_cuda_graph reads memory that the next plan replaces")
        return self._launch(q, paged_kv_cache, out, sinks)

    @property
    def _state(self) -> dict[str, Any]:
        if self._planned is None:
            raise KernelError("run before plan")
        return self._planned

    def _attend(self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor | None, sinks: Tensor | None) -> Tensor:
        state = self._state
        keys, values = cache
        self._check_run(q, keys, values, state)
        result = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        require(result.shape == q.shape and result.dtype == q.dtype, "run: the output does not fit the query")
        indptr, qo_indptr = state["indptr"].tolist(), state["qo_indptr"].tolist()
        lengths = state["last_page_len"].tolist()
        for row, last in enumerate(lengths):
            pages = state["indices"][indptr[row] : indptr[row + 1]].long()
            require(bool(((pages >= 0) & (pages < len(keys))).all()), f"run: pages {pages.tolist()} outside the pool")
            length = (len(pages) - 1) * state["page_size"] + last
            span = slice(qo_indptr[row], qo_indptr[row + 1])
            k, v = (x[pages].flatten(0, 1)[:length].float() for x in (keys, values))
            result[span] = _attend_row(q[span].float(), k, v, state, sinks).to(q.dtype)
        return result

    def _check_run(self, q: Tensor, keys: Tensor, values: Tensor, state: dict[str, Any]) -> None:
        check_float("run", q)
        check_last_contiguous("run", q, keys, values)
        require(q.dtype == state["q_data_type"], f"run: query is {q.dtype}, planned for {state['q_data_type']}")
        require(keys.dtype == values.dtype == state["kv_data_type"], f"run: cache is {keys.dtype}")
        require(keys.stride() == values.stride(), "run: k/v strides must be identical")
        expected = (state["page_size"], state["num_kv_heads"], state["head_dim"])
        require(tuple(keys.shape[1:]) == expected, f"run: cache {list(keys.shape)}, planned for {expected}")
        tokens = int(state["qo_indptr"][-1])
        shape = (tokens, state["num_qo_heads"], state["head_dim"])
        require(tuple(q.shape) == shape, f"run: query {list(q.shape)}, planned for {shape}")

    _launch = kernel(_attend)


def _attend_row(q: Tensor, k: Tensor, v: Tensor, state: dict[str, Any], sinks: Tensor | None) -> Tensor:
    group = state["num_qo_heads"] // state["num_kv_heads"]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = state["sm_scale"] if state["sm_scale"] is not None else state["head_dim"] ** -0.5
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    cap = state["logits_soft_cap"]
    if cap:
        scores = cap * torch.tanh(scores / cap)
    query_at = torch.arange(len(k) - len(q), len(k))[:, None]
    key_at = torch.arange(len(k))
    hidden = (key_at > query_at) if state["causal"] else torch.zeros(len(q), len(k), dtype=torch.bool)
    if state["window_left"] >= 0:
        hidden = hidden | (key_at < query_at - state["window_left"])
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


class BatchDecodeWithPagedKVCacheWrapper(PagedAttention):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = {
            "kv_indptr": paged_kv_indptr_buffer,
            "kv_indices": paged_kv_indices_buffer,
            "last_page_len": paged_kv_last_page_len_buffer,
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, buffers)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        sizes = {
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "page_size": page_size,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type or q_data_type,
            "sm_scale": sm_scale,
            "causal": True,
        }
        one_token_each = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._plan(indptr, indices, last_page_len, one_token_each, sizes)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> Tensor:
        return self._run(q, paged_kv_cache, out)


class BatchPrefillWithPagedKVCacheWrapper(PagedAttention):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = {
            "kv_indptr": paged_kv_indptr_buf,
            "kv_indices": paged_kv_indices_buf,
            "last_page_len": paged_kv_last_page_len_buf,
            "qo_indptr": qo_indptr_buf,
        }
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, buffers)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: torch.dtype | None = None,
        o_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
    ) -> None:
        sizes = {
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim_qk,
            "page_size": page_size,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type or q_data_type,
            "sm_scale": sm_scale,
            "causal": causal,
        }
        self._plan(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, qo_indptr, sizes)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> Tensor:
        return self._run(q, paged_kv_cache, out)


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """The window is compiled in: planning another one changes nothing but is a mistake. No logit cap."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
        pos_encoding_mode: str = "NONE",
        **options: Any,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, **options)
        self._compiled = (q_data_type, kv_data_type, head_dim_qk, head_dim_vo, window_left)

    def plan(self, *args: Any, **kwargs: Any) -> None:
        require(not kwargs.get("logits_soft_cap"), "sink wrapper: no logit cap")
        super().plan(*args, **kwargs)
        state = self._state
        names = ("q_data_type", "kv_data_type", "head_dim", "head_dim", "window_left")
        planned = tuple(state[name] for name in names)
        require(planned == self._compiled, f"sink wrapper: compiled for {self._compiled}, planned for {planned}")

    def run(  # type: ignore[override]  # the compiled kernel takes two more arguments
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        sinks: Tensor,
        scale: float,
        *,
        out: Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> Tensor:
        require(sinks.dtype == torch.float32 and sinks.shape == (q.shape[1],), "sink wrapper: float32, one a head")
        require(scale == self._state["sm_scale"], "sink wrapper: another scale than planned")
        return self._run(q, paged_kv_cache, out, sinks)
