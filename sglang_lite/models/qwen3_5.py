"""Qwen3.5 and Qwen3.5-MoE: the delta net's projections are stored one by one."""

from __future__ import annotations

from sglang_lite.adapters.base import Operations, PackedLinear
from sglang_lite.layers.gated_delta import split_flat
from sglang_lite.models.hybrid import HybridDecoder
from sglang_lite.models.linear_loader import LinearLoader
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.qwen_hybrid import build_qwen_hybrid
from sglang_lite.models.weight_reader import WeightReader


def build(description: ModelDescription, reader: WeightReader, ops: Operations, num_positions: int) -> HybridDecoder:
    """See ``models.dense.build``."""
    return build_qwen_hybrid(description, reader, ops, num_positions, _projections, split_flat)


def _projections(linears: LinearLoader, prefix: str) -> tuple[PackedLinear, PackedLinear]:
    wide = linears.column([f"{prefix}in_proj_qkv.weight", f"{prefix}in_proj_z.weight"])
    return wide, linears.column([f"{prefix}in_proj_b.weight", f"{prefix}in_proj_a.weight"])
