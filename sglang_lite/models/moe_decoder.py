"""The shared decoder with experts behind the attention of some or all layers: Qwen3-MoE, GLM-4.5 and GLM-4.6."""

from __future__ import annotations

from sglang_lite.adapters.base import Operations
from sglang_lite.layers.attention import Attention
from sglang_lite.layers.feed_forward import FeedForward
from sglang_lite.models.decoder_loader import LayerLoader
from sglang_lite.models.dense import DenseDecoder, LayerBlocks, build_decoder
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.moe_loader import feed_forward
from sglang_lite.models.weight_reader import WeightReader


def build(description: ModelDescription, reader: WeightReader, ops: Operations, num_positions: int) -> DenseDecoder:
    """See ``models.family.Family.module``."""
    return build_decoder(description, reader, ops, num_positions, blocks)


def layer_blocks(description: ModelDescription) -> LayerBlocks:
    """What loads the blocks of a layer."""
    return blocks


def blocks(loader: LayerLoader, layer: int) -> tuple[Attention, FeedForward]:
    """Attention, and experts or a dense block."""
    return loader.attention(layer), feed_forward(loader, layer)
