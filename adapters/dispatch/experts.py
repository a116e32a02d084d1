"""Mixture of experts: routing, grouping, running the experts."""

from __future__ import annotations

from sglang_lite.adapters.dispatch.model import ALL_FLOATS, CUDA12_LINE, HALF, Operation, SmVersions
from sglang_lite.adapters.dispatch.wheels import HOPPER, call, flashinfer, sgl_kernel, torch

_GROUPED_ROUTING = (
    flashinfer(
        call(
            "flashinfer.fused_moe.fused_topk_deepseek",
            "scores bias n_group topk_group topk routed_scaling_factor topk_values topk_indices launch_with_pdl",
        ),
        sms=SmVersions((89, 90, 100, 103, 107, 120, 121)),
        dtypes=ALL_FLOATS,
        limits="bias in the type of the scores; at most 8 experts a token, 32 groups of 32, 128 experts in the kept "
        "groups, or one group of at most 384",
    ),
    sgl_kernel(
        call(
            "sgl_kernel.moe_fused_gate",
            "input_tensor bias num_expert_group topk_group topk num_fused_shared_experts routed_scaling_factor "
            "apply_routed_scaling_factor_on_output",
        ),
        only=CUDA12_LINE,
        dtypes=ALL_FLOATS,
        limits="at most 32 experts a group",
    ),
    torch("sigmoid, two top-k and a gather"),
)

ROUTING = (
    Operation(
        "moe.softmax_top_k",
        "softmax over all experts, then the best K",
        (
            sgl_kernel(
                call("sgl_kernel.topk_softmax", "topk_weights topk_ids gating_output renormalize"),
                dtypes=ALL_FLOATS,
                limits="ids int32",
            ),
            torch("softmax and topk"),
        ),
    ),
    Operation(
        "moe.sigmoid_top_k",
        "one logistic function an expert, then the best K",
        (
            sgl_kernel(
                call("sgl_kernel.topk_sigmoid", "topk_weights topk_ids gating_output renormalize correction_bias"),
                dtypes=ALL_FLOATS,
                limits="ids int32",
            ),
            torch("sigmoid and topk"),
        ),
    ),
    Operation("moe.grouped_top_k", "logistic scores with a correction bias, best groups first", _GROUPED_ROUTING),
    Operation(
        "moe.top_k_softmax",
        "the best K logits, then softmax over them",
        (
            sgl_kernel(
                call("sgl_kernel.topk_softmax", "topk_weights topk_ids gating_output renormalize"),
                dtypes=ALL_FLOATS,
                limits="with renormalize=True: softmax over all, renormalised over K, is the same",
            ),
            torch("topk and softmax"),
        ),
    ),
    Operation(
        "moe.align",
        "sort token-expert pairs by expert, each expert's run padded to whole blocks",
        (
            sgl_kernel(
                call(
                    "sgl_kernel.moe_align_block_size",
                    "topk_ids num_experts block_size sorted_token_ids experts_ids num_tokens_post_pad cumsum_buffer "
                    "pad_sorted_token_ids",
                ),
                dtypes=ALL_FLOATS,
                limits="num_experts + 1 is passed: bucket 0 is for ids of -1",
            ),
            torch("sort and cumulative sums"),
        ),
    ),
)

EXPERTS = (
    Operation(
        "moe.experts",
        "both products of the experts hit, the activation between them and the weighted sum",
        (
            flashinfer(
                call(
                    "flashinfer.fused_moe.cutlass_fused_moe",
                    "input token_selected_experts token_final_scales fc1_expert_weights fc2_expert_weights "
                    "output_dtype quant_scales fc1_expert_biases fc2_expert_biases swiglu_alpha swiglu_beta "
                    "swiglu_limit ep_size ep_rank output tune_max_num_tokens enable_pdl activation_type backend",
                ),
                sms=SmVersions((89, 90, 100, 103, 110, 120)),
                limits="ids int32, weights float32",
            ),
            torch("sort by expert, then one product for each expert hit"),
        ),
    ),
    Operation(
        "moe.experts_fp8_blocks",
        "grouped product of float8 rows and float8 weights with scales by 128 x 128 blocks",
        (
            sgl_kernel(
                call(
                    "sgl_kernel.prepare_moe_input",
                    "topk_ids expert_offsets problem_sizes1 problem_sizes2 input_permutation output_permutation "
                    "num_experts n k",
                ),
                call("sgl_kernel.shuffle_rows", "input_tensor dst2src_map output_tensor_shape"),
                call("sgl_kernel.apply_shuffle_mul_sum", "input output permutation factors"),
                call(
                    "sgl_kernel.fp8_blockwise_scaled_grouped_mm",
                    "output a_ptrs b_ptrs out_ptrs a_scales_ptrs b_scales_ptrs a b scales_a scales_b stride_a stride_b "
                    "stride_c layout_sfa layout_sfb problem_sizes expert_offsets workspace",
                ),
                call("sgl_kernel.shuffle_rows", "input_tensor dst2src_map output_tensor_shape"),
                call("sgl_kernel.silu_and_mul", "input out"),
                call("sgl_kernel.apply_shuffle_mul_sum", "input output permutation factors"),
                sms=SmVersions((90, 100)),
                limits="gate first, silu, no biases; hidden and intermediate sizes multiples of 128",
            ),
            torch("dequantize the experts hit, then a product for each"),
        ),
    ),
    Operation(
        "moe.experts_int4",
        "products of half-precision rows and int4 weights with scales by groups",
        (
            sgl_kernel(
                call(
                    "sgl_kernel.fused_moe.moe_wna16_marlin_gemm",
                    "a c_or_none b_q_weight b_bias_or_none b_scales global_scale_or_none b_zeros_or_none g_idx_or_none "
                    "perm_or_none workspace sorted_token_ids expert_ids num_tokens_post_padded topk_weights "
                    "moe_block_size top_k mul_topk_weights is_ep b_q_type_id size_m size_n size_k is_k_full "
                    "use_atomic_add use_fp32_reduce is_zp_float",
                ),
                only=CUDA12_LINE,
                name="Marlin",
            ),
            torch("dequantize the experts hit, then a product for each"),
        ),
    ),
    Operation(
        "moe.experts_int4_fp8",
        "grouped product of float8 rows and int4 weights",
        (
            sgl_kernel(
                call(
                    "sgl_kernel.get_cutlass_w4a8_moe_mm_data",
                    "topk_ids expert_offsets problem_sizes1 problem_sizes2 input_permutation output_permutation "
                    "num_experts n k",
                ),
                call(
                    "sgl_kernel.cutlass_w4a8_moe_mm",
                    "d a b a_scales b_scales experts_offsets problem_sizes a_strides b_strides d_strides s_strides",
                ),
                sms=HOPPER,
                dtypes=("bfloat16",),
            ),
        ),
        otherwise="moe.experts_int4 keeps rows in half precision and serves the same weights",
    ),
    Operation(
        "moe.experts_mxfp4",
        "products of half-precision rows and MXFP4 weights",
        (torch("dequantize the experts hit, then a product for each", HALF),),
        otherwise="FlashInfer's grouped MXFP4 products ask for float8 rows and exist for SM 100 and newer only",
    ),
    Operation(
        "moe.sum",
        "add up the K results of each token and scale",
        (
            sgl_kernel(
                call("sgl_kernel.moe_sum_reduce", "input_tensor output_tensor routed_scaling_factor"),
                dtypes=ALL_FLOATS,
                limits="input contiguous [T, K, H]",
            ),
            torch("sum"),
        ),
    ),
)

OPERATIONS = (*ROUTING, *EXPERTS)
