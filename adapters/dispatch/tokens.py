"""Sampling, grammars, speculation, recurrent layers and collectives."""

from __future__ import annotations

from sglang_lite.adapters.dispatch.model import ALL_FLOATS, CUDA12_LINE, CUDA13_LINE, Operation
from sglang_lite.adapters.dispatch.wheels import call, flashinfer, sgl_kernel, torch

_FLOAT32 = ("float32",)
_PROBABILITIES = "probabilities float32, contiguous"

SAMPLING = (
    Operation(
        "sampling.softmax",
        "probabilities at a temperature a row",
        (flashinfer(call("flashinfer.sampling.softmax", "logits temperature enable_pdl"), dtypes=ALL_FLOATS), torch()),
    ),
    Operation(
        "sampling.top_k_renormalize",
        "keep the best K probabilities of a row",
        (
            flashinfer(
                call("flashinfer.sampling.top_k_renorm_probs", "probs top_k"), dtypes=_FLOAT32, limits=_PROBABILITIES
            ),
            sgl_kernel(call("sgl_kernel.sampling.top_k_renorm_probs", "probs top_k"), dtypes=_FLOAT32),
        ),
    ),
    Operation(
        "sampling.top_p_renormalize",
        "keep the nucleus of a row",
        (
            flashinfer(
                call("flashinfer.sampling.top_p_renorm_probs", "probs top_p"), dtypes=_FLOAT32, limits=_PROBABILITIES
            ),
            sgl_kernel(call("sgl_kernel.sampling.top_p_renorm_probs", "probs top_p"), dtypes=_FLOAT32),
        ),
    ),
    Operation(
        "sampling.draw",
        "one token a row",
        (
            flashinfer(
                call("flashinfer.sampling.sampling_from_probs", "probs deterministic check_nan seed offset"),
                dtypes=_FLOAT32,
                limits="seed and offset as tensors inside a captured graph",
            ),
            torch("exponential race", _FLOAT32),
        ),
    ),
    Operation(
        "sampling.top_k_top_p",
        "one token a row from the best K within the nucleus",
        (
            flashinfer(
                call(
                    "flashinfer.sampling.top_k_top_p_sampling_from_probs",
                    "probs top_k top_p filter_apply_order deterministic seed offset",
                ),
                dtypes=_FLOAT32,
                limits="filter_apply_order='joint' filters one distribution by both",
            ),
            sgl_kernel(
                call(
                    "sgl_kernel.top_k_top_p_sampling_from_probs", "probs top_k top_p filter_apply_order deterministic"
                ),
                only=CUDA12_LINE,
                dtypes=_FLOAT32,
            ),
        ),
    ),
    Operation(
        "sampling.min_p",
        "one token a row above a share of the best probability",
        (
            flashinfer(
                call("flashinfer.sampling.min_p_sampling_from_probs", "probs min_p deterministic seed offset"),
                dtypes=_FLOAT32,
            ),
            sgl_kernel(
                call("sgl_kernel.min_p_sampling_from_probs", "probs min_p deterministic"),
                only=CUDA12_LINE,
                dtypes=_FLOAT32,
            ),
        ),
    ),
    Operation(
        "grammar.mask",
        "logits of tokens whose bit is 0 become -inf, in place",
        (
            sgl_kernel(
                call("sgl_kernel.apply_token_bitmask_inplace_cuda", "logits bitmask indices"),
                dtypes=ALL_FLOATS,
                limits="bit mask int32 [B, ceil(V / 32)]",
            ),
        ),
    ),
)

SPECULATION = (
    Operation(
        "speculation.chain_verify",
        "accept a prefix of drafted tokens and draw the next one",
        (
            flashinfer(
                call(
                    "flashinfer.sampling.chain_speculative_sampling",
                    "draft_probs draft_token_ids target_probs deterministic seed offset",
                ),
                dtypes=_FLOAT32,
            ),
            torch("cumulative acceptance", _FLOAT32),
        ),
    ),
    Operation(
        "speculation.tree_build",
        "mask and positions of a tree of drafted tokens",
        (
            sgl_kernel(
                call(
                    "sgl_kernel.build_tree_kernel_efficient",
                    "parent_list selected_index verified_seq_len tree_mask positions retrive_index retrive_next_token "
                    "retrive_next_sibling topk depth draft_token_num tree_mask_mode",
                ),
                only=CUDA12_LINE,
                dtypes=ALL_FLOATS,
            ),
        ),
        otherwise="0.4.10 keeps the Python function but registers no operator behind it; use chains of drafts there",
    ),
    Operation(
        "speculation.tree_verify",
        "the longest path of a tree that greedy decoding agrees with",
        (
            sgl_kernel(
                call(
                    "sgl_kernel.verify_tree_greedy",
                    "predicts accept_index accept_token_num candidates retrive_index retrive_next_token "
                    "retrive_next_sibling target_predict",
                ),
                only=CUDA12_LINE,
                dtypes=ALL_FLOATS,
            ),
        ),
        otherwise="0.4.10 keeps the Python function but registers no operator behind it; use chains of drafts there",
    ),
)

RECURRENT = (
    Operation(
        "recurrent.causal_convolution",
        "depthwise convolution over chunks of tokens with a running state",
        (
            sgl_kernel(
                call(
                    "sgl_kernel.causal_conv1d_fwd",
                    "x weight bias_ conv_states query_start_loc cache_indices has_initial_state silu_activation "
                    "pad_slot_id",
                ),
                limits="2 to 4 taps",
            ),
            torch("pad, unfold, sum"),
        ),
    ),
    Operation(
        "recurrent.causal_convolution_step",
        "the same for one token a row",
        (
            sgl_kernel(
                call(
                    "sgl_kernel.causal_conv1d_update",
                    "x conv_state weight bias_ silu_activation cache_seqlens conv_state_indices pad_slot_id",
                ),
                limits="2 to 4 taps",
            ),
            torch("multiply and sum"),
        ),
    ),
    Operation(
        "recurrent.gated_delta",
        "the gated delta rule over chunks of tokens, and for one token a row",
        (torch("chunked products"),),
        otherwise="FlashInfer has kernels for SM 90, 100 and 120 that the records do not hold yet",
    ),
)

COLLECTIVES = (
    Operation(
        "collective.all_reduce",
        "sum over the ranks of one node",
        (
            sgl_kernel(
                call("sgl_kernel.meta_size", ""),
                call("sgl_kernel.init_custom_ar", "ipc_tensors rank_data rank full_nvlink"),
                call("sgl_kernel.register_buffer", "fa fake_ipc_ptrs"),
                call("sgl_kernel.all_reduce", "fa inp out reg_buffer reg_buffer_sz_bytes"),
                call("sgl_kernel.get_graph_buffer_ipc_meta", "fa"),
                call("sgl_kernel.register_graph_buffers", "fa handles offsets"),
                call("sgl_kernel.dispose", "fa"),
                only=CUDA13_LINE,
                dtypes=ALL_FLOATS,
                limits="2, 4, 6 or 8 ranks over NVLink (PCIe for 2); up to 8 MiB; the record of the older line lacks "
                "the functions that register buffers",
            ),
            torch("torch.distributed (NCCL)"),
        ),
    ),
)

OPERATIONS = (*SAMPLING, *SPECULATION, *RECURRENT, *COLLECTIVES)
