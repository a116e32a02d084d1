"""Qwen3-Next: the delta net's projections are stored per key head."""

from __future__ import annotations

from sglang_lite.adapters.base import Operations, PackedLinear
from sglang_lite.layers.gated_delta import split_by_key_head
from sglang_lite.models.hybrid import HybridDecoder
from sglang_lite.models.linear_loader import LinearLoader
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.qwen_hybrid import build_qwen_hybrid
from sglang_lite.models.weight_reader import WeightReader


def build(description: ModelDescription, reader: WeightReader, ops: Operations, num_positions: int) -> HybridDecoder:
    """See ``models.dense.build``."""
    return build_qwen_hybrid(description, reader, ops, num_positions, _projections, split_by_key_head)


def _projections(linears: LinearLoader, prefix: str) -> tuple[PackedLinear, PackedLinear]:
    return linears.column([f"{prefix}in_proj_qkvz.weight"]), linears.column([f"{prefix}in_proj_ba.weight"])
