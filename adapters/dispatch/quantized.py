"""Quantizers and products of quantized matrices."""

from __future__ import annotations

from sglang_lite.adapters.dispatch.model import ALL_FLOATS, CUDA12_LINE, HALF, Operation, SmVersions
from sglang_lite.adapters.dispatch.wheels import BLACKWELL_AND_NEWER, HOPPER, call, flashinfer, sgl_kernel, torch

_GROUP = "input output_q output_s group_size eps fp8_min fp8_max scale_ue8m0"
_SCALED = "mat_a mat_b scales_a scales_b out_dtype bias"
_DEQUANTIZE = "dequantize the weight, then a dense product"

QUANTIZERS = (
    Operation(
        "quantize.fp8_per_token",
        "one scale a row",
        (
            sgl_kernel(
                call("sgl_kernel.sgl_per_token_quant_fp8", "input output_q output_s"), limits="width divisible by 4"
            ),
        ),
    ),
    Operation(
        "quantize.fp8_per_group",
        "one scale for each 128 neighbours of a row",
        (
            sgl_kernel(
                call("sgl_kernel.sgl_per_token_group_quant_8bit", _GROUP),
                limits="groups of 16, 32, 64 or 128; eps 1e-10",
            ),
        ),
    ),
    Operation(
        "quantize.fp8_per_tensor",
        "one scale in all",
        (
            sgl_kernel(
                call("sgl_kernel.sgl_per_tensor_quant_fp8", "input output_q output_s is_static"), only=CUDA12_LINE
            ),
            torch("amax, divide, round"),
        ),
    ),
    Operation(
        "quantize.int8_per_token",
        "one scale a row",
        (torch("amax, divide, round"),),
        otherwise="the wheels quantize int8 by groups only",
    ),
    Operation(
        "quantize.nvfp4",
        "4-bit floats, one float8 scale for each 16 neighbours",
        (
            flashinfer(
                call("flashinfer.nvfp4_quantize", "a a_global_sf sf_vec_size enable_pdl backend"),
                sms=BLACKWELL_AND_NEWER,
            ),
            sgl_kernel(
                call("sgl_kernel.scaled_fp4_quant", "input input_global_scale"),
                only=CUDA12_LINE,
                sms=SmVersions((100, 120)),
            ),
        ),
        otherwise="4-bit products exist for SM 100 and newer; elsewhere weights are dequantized",
    ),
    Operation(
        "quantize.mxfp8",
        "float8, one power of two for each 32 neighbours",
        (
            flashinfer(
                call("flashinfer.mxfp8_quantize", "input is_sf_swizzled_layout alignment enable_pdl backend"),
                sms=BLACKWELL_AND_NEWER,
            ),
        ),
        otherwise="MXFP8 products exist for SM 100 and newer; elsewhere weights are dequantized",
    ),
)

