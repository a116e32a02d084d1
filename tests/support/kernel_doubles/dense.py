"""Doubles of norms, activations, rotary embedding, page copies and the grammar mask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.support.kernel_doubles.capture import kernel
from tests.support.kernel_doubles.checks import check_float, check_int32, check_last_contiguous, require


def _norm(x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (weight.float() + shift)).to(x.dtype)


def _check_norm(x: Tensor, weight: Tensor) -> None:
    check_float("rmsnorm", x, weight)
    check_last_contiguous("rmsnorm", x)
    require(x.dim() in (2, 3) and weight.shape == x.shape[-1:], f"rmsnorm: {list(x.shape)} and {list(weight.shape)}")
    require(weight.is_contiguous(), "rmsnorm: the weight must be contiguous")


@kernel
def rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    _check_norm(input, weight)
    result = _norm(input, weight, eps, 0.0)
    return result if out is None else out.copy_(result)


@kernel
def gemma_rmsnorm(
    input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, enable_pdl: bool | None = None
) -> Tensor:
    _check_norm(input, weight)
    result = _norm(input, weight, eps, 1.0)
    return result if out is None else out.copy_(result)


def _fused_add(input: Tensor, residual: Tensor, weight: Tensor, eps: float, shift: float) -> None:
    _check_norm(input, weight)
    check_float("fused_add_rmsnorm", input, residual)
    require(input.dim() == 2 and input.shape == residual.shape, "fused_add_rmsnorm: two matrices of one shape")
    residual.add_(input)
    input.copy_(_norm(residual, weight, eps, shift))


@kernel
def fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    _fused_add(input, residual, weight, eps, 0.0)


@kernel
def gemma_fused_add_rmsnorm(
    input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, enable_pdl: bool | None = None
) -> None:
    _fused_add(input, residual, weight, eps, 1.0)


@kernel
def norm_operator(output: Tensor, input: Tensor, weight: Tensor, eps: float, enable_pdl: bool) -> None:
    _check_operator_norm(output, input, weight)
    output.copy_(_norm(input, weight, eps, 0.0))


@kernel
def gemma_norm_operator(output: Tensor, input: Tensor, weight: Tensor, eps: float, enable_pdl: bool) -> None:
    _check_operator_norm(output, input, weight)
    output.copy_(_norm(input, weight, eps, 1.0))


def _check_operator_norm(output: Tensor, input: Tensor, weight: Tensor) -> None:
    _check_norm(input, weight)
    require(input.dim() == 2 and input.is_contiguous() and output.is_contiguous(), "rmsnorm: contiguous matrices only")
    require(output.shape == input.shape and output.dtype == input.dtype, "rmsnorm: the output does not fit the input")


@kernel
def add_norm_operator(input: Tensor, residual: Tensor, weight: Tensor, eps: float, enable_pdl: bool) -> None:
    require(input.is_contiguous() and residual.is_contiguous(), "fused_add_rmsnorm: contiguous matrices only")
    _fused_add(input, residual, weight, eps, 0.0)


@kernel
def gemma_add_norm_operator(input: Tensor, residual: Tensor, weight: Tensor, eps: float, enable_pdl: bool) -> None:
    require(input.is_contiguous() and residual.is_contiguous(), "fused_add_rmsnorm: contiguous matrices only")
    _fused_add(input, residual, weight, eps, 1.0)


def _gated(name: str, input: Tensor, out: Tensor | None, gate: Tensor) -> Tensor:
    check_float(name, input)
    require(input.shape[-1] % 2 == 0, f"{name}: the last dimension must be even")
    if input.shape[-1] * input.element_size() % 16:
        raise ValueError("The pointers must be multiple of 16 bytes.")
    result = gate * input[..., input.shape[-1] // 2 :]
    if out is None:
        return result
    require(out.shape == result.shape and out.dtype == input.dtype, f"{name}: the output does not fit the input")
    return out.copy_(result)


@kernel
def silu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    return _gated("silu_and_mul", input, out, functional.silu(input[..., : input.shape[-1] // 2]))


@kernel
def gelu_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    return _gated("gelu_and_mul", input, out, functional.gelu(input[..., : input.shape[-1] // 2]))


@kernel
def gelu_tanh_and_mul(input: Tensor, out: Tensor | None = None, enable_pdl: bool | None = None) -> Tensor:
    half = input[..., : input.shape[-1] // 2]
    return _gated("gelu_tanh_and_mul", input, out, functional.gelu(half, approximate="tanh"))


@kernel
def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    check_float("rope", query, key)
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError("cos_sin_cache should be float32")
    require(cos_sin_cache.is_contiguous() and cos_sin_cache.dim() == 2, "rope: the cache must be a contiguous matrix")
    require(positions.dtype in (torch.int32, torch.int64), f"rope: positions are {positions.dtype}")
    require(bool((positions < len(cos_sin_cache)).all()), "rope: a position past the end of the cache")
    require(len(positions) == len(query) == len(key), "rope: one position a token")
    cos, sin = cos_sin_cache[positions.long()].unsqueeze(1).chunk(2, -1)
    for x in (query.view(len(query), -1, head_size), key.view(len(key), -1, head_size)):
        check_last_contiguous("rope", x)
        part = x[..., : cos_sin_cache.shape[1]]
        halves = part.chunk(2, -1) if is_neox else (part[..., ::2], part[..., 1::2])
        first, second = (half.float().clone() for half in halves)
        halves[0].copy_(first * cos - second * sin)
        halves[1].copy_(second * cos + first * sin)


@kernel
def transfer_kv_per_layer_mla(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    block_quota: int | None = None,
    num_warps_per_block: int = 32,
) -> None:
    require(src_indices.dtype == dst_indices.dtype == torch.int64, "transfer_kv: indices must be int64")
    require(src_indices.shape == dst_indices.shape, "transfer_kv: as many sources as destinations")
    require(item_size % 8 == 0, f"transfer_kv: items of {item_size} bytes are no multiple of 8")
    require(src.is_contiguous() and dst.is_contiguous(), "transfer_kv: raw addresses, the tensors must be contiguous")
    source, destination = (x.view(-1).view(torch.uint8).view(-1, item_size) for x in (src, dst))
    overlap = set(src_indices.tolist()) & set(dst_indices.tolist())
    require(src.data_ptr() != dst.data_ptr() or not overlap, f"transfer_kv: items {overlap} are read and written")
    destination[dst_indices] = source[src_indices]


@kernel
def apply_token_bitmask_inplace_cuda(logits: Tensor, bitmask: Tensor, indices: Tensor | None = None) -> None:
    require(logits.dim() in (1, 2) and logits.is_contiguous(), "bitmask: logits must be contiguous, 1-D or 2-D")
    require(bitmask.dtype == torch.int32 and bitmask.is_contiguous(), "bitmask: contiguous int32")
    width = logits.shape[-1]
    require(bitmask.shape[-1] >= -(-width // 32), f"bitmask: {bitmask.shape[-1]} words for {width} tokens")
    rows = logits.view(-1, width)
    bits = (bitmask.view(-1, bitmask.shape[-1]).unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
    allowed = bits.flatten(1)[:, :width].bool()
    if indices is None:
        require(len(allowed) == len(rows), "bitmask: one mask a row")
        rows.masked_fill_(~allowed, float("-inf"))
        return
    check_int32("bitmask indices", indices)
    for row in indices.tolist():
        rows[row].masked_fill_(~allowed[row], float("-inf"))
