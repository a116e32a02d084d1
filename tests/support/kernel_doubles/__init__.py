"""Functions and wrapper classes of the kernel wheels as their documentation describes them, computed with torch.

They check what the kernels check and a little more: page tables out of bounds, wrong types, planning inside a captured
graph. ``installed_kernels`` puts them behind stand-ins with the recorded signatures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sglang_lite.adapters.cuda.selection import Selection
from sglang_lite.adapters.dispatch import Target
from tests.support.kernel_doubles import dense, latent, paged, sampling
from tests.support.kernel_doubles.checks import Precision
from tests.support.kernel_stubs import installed_stubs, registered_operators

HOPPER = Selection(Target(90, "sglang-kernel", has_flashinfer=True))
"""The choices for a device of SM 90 with both wheels of the current line."""

DENSE_DOUBLES: dict[str, object] = {
    "flashinfer.norm.rmsnorm": dense.rmsnorm,
    "flashinfer.norm.gemma_rmsnorm": dense.gemma_rmsnorm,
    "flashinfer.norm.fused_add_rmsnorm": dense.fused_add_rmsnorm,
    "flashinfer.norm.gemma_fused_add_rmsnorm": dense.gemma_fused_add_rmsnorm,
    "flashinfer.activation.silu_and_mul": dense.silu_and_mul,
    "flashinfer.activation.gelu_tanh_and_mul": dense.gelu_tanh_and_mul,
    "flashinfer.rope.apply_rope_with_cos_sin_cache_inplace": dense.apply_rope_with_cos_sin_cache_inplace,
    "flashinfer.page.append_paged_kv_cache": paged.append_paged_kv_cache,
    "flashinfer.BatchDecodeWithPagedKVCacheWrapper": paged.BatchDecodeWithPagedKVCacheWrapper,
    "flashinfer.BatchPrefillWithPagedKVCacheWrapper": paged.BatchPrefillWithPagedKVCacheWrapper,
    "flashinfer.BatchAttentionWithAttentionSinkWrapper": paged.BatchAttentionWithAttentionSinkWrapper,
    "flashinfer.page.append_paged_mla_kv_cache": latent.append_paged_mla_kv_cache,
    "flashinfer.mla.BatchMLAPagedAttentionWrapper": latent.BatchMLAPagedAttentionWrapper,
    "flashinfer.sampling.softmax": sampling.softmax,
    "flashinfer.sampling.top_k_renorm_probs": sampling.top_k_renorm_probs,
    "flashinfer.sampling.top_p_renorm_probs": sampling.top_p_renorm_probs,
    "flashinfer.sampling.sampling_from_probs": sampling.sampling_from_probs,
    "sgl_kernel.silu_and_mul": dense.silu_and_mul,
    "sgl_kernel.gelu_and_mul": dense.gelu_and_mul,
    "sgl_kernel.gelu_tanh_and_mul": dense.gelu_tanh_and_mul,
    "sgl_kernel.transfer_kv_per_layer_mla": dense.transfer_kv_per_layer_mla,
    "sgl_kernel.apply_token_bitmask_inplace_cuda": dense.apply_token_bitmask_inplace_cuda,
}
"""Public path -> double, for dense models."""

OPERATOR_DOUBLES = {
    "rmsnorm": dense.norm_operator,
    "gemma_rmsnorm": dense.gemma_norm_operator,
    "fused_add_rmsnorm": dense.add_norm_operator,
    "gemma_fused_add_rmsnorm": dense.gemma_add_norm_operator,
}
"""Registered operator -> double."""


@contextmanager
def installed_kernels(line: str = "sglang-kernel", *, float32: bool = False) -> Iterator[None]:
    """Both wheels with the doubles of dense models.

    Args:
        line: distribution of ``sgl_kernel``.
        float32: let the doubles compute in float32 and with latent rows of any width, which the kernels do not, so
            that tiny models can be compared with the host token by token.
    """
    Precision.allow_float32 = float32
    try:
        with installed_stubs(line, DENSE_DOUBLES), registered_operators(line, OPERATOR_DOUBLES):
            yield
    finally:
        Precision.allow_float32 = False