PRODUCTS = (
    Operation(
        "linear.fp8_per_channel",
        "float8 rows times float8 weights, one scale a row and a channel",
        (
            sgl_kernel(
                call("sgl_kernel.fp8_scaled_mm", _SCALED),
                sms=SmVersions((89, 90, 100, 120)),
                limits="weight column-major; rows of 16 bytes",
            ),
            torch(_DEQUANTIZE),
        ),
    ),
    Operation(
        "linear.fp8_blocks",
        "float8 rows (groups of 128) times float8 weights (blocks of 128 x 128)",
        (
            flashinfer(
                call("flashinfer.gemm.fp8_blockscale_gemm_sm90", "input weight input_scale weight_scale out out_dtype"),
                sms=HOPPER,
                dtypes=("bfloat16",),
            ),
            flashinfer(
                call(
                    "flashinfer.gemm.gemm_fp8_nt_groupwise",
                    "a b a_scale b_scale scale_major_mode mma_sm scale_granularity_mnk out out_dtype backend",
                ),
                sms=SmVersions((100, 103, 107, 120, 121)),
                name="groupwise",
            ),
            sgl_kernel(
                call("sgl_kernel.fp8_blockwise_scaled_mm", "mat_a mat_b scales_a scales_b out_dtype"),
                only=CUDA12_LINE,
                sms=SmVersions((90, 100, 120)),
            ),
            torch(_DEQUANTIZE),
        ),
    ),
    Operation(
        "linear.fp8_batched",
        "batched float8 products with one scale each side",
        (
            flashinfer(
                call("flashinfer.gemm.bmm_fp8", "A B A_scale B_scale dtype out backend"), sms=SmVersions(first=89)
            ),
            torch(_DEQUANTIZE),
        ),
    ),
    Operation(
        "linear.int8",
        "int8 rows times int8 weights, one scale a row and a channel",
        (
            sgl_kernel(
                call("sgl_kernel.int8_scaled_mm", _SCALED),
                sms=SmVersions((80, 86, 87, 89, 90)),
                limits="weight column-major; K a multiple of 16, N of 8",
            ),
            torch(_DEQUANTIZE),
        ),
    ),
    Operation(
        "linear.awq",
        "half-precision rows times int4 weights in AWQ's order",
        (
            sgl_kernel(
                call("sgl_kernel.awq_dequantize", "qweight scales qzeros"),
                only=CUDA12_LINE,
                name="dequantize",
                limits="then a dense product",
            ),
            torch(_DEQUANTIZE),
        ),
    ),
    Operation(
        "linear.gptq",
        "half-precision rows times int4 weights in GPTQ's order",
        (
            sgl_kernel(
                call("sgl_kernel.gptq_shuffle", "q_weight q_perm bit"),
                call("sgl_kernel.gptq_gemm", "a b_q_weight b_gptq_qzeros b_gptq_scales b_g_idx use_shuffle bit"),
                only=CUDA12_LINE,
                dtypes=("float16",),
            ),
            torch(_DEQUANTIZE),
        ),
    ),
    Operation(
        "linear.marlin",
        "half-precision rows times int4 weights repacked for Marlin",
        (
            sgl_kernel(
                call("sgl_kernel.gptq_marlin_repack", "b_q_weight perm size_k size_n num_bits"),
                call("sgl_kernel.awq_marlin_repack", "b_q_weight size_k size_n num_bits"),
                call(
                    "sgl_kernel.gptq_marlin_gemm",
                    "a c b_q_weight b_scales global_scale b_zeros g_idx perm workspace b_q_type size_m size_n size_k "
                    "is_k_full use_atomic_add use_fp32_reduce is_zp_float",
                ),
                only=CUDA12_LINE,
            ),
        ),
        otherwise="linear.awq and linear.gptq serve the same weights",
    ),
    Operation(
        "linear.nvfp4",
        "4-bit float rows times 4-bit float weights",
        (
            flashinfer(
                call("flashinfer.mm_fp4", "a b a_descale b_descale alpha out_dtype out block_size backend"),
                sms=BLACKWELL_AND_NEWER,
            ),
            sgl_kernel(
                call("sgl_kernel.cutlass_scaled_fp4_mm", "a b block_scale_a block_scale_b alpha out_dtype"),
                only=CUDA12_LINE,
                sms=SmVersions((100, 120)),
            ),
            torch(_DEQUANTIZE, HALF),
        ),
    ),
    Operation(
        "linear.mxfp8",
        "MXFP8 rows times MXFP8 weights",
        (
            flashinfer(
                call("flashinfer.mm_mxfp8", "a b a_descale b_descale out out_dtype backend"), sms=BLACKWELL_AND_NEWER
            ),
            torch(_DEQUANTIZE, HALF),
        ),
    ),
    Operation(
        "dequantize.gguf",
        "weights in ggml's blocks to half precision",
        (
            sgl_kernel(
                call("sgl_kernel.quantization.gguf.ggml_dequantize", "weight quant_type M N dtype"), dtypes=ALL_FLOATS
            ),
        ),
    ),
)

OPERATIONS = (*QUANTIZERS, *PRODUCTS)
