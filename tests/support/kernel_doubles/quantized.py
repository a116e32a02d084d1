"""Doubles of quantizers and quantized products, written from the kernels' documentation and not from the adapters."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.kernel_doubles.capture import kernel
from tests.support.kernel_doubles.checks import check_float, require

FP8 = torch.float8_e4m3fn
HALF = (torch.float16, torch.bfloat16)


def _is_column_major(matrix: Tensor) -> bool:
    return matrix.stride(-2) == 1 and matrix.stride(-1) >= matrix.shape[-2]


def _round_fp8(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(FP8)


@kernel
def sgl_per_token_quant_fp8(input: Tensor, output_q: Tensor, output_s: Tensor) -> None:
    rows, width = input.shape
    check_float("sgl_per_token_quant_fp8", input)
    require(width % 4 == 0, "sgl_per_token_quant_fp8: hidden must be divisible by 4")
    require(all(t.is_contiguous() for t in (input, output_q, output_s)), "sgl_per_token_quant_fp8: contiguous")
    require(output_q.dtype == FP8 and output_q.shape == input.shape, "sgl_per_token_quant_fp8: output_q")
    require(output_s.dtype == torch.float32 and output_s.shape == (rows, 1), "sgl_per_token_quant_fp8: output_s")
    for row in range(rows):
        scale = max(float(input[row].float().abs().max()), 1e-10) / 448
        output_s[row, 0] = scale
        output_q[row] = _round_fp8(input[row].float() / scale)


@kernel
def sgl_per_tensor_quant_fp8(input: Tensor, output_q: Tensor, output_s: Tensor, is_static: bool) -> None:
    check_float("sgl_per_tensor_quant_fp8", input)
    require(input.is_contiguous() and output_q.is_contiguous(), "sgl_per_tensor_quant_fp8: contiguous")
    require(output_s.dtype == torch.float32 and output_s.numel() == 1, "sgl_per_tensor_quant_fp8: one scale")
    if not is_static:  # an atomic maximum over what is there
        output_s.copy_(torch.maximum(output_s, (input.float().abs().max() / 448).reshape(1)))
    output_q.copy_(_round_fp8(input.float() / output_s))


@kernel
def sgl_per_token_group_quant_8bit(
    input: Tensor,
    output_q: Tensor,
    output_s: Tensor,
    group_size: int,
    eps: float,
    fp8_min: float,
    fp8_max: float,
    scale_ue8m0: bool = False,
    fuse_silu_and_mul: bool = False,
    masked_m: Tensor | None = None,
    enable_v2: bool | None = None,
) -> None:
    rows, width = input.shape
    check_float("sgl_per_token_group_quant_8bit", input)
    require(group_size in (16, 32, 64, 128) and width % group_size == 0, "sgl_per_token_group_quant_8bit: group size")
    require(eps == 1e-10 and (fp8_min, fp8_max) == (-448.0, 448.0), "sgl_per_token_group_quant_8bit: constants")
    require(
        not scale_ue8m0 and not fuse_silu_and_mul and masked_m is None, "sgl_per_token_group_quant_8bit: not doubled"
    )
    require(input.is_contiguous() and output_q.is_contiguous(), "sgl_per_token_group_quant_8bit: contiguous")
    require(output_s.shape == (rows, width // group_size), "sgl_per_token_group_quant_8bit: output_s")
    for group in range(width // group_size):
        part = input[:, group * group_size : (group + 1) * group_size].float()
        scale = part.abs().amax(1).clamp(min=eps) / fp8_max
        output_s[:, group] = scale
        output_q[:, group * group_size : (group + 1) * group_size] = _round_fp8(part / scale[:, None])


def _scaled_mm(
    name: str, dtype: torch.dtype, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: torch.dtype, bias: Tensor | None
) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    require(a.dtype == b.dtype == dtype, f"{name}: both matrices are {dtype}")
    require(a.is_contiguous() and _is_column_major(b) and b.shape[0] == k, f"{name}: a row-major, b column-major")
    require(k * a.element_size() % 16 == 0 and n % 8 == 0, f"{name}: rows of 16 bytes")
    for scale, rows in ((sa, m), (sb, n)):
        require(scale.dtype == torch.float32 and scale.is_contiguous() and scale.numel() == rows, f"{name}: scales")
    require(out in HALF, f"{name}: out_dtype half or bfloat16")
    require(bias is None or (bias.dtype == out and bias.shape == (n,) and bias.is_contiguous()), f"{name}: bias")
    result = (a.double() @ b.double()).float() * sa.reshape(m, 1) * sb.reshape(1, n)
    return (result if bias is None else result + bias.float()).to(out)


@kernel
def fp8_scaled_mm(
    mat_a: Tensor, mat_b: Tensor, scales_a: Tensor, scales_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    return _scaled_mm("fp8_scaled_mm", FP8, mat_a, mat_b, scales_a, scales_b, out_dtype, bias)


@kernel
def int8_scaled_mm(
    mat_a: Tensor, mat_b: Tensor, scales_a: Tensor, scales_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    return _scaled_mm("int8_scaled_mm", torch.int8, mat_a, mat_b, scales_a, scales_b, out_dtype, bias)


def _block_product(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor) -> Tensor:
    """a [m, k] and b [n, k], one block of 128 inputs after another."""
    result = torch.zeros(a.shape[0], b.shape[0])
    for block in range(a.shape[1] // 128):
        inputs = slice(block * 128, block * 128 + 128)
        partial = a[:, inputs].float() @ b[:, inputs].float().t()
        result += partial * sa[:, block, None] * sb[:, block].repeat_interleave(128)[: b.shape[0]]
    return result


@kernel
def fp8_blockscale_gemm_sm90(
    input: Tensor,
    weight: Tensor,
    input_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    name = "fp8_blockscale_gemm_sm90"
    require(input.is_contiguous() and weight.is_contiguous() and weight.dtype == FP8, f"{name}: contiguous, fp8")
    require(weight.shape[1] % 128 == 0 and weight.shape[0] % 64 == 0, f"{name}: K % 128, N % 64")
    require(weight_scale is not None and weight_scale.dtype == torch.float32, f"{name}: weight_scale float32")
    require(out is not None and out.dtype == out_dtype == torch.bfloat16, f"{name}: bfloat16 out")
    assert weight_scale is not None and out is not None
    if input_scale is None:
        require(input.dtype == torch.bfloat16, f"{name}: bfloat16 rows have no scale")
        quantized = torch.empty(input.shape, dtype=FP8)
        input_scale = torch.empty(input.shape[0], input.shape[1] // 128)
        sgl_per_token_group_quant_8bit(input, quantized, input_scale, 128, 1e-10, -448.0, 448.0)
        input = quantized
    require(input.dtype == FP8, f"{name}: fp8 rows have a scale")
    return out.copy_(_block_product(input, weight, input_scale, weight_scale))


@kernel
def gemm_fp8_nt_groupwise(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    scale_major_mode: str | None = None,
    mma_sm: int = 1,
    scale_granularity_mnk: tuple[int, int, int] = (1, 128, 128),
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "cutlass",
) -> Tensor:
    name = "gemm_fp8_nt_groupwise"
    require(backend == "cutlass" and scale_major_mode == "K", f"{name}: doubled for cutlass and K")
    require(scale_granularity_mnk == (1, 128, 128) and mma_sm in (1, 2), f"{name}: granularity")
    require(a.dtype == b.dtype == FP8 and a.is_contiguous() and b.is_contiguous(), f"{name}: fp8, contiguous")
    require(b.shape[0] % 128 == 0 and b.shape[1] % 128 == 0, f"{name}: multiples of 128")
    require(a_scale.shape == (a.shape[0], a.shape[1] // 128), f"{name}: a_scale [m, k/128]")
    require(b_scale.shape == (b.shape[0] // 128, b.shape[1] // 128), f"{name}: b_scale [n/128, k/128]")
    require(a_scale.is_contiguous() and b_scale.is_contiguous(), f"{name}: scales contiguous")
    assert out is not None
    require(out.dtype == out_dtype and out.dtype in HALF, f"{name}: half or bfloat16 out")
    return out.copy_(_block_product(a, b, a_scale, b_scale))


@kernel
def fp8_blockwise_scaled_mm(
    mat_a: Tensor, mat_b: Tensor, scales_a: Tensor, scales_b: Tensor, out_dtype: torch.dtype
) -> Tensor:
    name = "fp8_blockwise_scaled_mm"
    require(mat_a.dtype == mat_b.dtype == FP8 and out_dtype in HALF, f"{name}: fp8 to half")
    require(mat_a.is_contiguous() and _is_column_major(mat_b), f"{name}: a row-major, b column-major")
    require(mat_b.shape[0] % 128 == 0 and mat_b.shape[1] % 128 == 0, f"{name}: multiples of 128")
    require(scales_a.shape == (mat_a.shape[0], mat_a.shape[1] // 128), f"{name}: scales_a [m, k/128]")
    require(scales_b.shape == (mat_b.shape[0] // 128, mat_b.shape[1] // 128), f"{name}: scales_b [k/128, n/128]")
    require(scales_a.stride(0) == 1 and scales_b.stride(0) == 1, f"{name}: scales column-major")
    return _block_product(mat_a, mat_b.t(), scales_a, scales_b.t()).to(out_dtype)


@kernel
def awq_dequantize(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> Tensor:
    require(qweight.dtype == qzeros.dtype == torch.int32 and scales.dtype in HALF, "awq_dequantize: types")
    rows, columns = qweight.shape[0], qweight.shape[1] * 8
    require(scales.shape[1] == columns and qzeros.shape[0] == scales.shape[0], "awq_dequantize: shapes")
    group = rows // scales.shape[0]
    out = torch.empty(rows, columns)
    for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        values = (qweight >> (4 * place)) & 15
        zeros = ((qzeros >> (4 * place)) & 15).repeat_interleave(group, 0)
        out[:, output::8] = (values - zeros) * scales.float()[:, output::8].repeat_interleave(group, 0)
    return out.to(scales.dtype)


def _unpack_inputs(words: Tensor, bits: int) -> Tensor:
    """int32 [K*bits/32, N] -> [K, N]."""
    parts = [(words >> (bits * place)) & ((1 << bits) - 1) for place in range(32 // bits)]
    return torch.stack(parts, 1).reshape(-1, words.shape[1])


_SHUFFLED: dict[int, Tensor] = {}
"""Storage address -> what the words hold, in the order of the kernel; its real order of bits is its own business."""


@kernel
def gptq_shuffle(q_weight: Tensor, q_perm: Tensor, bit: int) -> None:
    require(q_weight.dtype == torch.int32 and q_perm.dtype == torch.int32, "gptq_shuffle: int32")
    values = _unpack_inputs(q_weight, bit)
    require(q_perm.numel() in (0, values.shape[0]), "gptq_shuffle: q_perm is empty or one entry an input")
    _SHUFFLED[q_weight.data_ptr()] = values[q_perm.long()] if q_perm.numel() else values
    q_weight.fill_(-1)  # whoever reads the words as before finds nothing


@kernel
def gptq_gemm(
    a: Tensor,
    b_q_weight: Tensor,
    b_gptq_qzeros: Tensor,
    b_gptq_scales: Tensor,
    b_g_idx: Tensor,
    use_shuffle: bool,
    bit: int,
) -> Tensor:
    require(a.dtype == b_gptq_scales.dtype == torch.float16 and a.is_contiguous(), "gptq_gemm: float16, contiguous")
    require(use_shuffle and b_q_weight.data_ptr() in _SHUFFLED, "gptq_gemm: the weight was not shuffled")
    values = _SHUFFLED[b_q_weight.data_ptr()]
    groups, columns = b_gptq_scales.shape
    zeros = torch.stack([(b_gptq_qzeros >> (bit * p)) & ((1 << bit) - 1) for p in range(32 // bit)], 2)
    zeros = zeros.reshape(groups, columns) + 1
    size = values.shape[0] // groups
    weight = (values - zeros.repeat_interleave(size, 0)) * b_gptq_scales.float().repeat_interleave(size, 0)
    rows = a[:, b_g_idx.long()] if b_g_idx.numel() else a
    return (rows.float() @ weight).half()


@kernel
def prepare_moe_input(
    topk_ids: Tensor,
    expert_offsets: Tensor,
    problem_sizes1: Tensor,
    problem_sizes2: Tensor,
    input_permutation: Tensor,
    output_permutation: Tensor,
    num_experts: int,
    n: int,
    k: int,
    blockscale_offsets: Tensor | None = None,
) -> None:
    flat, top_k = topk_ids.flatten().tolist(), topk_ids.shape[1]
    for tensor in (topk_ids, expert_offsets, problem_sizes1, problem_sizes2, input_permutation, output_permutation):
        require(tensor.dtype == torch.int32, "prepare_moe_input: int32")
    require(expert_offsets.shape == (num_experts + 1,), "prepare_moe_input: expert_offsets [E + 1]")
    require(all(0 <= expert < num_experts for expert in flat), "prepare_moe_input: an id would be left out")
    position = 0
    for expert in range(num_experts):
        expert_offsets[expert] = position
        for pair, chosen in enumerate(flat):
            if chosen == expert:
                input_permutation[position] = pair // top_k
                output_permutation[pair] = position
                position += 1
        count = position - int(expert_offsets[expert])
        problem_sizes1[expert] = torch.tensor([count, 2 * n, k])
        problem_sizes2[expert] = torch.tensor([count, k, n])
    expert_offsets[num_experts] = position


@kernel
def shuffle_rows(input_tensor: Tensor, dst2src_map: Tensor, output_tensor_shape: tuple[int, int]) -> Tensor:
    require(input_tensor.is_contiguous() and dst2src_map.shape[0] == output_tensor_shape[0], "shuffle_rows")
    return input_tensor[dst2src_map.long()]


@kernel
def fp8_blockwise_scaled_grouped_mm(
    output: Tensor,
    a_ptrs: Tensor,
    b_ptrs: Tensor,
    out_ptrs: Tensor,
    a_scales_ptrs: Tensor,
    b_scales_ptrs: Tensor,
    a: Tensor,
    b: Tensor,
    scales_a: Tensor,
    scales_b: Tensor,
    stride_a: Tensor,
    stride_b: Tensor,
    stride_c: Tensor,
    layout_sfa: Tensor,
    layout_sfb: Tensor,
    problem_sizes: Tensor,
    expert_offsets: Tensor,
    workspace: Tensor,
) -> None:
    name = "fp8_blockwise_scaled_grouped_mm"
    experts = b.shape[0]
    require(a.dtype == b.dtype == FP8 and a.is_contiguous(), f"{name}: fp8, a row-major")
    require(b.stride(1) == 1, f"{name}: b [E, K, N] column-major")
    require(scales_a.dim() == 2 and scales_b.dim() == 3 and scales_b.stride(1) == 1, f"{name}: scales")
    require(problem_sizes.shape == (experts, 3) and problem_sizes.dtype == torch.int32, f"{name}: problem_sizes")
    require(expert_offsets.shape == (experts,) and expert_offsets.dtype == torch.int32, f"{name}: expert_offsets")
    require(output.dtype in HALF, f"{name}: half out")
    for scratch in (a_ptrs, b_ptrs, out_ptrs, a_scales_ptrs, b_scales_ptrs, stride_a, stride_b, stride_c):
        require(scratch.shape == (experts,) and scratch.dtype == torch.int64, f"{name}: pointers and strides int64 [E]")
    for layout in (layout_sfa, layout_sfb):
        require(layout.shape == (experts, 5) and layout.dtype == torch.int32, f"{name}: layouts int32 [E, 5]")
    require(workspace.dtype == torch.uint8 and workspace.numel() >= 90_000, f"{name}: workspace")
    for expert in range(experts):
        rows, columns, inputs = problem_sizes[expert].tolist()
        require((inputs, columns) == tuple(b.shape[1:]), f"{name}: problem sizes {problem_sizes[expert].tolist()}")
        require(int(stride_a[expert]) == inputs and int(stride_c[expert]) == columns, f"{name}: strides")
        start = int(expert_offsets[expert])
        part = slice(start, start + rows)
        output[part] = _block_product(a[part], b[expert].t(), scales_a[part], scales_b[expert].t()).to(output.dtype)


@kernel
def apply_shuffle_mul_sum(input: Tensor, output: Tensor, permutation: Tensor, factors: Tensor | None) -> None:
    tokens = output.shape[0]
    top_k = input.shape[0] // tokens
    require(factors is not None and factors.dtype == input.dtype == output.dtype, "apply_shuffle_mul_sum: one type")
    require(permutation.dtype == torch.int32 and permutation.numel() == tokens * top_k, "apply_shuffle_mul_sum: order")
    assert factors is not None
    for token in range(tokens):
        chosen = permutation[token * top_k : (token + 1) * top_k].long()
        output[token] = (input[chosen].float() * factors.view(tokens, top_k)[token, :, None].float()).sum(0)
