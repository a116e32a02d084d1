"""Qwen3-Next: the delta net's projections are stored per key head."""

from __future__ import annotations

from sglang_lite.adapters.base import Operations, PackedLinear
from sglang_lite.layers.delta_shape import DeltaShape
from sglang_lite.layers.gated_delta import split_by_key_head
from sglang_lite.models.decoder_loader import LayerLoader
from sglang_lite.models.hybrid import HybridDecoder
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.qwen_hybrid import build_qwen_hybrid
from sglang_lite.models.weight_reader import WeightReader


def build(description: ModelDescription, reader: WeightReader, ops: Operations, num_positions: int) -> HybridDecoder:
    """See ``models.dense.build``."""
    return build_qwen_hybrid(description, reader, ops, num_positions, _projections, split_by_key_head)


def _projections(loader: LayerLoader, prefix: str, delta: DeltaShape) -> tuple[PackedLinear, PackedLinear]:
    """Split by rows like heads: the rows of a key head and of its value heads lie together."""
    linears = loader.linears
    return linears.column([f"{prefix}in_proj_qkvz.weight"]), linears.column([f"{prefix}in_proj_ba.weight"])
