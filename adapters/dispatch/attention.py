"""Attention over a paged pool: keys and values, and latent rows."""

from __future__ import annotations

from sglang_lite.adapters.dispatch.model import CUDA12_LINE, Call, Operation, Provider, SmVersions
from sglang_lite.adapters.dispatch.wheels import (
    AMPERE_AND_NEWER,
    DENSE_FLASHMLA,
    FLASH_OPS,
    HOPPER,
    SPARSE_FLASHMLA,
    call,
    flashinfer,
    sgl_kernel,
)

_PREFILL = "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper"
_RAGGED = "flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper"
_DECODE = "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper"
_SINKS = "flashinfer.attention.BatchAttentionWithAttentionSinkWrapper"
_LATENT = "flashinfer.mla.BatchMLAPagedAttentionWrapper"
_FA3 = "sgl_kernel.flash_attn.flash_attn_with_kvcache"

_PREFILL_CALLS = (
    call(f"{_PREFILL}.__init__", "float_workspace_buffer kv_layout backend"),
    call(
        f"{_PREFILL}.plan",
        "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk "
        "page_size causal pos_encoding_mode sm_scale window_left logits_soft_cap q_data_type kv_data_type o_data_type "
        "non_blocking",
    ),
    call(f"{_PREFILL}.run", "q paged_kv_cache out enable_pdl"),
)
_DECODE_CALLS = (
    call(
        f"{_DECODE}.__init__",
        "float_workspace_buffer kv_layout use_cuda_graph use_tensor_cores paged_kv_indptr_buffer "
        "paged_kv_indices_buffer paged_kv_last_page_len_buffer backend",
    ),
    call(
        f"{_DECODE}.plan",
        "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size pos_encoding_mode q_data_type "
        "kv_data_type o_data_type sm_scale window_left logits_soft_cap non_blocking",
    ),
    call(f"{_DECODE}.run", "q paged_kv_cache out enable_pdl"),
)
_SINK_CALLS = (
    call(
        f"{_SINKS}.__init__",
        "float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf paged_kv_indices_buf "
        "paged_kv_last_page_len_buf backend pos_encoding_mode q_data_type kv_data_type head_dim_qk head_dim_vo "
        "window_left",
    ),
    call(
        f"{_SINKS}.plan",
        "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads head_dim_qk "
        "page_size causal pos_encoding_mode sm_scale window_left q_data_type kv_data_type o_data_type non_blocking",
    ),
    call(f"{_SINKS}.run", "q paged_kv_cache out enable_pdl"),
)
_LATENT_CALLS = (
    call(
        f"{_LATENT}.__init__",
        "float_workspace_buffer use_cuda_graph qo_indptr kv_indptr kv_indices kv_len_arr backend",
    ),
    call(
        f"{_LATENT}.plan",
        "qo_indptr kv_indptr kv_indices kv_len_arr num_heads head_dim_ckv head_dim_kpe page_size causal sm_scale "
        "q_data_type kv_data_type",
    ),
    call(f"{_LATENT}.run", "q_nope q_pe ckv_cache kpe_cache out"),
)
_RAGGED_CALLS = (
    call(f"{_RAGGED}.__init__", "float_workspace_buffer kv_layout backend"),
    call(
        f"{_RAGGED}.plan",
        "qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim_qk head_dim_vo causal sm_scale q_data_type "
        "kv_data_type",
    ),
    call(f"{_RAGGED}.run", "q k v out enable_pdl"),
)
_FA3_ARGUMENTS = "q k_cache v_cache cache_seqlens page_table cu_seqlens_q max_seqlen_q softmax_scale causal window_size"


def _flash_attention(more: str = "", limits: str = "") -> Provider:
    return sgl_kernel(
        call(_FA3, f"{_FA3_ARGUMENTS} {more}"),
        lines=FLASH_OPS,
        name="FlashAttention 3",
        limits="; ".join(filter(None, ("head size at most 256, a multiple of 8", limits))),
    )


def _two_backends(calls: tuple[Call, ...], limits: str = "") -> tuple[Provider, Provider]:
    """FlashInfer's kernels for SM 90 before those that run everywhere."""
    return (
        flashinfer(
            *calls, sms=HOPPER, name="fa3", limits="; ".join(filter(None, ("head size 64, 128 or 256", limits)))
        ),
        flashinfer(*calls, sms=AMPERE_AND_NEWER, name="fa2", limits=limits),
    )


_WINDOW = "one planned wrapper for each window"

