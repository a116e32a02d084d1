"""Wiring of Kimi Linear (``kimi_linear_config``)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sglang_lite.adapters.base import Operations
from sglang_lite.layers.channel_delta import ChannelDeltaAttention
from sglang_lite.layers.feed_forward import FeedForward
from sglang_lite.layers.latent_attention import LatentAttention
from sglang_lite.layers.parallel import part_of
from sglang_lite.models.decoder_loader import LayerLoader
from sglang_lite.models.dense_names import layer_prefix
from sglang_lite.models.hybrid import HybridDecoder, HybridStep, Mixer, build_hybrid
from sglang_lite.models.kimi_linear_config import kimi_details
from sglang_lite.models.latent_loader import load_latent_attention
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.moe_loader import load_sparse_mlp
from sglang_lite.models.weight_reader import Shard, WeightReader


@dataclass(frozen=True, slots=True)
class LatentMixer:
    """A layer of full attention over latent rows."""

    attention: LatentAttention

    def __call__(self, x: Tensor, step: HybridStep) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.attention(x, step.cos, step.sin, step.pool, step.plan)


@dataclass(frozen=True, slots=True)
class ChannelDeltaMixer:
    """A recurrent layer."""

    delta: ChannelDeltaAttention

    def __call__(self, x: Tensor, step: HybridStep) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.delta(x, step.recurrent)


def build(description: ModelDescription, reader: WeightReader, ops: Operations, num_positions: int) -> HybridDecoder:
    """See ``models.dense.build``; without rotary embeddings the number of positions does not matter."""
    return build_hybrid(description, reader, ops, None, _blocks, reader.read)


def _blocks(loader: LayerLoader, layer: int) -> tuple[Mixer, FeedForward]:
    details, prefix = kimi_details(loader.description), layer_prefix(layer)
    mixer: Mixer
    if details.full_attention[layer]:
        mixer = LatentMixer(
            load_latent_attention(
                loader.reader,
                loader.linears,
                loader.ops,
                prefix,
                details.latent,
                num_heads=loader.description.num_heads,
                norm_eps=loader.description.rms_norm_eps,
                pool_layer=details.index_in_kind(layer),
            )
        )
    else:
        mixer = ChannelDeltaMixer(_delta_attention(loader, layer))
    if details.moe is None or not details.is_sparse(layer):
        return mixer, loader.dense_mlp(layer)
    hidden_size = loader.description.hidden_size
    return mixer, load_sparse_mlp(loader.reader, loader.linears, loader.ops, prefix, hidden_size, details.moe)


def _delta_attention(loader: LayerLoader, layer: int) -> ChannelDeltaAttention:
    details, reader, linears = kimi_details(loader.description), loader.reader, loader.linears
    prefix, shape = f"{layer_prefix(layer)}self_attn.", details.delta
    group, heads = reader.parallel, part_of(shape.num_value_heads, reader.parallel)
    shard = Shard(0, group.rank, group.size) if group.size > 1 else None
    conv = reader.read_merged([f"{prefix}{name}_conv1d.weight" for name in "qkv"], shard)
    return ChannelDeltaAttention(
        loader.ops,
        shape.share(group.size),
        details.index_in_kind(layer),
        linears.column([f"{prefix}{name}_proj.weight" for name in "qkv"]),
        linears.replicated([f"{prefix}f_a_proj.weight", f"{prefix}g_a_proj.weight"]),
        linears.column([f"{prefix}b_proj.weight"]),
        linears.column([f"{prefix}f_b_proj.weight"]),
        linears.column([f"{prefix}g_b_proj.weight"]),
        linears.row(f"{prefix}o_proj.weight"),
        conv_weight=conv.squeeze(1),
        decay_rate=reader.read_float32(f"{prefix}A_log").exp().view(-1, 1)[heads],
        dt_bias=reader.read_float32(f"{prefix}dt_bias").view(-1, shape.key_dim)[heads],
        norm=reader.read(f"{prefix}o_norm.weight"),
        norm_eps=loader.description.rms_norm_eps,
    )
