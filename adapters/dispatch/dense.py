"""Norms, activations, rotary embedding, dense products and what moves rows of the KV pool."""

from __future__ import annotations

from sglang_lite.adapters.dispatch.model import ALL_FLOATS, Operation
from sglang_lite.adapters.dispatch.wheels import call, flashinfer, sgl_kernel, torch

_NORM = "input weight eps out enable_pdl"
_ADD_NORM = "input residual weight eps enable_pdl"
_ROWS_OF_16_BYTES = "rows of the result must be multiples of 16 bytes"

NORMS = (
    Operation(
        "norm.rms",
        "x * rsqrt(mean(x^2) + eps) * weight",
        (
            flashinfer(call("flashinfer.norm.rmsnorm", _NORM), limits="last dimension contiguous"),
            sgl_kernel(call("torch.ops.sgl_kernel.rmsnorm", "output input weight eps enable_pdl")),
        ),
    ),
    Operation(
        "norm.add_rms",
        "residual += x, then its RMS norm, both in place",
        (
            flashinfer(call("flashinfer.norm.fused_add_rmsnorm", _ADD_NORM)),
            sgl_kernel(call("torch.ops.sgl_kernel.fused_add_rmsnorm", "input residual weight eps enable_pdl")),
        ),
    ),
    Operation(
        "norm.shifted_rms",
        "RMS norm with weight 1 + w",
        (
            flashinfer(call("flashinfer.norm.gemma_rmsnorm", _NORM)),
            sgl_kernel(call("torch.ops.sgl_kernel.gemma_rmsnorm", "output input weight eps enable_pdl")),
        ),
    ),
    Operation(
        "norm.add_shifted_rms",
        "residual += x, then its RMS norm with weight 1 + w",
        (
            flashinfer(call("flashinfer.norm.gemma_fused_add_rmsnorm", _ADD_NORM)),
            sgl_kernel(call("torch.ops.sgl_kernel.gemma_fused_add_rmsnorm", "input residual weight eps enable_pdl")),
        ),
    ),
    Operation(
        "norm.query_key_rotary",
        "RMS norm of query and key heads and rotary embedding at once",
        (
            sgl_kernel(
                call(
                    "sgl_kernel.fused_qk_norm_rope",
                    "qkv num_heads_q num_heads_k num_heads_v head_dim eps q_weight k_weight base is_neox position_ids "
                    "factor low high attention_factor",
                ),
                dtypes=("bfloat16",),
                limits="head size 64, 128 or 256",
            ),
        ),
        otherwise="norm.rms over the heads, then rotary.cache, does the same",
    ),
)

ACTIVATIONS = (
    Operation(
        "activation.silu_and_mul",
        "silu(first half) * second half",
        (
            sgl_kernel(call("sgl_kernel.silu_and_mul", "input out"), limits=_ROWS_OF_16_BYTES),
            flashinfer(call("flashinfer.activation.silu_and_mul", "input out enable_pdl")),
        ),
    ),
    Operation(
        "activation.gelu_and_mul",
        "gelu(first half) * second half",
        (
            sgl_kernel(call("sgl_kernel.gelu_and_mul", "input out"), limits=_ROWS_OF_16_BYTES),
            flashinfer(call("flashinfer.activation.gelu_and_mul", "input out enable_pdl")),
        ),
    ),
    Operation(
        "activation.gelu_tanh_and_mul",
        "gelu(first half, tanh approximation) * second half",
        (
            sgl_kernel(call("sgl_kernel.gelu_tanh_and_mul", "input out"), limits=_ROWS_OF_16_BYTES),
            flashinfer(call("flashinfer.activation.gelu_tanh_and_mul", "input out enable_pdl")),
        ),
    ),
)

ROTARY = (
    Operation(
        "rotary.cache",
        "rotate halves or neighbours of each head by a table of cosines and sines, in place",
        (
            flashinfer(
                call(
                    "flashinfer.rope.apply_rope_with_cos_sin_cache_inplace",
                    "positions query key head_size cos_sin_cache is_neox",
                ),
                limits="table in float32",
            ),
            sgl_kernel(
                call("sgl_kernel.rotary_embedding", "positions query key head_size cos_sin_cache is_neox"),
                dtypes=ALL_FLOATS,
                limits="positions int64, table in the type of the query",
            ),
        ),
    ),
)

PRODUCTS = (
    Operation("linear.dense", "x @ weight^T + bias", (torch("torch.nn.functional.linear (cuBLAS)"),)),
    Operation("embedding", "rows of a table", (torch("torch.nn.functional.embedding"),)),
    Operation(
        "lora.grouped",
        "a low-rank product of its own for each group of rows",
        (
            torch("two gathered batched products"),
            flashinfer(
                call("flashinfer.gemm.SegmentGEMMWrapper.__init__", "float_workspace_buffer backend"),
                call(
                    "flashinfer.gemm.SegmentGEMMWrapper.run",
                    "x weights batch_size weight_column_major seg_indptr weight_indices",
                ),
                limits="backend sm80, or sm90 on SM 90",
            ),
        ),
    ),
)

POOL = (
    Operation(
        "kv.append",
        "write the new keys and values of a step into their pages",
        (
            flashinfer(
                call(
                    "flashinfer.page.append_paged_kv_cache",
                    "append_key append_value batch_indices positions paged_kv_cache kv_indices kv_indptr "
                    "kv_last_page_len kv_layout",
                ),
                limits="strided views of a layer are taken; K and V have equal strides",
            ),
            torch("index_put_ by page and offset"),
        ),
    ),
    Operation(
        "kv.append_positions",
        "row and position of each new token",
        (
            flashinfer(
                call("flashinfer.page.get_batch_indices_positions", "append_indptr seq_lens nnz"),
                dtypes=ALL_FLOATS,
            ),
            torch("repeat_interleave and cumulative sums"),
        ),
    ),
    Operation(
        "kv.copy_pages",
        "copy whole pages, all layers, on the device or to pinned host memory",
        (
            sgl_kernel(
                call("sgl_kernel.kvcacheio.transfer_kv_per_layer_mla", "src dst src_indices dst_indices item_size"),
                dtypes=(*ALL_FLOATS, "float8_e4m3fn"),
                limits="indices int64, bytes of a page divisible by 8",
            ),
            torch("index_select and index_copy_", dtypes=(*ALL_FLOATS, "float8_e4m3fn")),
        ),
    ),
)

OPERATIONS = (*NORMS, *ACTIVATIONS, *ROTARY, *PRODUCTS, *POOL)