KEYS_AND_VALUES = (
    Operation(
        "attention.prefill",
        "causal attention of chunks of a prompt over paged keys and values, cached prefixes included",
        (*_two_backends(_PREFILL_CALLS), _flash_attention()),
    ),
    Operation(
        "attention.decode",
        "attention of one token a sequence over paged keys and values",
        (flashinfer(*_DECODE_CALLS, name="fa2"), _flash_attention()),
    ),
    Operation(
        "attention.window",
        "the same with a sliding window",
        (flashinfer(*_PREFILL_CALLS, *_DECODE_CALLS, name="fa2", limits=_WINDOW), _flash_attention()),
    ),
    Operation(
        "attention.soft_cap",
        "the same with logits bent by cap * tanh(x / cap)",
        (
            flashinfer(*_PREFILL_CALLS, *_DECODE_CALLS, name="fa2", limits="compiled once more"),
            _flash_attention("softcap"),
        ),
    ),
    Operation(
        "attention.sinks",
        "the same with a learned logit a head in the denominator",
        (*_two_backends(_SINK_CALLS, f"{_WINDOW}; no soft cap"), _flash_attention("sinks")),
    ),
    Operation(
        "attention.fp8_cache",
        "attention of half-precision queries over keys and values stored as float8",
        (flashinfer(*_PREFILL_CALLS, *_DECODE_CALLS, sms=SmVersions(first=89), name="fa2"),),
        otherwise="store the cache as bfloat16: --kv-cache-dtype auto",
    ),
    Operation(
        "attention.ragged",
        "causal attention over keys and values that are not in a pool",
        _two_backends(_RAGGED_CALLS),
    ),
    Operation(
        "attention.cascade",
        "attention with a prefix shared by a batch read once",
        (
            flashinfer(
                call(
                    "flashinfer.cascade.MultiLevelCascadeAttentionWrapper.__init__", "num_levels float_workspace_buffer"
                ),
                call(
                    "flashinfer.cascade.MultiLevelCascadeAttentionWrapper.plan",
                    "qo_indptr_arr paged_kv_indptr_arr paged_kv_indices_arr paged_kv_last_page_len num_qo_heads "
                    "num_kv_heads head_dim page_size causal sm_scale q_data_type kv_data_type",
                ),
                call("flashinfer.cascade.MultiLevelCascadeAttentionWrapper.run", "q paged_kv_cache"),
            ),
        ),
    ),
    Operation(
        "attention.merge",
        "join two partial attentions by their log-sum-exp",
        (
            flashinfer(call("flashinfer.cascade.merge_state", "v_a s_a v_b s_b"), limits="log-sum-exp in base 2"),
            sgl_kernel(call("sgl_kernel.merge_state_v2", "v_a s_a v_b s_b"), limits="natural log-sum-exp"),
        ),
    ),
)

LATENT = (
    Operation(
        "latent.append",
        "write the latent rows of a step into their pages",
        (
            flashinfer(
                call(
                    "flashinfer.page.append_paged_mla_kv_cache",
                    "append_ckv append_kpe batch_indices positions ckv_cache kpe_cache kv_indices kv_indptr "
                    "kv_last_page_len",
                ),
                limits="latent width 512, rotary width 64",
            ),
        ),
    ),
    Operation(
        "latent.attention",
        "absorbed attention over paged latent rows",
        (
            flashinfer(*_LATENT_CALLS, sms=HOPPER, name="fa3", limits="latent width 512, rotary width 64"),
            flashinfer(*_LATENT_CALLS, name="fa2", limits="latent width 512, rotary width 64"),
            sgl_kernel(
                call("sgl_kernel.flash_mla.get_mla_metadata", "cache_seqlens num_q_tokens_per_head_k num_heads_k"),
                call(
                    "sgl_kernel.flash_mla.flash_mla_with_kvcache",
                    "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale "
                    "causal",
                ),
                lines=DENSE_FLASHMLA,
                name="FlashMLA",
                limits="pages of 64 tokens",
            ),
            sgl_kernel(
                call(
                    "sgl_kernel.cutlass_mla_decode",
                    "q_nope q_pe kv_c_and_k_pe_cache seq_lens page_table workspace sm_scale num_kv_splits",
                ),
                only=CUDA12_LINE,
                sms=SmVersions((100,)),
                name="CUTLASS",
                limits="decode only",
            ),
        ),
    ),
    Operation(
        "latent.prefill",
        "attention of a prompt over expanded keys (192) and values (128)",
        (
            flashinfer(*_RAGGED_CALLS, sms=HOPPER, name="fa3"),
            flashinfer(*_RAGGED_CALLS, name="fa2"),
        ),
    ),
    Operation(
        "latent.selected",
        "attention over the latent rows that an index selected",
        (
            sgl_kernel(
                call("sgl_kernel.flash_mla.flash_mla_sparse_fwd", "q kv indices sm_scale d_v"),
                lines=SPARSE_FLASHMLA,
                dtypes=("bfloat16",),
                name="FlashMLA",
            ),
        ),
        otherwise="contexts up to the selection's size need no selection: latent.attention serves them",
    ),
    Operation(
        "latent.concat_keys",
        "expanded keys from their two parts",
        (
            sgl_kernel(
                call("sgl_kernel.concat_mla_k", "k k_nope k_rope"),
                dtypes=("bfloat16",),
                limits="128 heads of 128 + 64",
            ),
            flashinfer(call("flashinfer.concat_ops.concat_mla_k", "k k_nope k_rope")),
        ),
    ),
)

OPERATIONS = (*KEYS_AND_VALUES, *LATENT)
