"""Qwen3.5 and Qwen3.5-MoE: the delta net's projections are stored one by one."""

from __future__ import annotations

import torch

from sglang_lite.adapters.base import Operations, PackedLinear
from sglang_lite.layers.delta_shape import DeltaShape
from sglang_lite.layers.gated_delta import split_flat
from sglang_lite.models.decoder_loader import LayerLoader
from sglang_lite.models.hybrid import HybridDecoder
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.qwen_hybrid import build_qwen_hybrid, channel_spans
from sglang_lite.models.weight_reader import Shard, WeightReader


def build(description: ModelDescription, reader: WeightReader, ops: Operations, num_positions: int) -> HybridDecoder:
    """See ``models.dense.build``."""
    return build_qwen_hybrid(description, reader, ops, num_positions, _projections, split_flat)


def _projections(loader: LayerLoader, prefix: str, delta: DeltaShape) -> tuple[PackedLinear, PackedLinear]:
    linears, group = loader.linears, loader.reader.parallel
    names = [f"{prefix}in_proj_qkv.weight", f"{prefix}in_proj_z.weight"]
    if group.size == 1:
        wide = linears.column(names)
    else:
        # Query, key and value lie one behind another in one matrix, and a rank has a part of each.
        mixed = loader.reader.read_spans(names[0], channel_spans(loader, delta))
        gate = loader.reader.read_merged(names[1:], Shard(0, group.rank, group.size))
        wide = loader.ops.pack_linear(torch.cat([mixed, gate]), None)
    return wide, linears.column([f"{prefix}in_proj_b.weight", f"{prefix}in_proj_a.weight"])
