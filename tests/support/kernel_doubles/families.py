"""Doubles of experts, quantized products, recurrent layers, grammars and speculation, and what was called of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from tests.support.kernel_doubles import dense, experts, quantized, recurrent, speculation
from tests.support.kernel_records import load_record
from tests.support.kernel_stubs import installed_stubs

FAMILY_DOUBLES: dict[str, Callable[..., object]] = {
    "flashinfer.fused_moe.cutlass_fused_moe": experts.cutlass_fused_moe,
    "flashinfer.fused_moe.fused_topk_deepseek": experts.fused_topk_deepseek,
    "sgl_kernel.topk_softmax": experts.topk_softmax,
    "sgl_kernel.topk_sigmoid": experts.topk_sigmoid,
    "sgl_kernel.moe_fused_gate": experts.moe_fused_gate,
    "sgl_kernel.moe_align_block_size": experts.moe_align_block_size,
    "sgl_kernel.causal_conv1d_fwd": recurrent.causal_conv1d_fwd,
    "sgl_kernel.causal_conv1d_update": recurrent.causal_conv1d_update,
    "sgl_kernel.apply_token_bitmask_inplace_cuda": dense.apply_token_bitmask_inplace_cuda,
    "flashinfer.sampling.chain_speculative_sampling": speculation.chain_speculative_sampling,
    "sgl_kernel.build_tree_kernel_efficient": speculation.build_tree_kernel_efficient,
    "sgl_kernel.verify_tree_greedy": speculation.verify_tree_greedy,
    "sgl_kernel.silu_and_mul": dense.silu_and_mul,
    "sgl_kernel.sgl_per_token_quant_fp8": quantized.sgl_per_token_quant_fp8,
    "sgl_kernel.sgl_per_tensor_quant_fp8": quantized.sgl_per_tensor_quant_fp8,
    "sgl_kernel.sgl_per_token_group_quant_8bit": quantized.sgl_per_token_group_quant_8bit,
    "sgl_kernel.fp8_scaled_mm": quantized.fp8_scaled_mm,
    "sgl_kernel.int8_scaled_mm": quantized.int8_scaled_mm,
    "sgl_kernel.fp8_blockwise_scaled_mm": quantized.fp8_blockwise_scaled_mm,
    "sgl_kernel.awq_dequantize": quantized.awq_dequantize,
    "sgl_kernel.gptq_shuffle": quantized.gptq_shuffle,
    "sgl_kernel.gptq_gemm": quantized.gptq_gemm,
    "sgl_kernel.prepare_moe_input": quantized.prepare_moe_input,
    "sgl_kernel.shuffle_rows": quantized.shuffle_rows,
    "sgl_kernel.fp8_blockwise_scaled_grouped_mm": quantized.fp8_blockwise_scaled_grouped_mm,
    "sgl_kernel.apply_shuffle_mul_sum": quantized.apply_shuffle_mul_sum,
    "flashinfer.gemm.fp8_blockscale_gemm_sm90": quantized.fp8_blockscale_gemm_sm90,
    "flashinfer.gemm.gemm_fp8_nt_groupwise": quantized.gemm_fp8_nt_groupwise,
}
"""Public path -> double. Those that a line does not have are left out for it."""

ATTRIBUTES: dict[str, object] = {"flashinfer.tllm_enums.ActivationType": experts.ActivationType}
"""What the records do not list."""

Calls = dict[str, list[frozenset[str]]]
"""Public path -> the argument names of each call, in order."""


@contextmanager
def installed_families(line: str, overrides: Mapping[str, Callable[..., object]] | None = None) -> Iterator[Calls]:
    """Both wheels with these doubles; what is called of them is in the result, by path."""
    calls: Calls = {}
    doubles = FAMILY_DOUBLES | dict(overrides or {})
    available = {path: _counted(path, double, calls) for path, double in doubles.items() if _has(line, path)}
    with installed_stubs(line, available, ATTRIBUTES):
        yield calls


def _has(line: str, path: str) -> bool:
    record = load_record("flashinfer-python" if path.startswith("flashinfer") else line)
    return record.aliases.get(path, path) in record.functions


def _counted(path: str, double: Callable[..., object], calls: Calls) -> Callable[..., object]:
    def call(**arguments: object) -> object:
        calls.setdefault(path, []).append(frozenset(arguments))
        return double(**arguments)

    return call
