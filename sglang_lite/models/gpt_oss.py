"""gpt-oss: the shared decoder with sinks in its attention and experts stored as whole stacks."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_lite.adapters.base import Operations
from sglang_lite.adapters.moe import ActivationKind, ExpertActivation, PackedExperts
from sglang_lite.layers.attention import Attention
from sglang_lite.layers.feed_forward import FeedForward
from sglang_lite.layers.moe import SparseMLP
from sglang_lite.layers.parallel import expert_part
from sglang_lite.models.decoder_loader import LayerLoader
from sglang_lite.models.dense import DenseDecoder, build_decoder
from sglang_lite.models.dense_names import layer_prefix
from sglang_lite.models.gpt_oss_config import EXPERTS, ROUTER, SINKS, details_of
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.moe_loader import routing_rule, width_shard
from sglang_lite.models.weight_reader import WeightReader


def build(description: ModelDescription, reader: WeightReader, ops: Operations, num_positions: int) -> DenseDecoder:
    """See ``models.family.Family.module``."""
    return build_decoder(description, reader, ops, num_positions, blocks)


def blocks(loader: LayerLoader, layer: int) -> tuple[Attention, FeedForward]:
    """Attention with its sinks, and the experts."""
    prefix = layer_prefix(layer)
    group = loader.reader.parallel
    sinks = loader.reader.read_float32(f"{prefix}{SINKS}")
    attention = loader.attention(layer, sinks=sinks.chunk(group.size)[group.rank].contiguous())
    router = loader.linears.replicated([f"{prefix}{ROUTER}.weight"], bias_names=[f"{prefix}{ROUTER}.bias"])
    routing = routing_rule(details_of(loader.description).moe)
    return attention, SparseMLP(loader.ops, router, routing, _experts(loader, prefix), group=group)


def _experts(loader: LayerLoader, prefix: str) -> PackedExperts:
    """This rank's experts of a layer, or its part of their intermediate size.

    Gate and up alternate along it, so neighbouring columns stay together. The second bias is added by the first of the
    ranks that share an expert.
    """
    reader, details = loader.reader, details_of(loader.description)
    part = expert_part(details.moe.num_experts, reader.parallel)

    def read(name: str, dim: int) -> Tensor:
        return mine(reader.read_merged([f"{prefix}{EXPERTS}{name}"], width_shard(part, dim=dim)))

    def mine(stack: Tensor) -> Tensor:
        return stack[part.first : part.first + part.count]

    down_bias = mine(reader.read(f"{prefix}{EXPERTS}down_proj_bias"))
    return loader.ops.moe.pack_experts(
        read("gate_up_proj", 2).transpose(1, 2).contiguous(),
        read("down_proj", 1).transpose(1, 2).contiguous(),
        first_expert=part.first,
        total_experts=details.moe.num_experts,
        activation=ExpertActivation(
            ActivationKind.CLAMPED_SWIGLU, interleaved=True, alpha=details.alpha, limit=details.limit
        ),
        w13_bias=read("gate_up_proj_bias", 1).contiguous(),
        w2_bias=down_bias.clone() if part.width_index == 0 else torch.zeros_like(down_bias),
    )
