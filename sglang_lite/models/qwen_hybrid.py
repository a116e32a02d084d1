"""Loading of the layers that Qwen3-Next and Qwen3.5 share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sglang_lite.adapters.base import Operations, PackedLinear
from sglang_lite.layers.attention import AttentionShape
from sglang_lite.layers.delta_shape import DeltaShape
from sglang_lite.layers.feed_forward import FeedForward
from sglang_lite.layers.gated_attention import GatedAttention
from sglang_lite.layers.gated_delta import GatedDeltaNet, Splitter
from sglang_lite.layers.parallel import part_of
from sglang_lite.layers.rotary import RotaryTable
from sglang_lite.models.decoder_loader import LayerLoader
from sglang_lite.models.dense_names import layer_prefix
from sglang_lite.models.hybrid import HybridDecoder, HybridStep, Mixer, build_hybrid
from sglang_lite.models.hybrid_config import hybrid_details
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.moe_loader import load_sparse_mlp
from sglang_lite.models.weight_reader import Span, WeightReader

InputProjections = Callable[[LayerLoader, str, DeltaShape], tuple[PackedLinear, PackedLinear]]
"""(loader, prefix of the delta net, heads of the whole model) -> its two input projections, see ``GatedDeltaNet``."""


@dataclass(frozen=True, slots=True)
class AttentionMixer:
    """A layer of full attention."""

    attention: GatedAttention

    def __call__(self, x: Tensor, step: HybridStep) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.attention(x, step.cos, step.sin, step.pool, step.plan)


@dataclass(frozen=True, slots=True)
class DeltaMixer:
    """A recurrent layer."""

    delta: GatedDeltaNet

    def __call__(self, x: Tensor, step: HybridStep) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.delta(x, step.recurrent)


def build_qwen_hybrid(
    description: ModelDescription,
    reader: WeightReader,
    ops: Operations,
    num_positions: int,
    projections: InputProjections,
    split: Splitter,
) -> HybridDecoder:
    """See ``hybrid.build_hybrid``; the generations differ in the input projections of the delta net."""
    details = hybrid_details(description)

    def blocks(loader: LayerLoader, layer: int) -> tuple[Mixer, FeedForward]:
        if details.full_attention[layer]:
            mixer: Mixer = AttentionMixer(_attention(loader, layer))
        else:
            mixer = DeltaMixer(_delta_net(loader, layer, projections, split))
        if details.moe is None or not details.is_sparse(layer):
            return mixer, loader.dense_mlp(layer)
        prefix = layer_prefix(layer)
        return mixer, load_sparse_mlp(loader.reader, loader.linears, ops, prefix, description.hidden_size, details.moe)

    rotary = RotaryTable(description.rope, num_positions, ops.device)
    return build_hybrid(description, reader, ops, rotary, blocks, lambda name: _one_plus(reader, name))


def _one_plus(reader: WeightReader, name: str) -> Tensor:
    """The weight of a norm that multiplies by 1 + w."""
    return (reader.read_float32(name) + 1.0).to(reader.dtype)


def channel_spans(loader: LayerLoader, delta: DeltaShape) -> list[Span]:
    """This rank's rows of a tensor whose rows are the channels of query, key and value."""
    group = loader.reader.parallel
    return [Span(start, stop) for start, stop in delta.channel_spans(group.rank, group.size)]


def _attention(loader: LayerLoader, layer: int) -> GatedAttention:
    description, prefix = loader.description, f"{layer_prefix(layer)}self_attn."
    return GatedAttention(
        loader.ops,
        AttentionShape(
            num_heads=description.num_heads,
            num_kv_heads=description.num_kv_heads,
            head_dim=description.head_dim,
            scale=description.head_dim**-0.5,
        ),
        hybrid_details(description).index_in_kind(layer),
        loader.column(
            prefix,
            ("q_proj", "k_proj", "v_proj"),
            has_bias=description.qkv_bias,
            parts=loader.linears.head_parts(description),
        ),
        loader.row(f"{prefix}o_proj", has_bias=description.output_bias),
        query_norm=_one_plus(loader.reader, f"{prefix}q_norm.weight"),
        key_norm=_one_plus(loader.reader, f"{prefix}k_norm.weight"),
        norm_eps=description.rms_norm_eps,
    )


def _delta_net(loader: LayerLoader, layer: int, projections: InputProjections, split: Splitter) -> GatedDeltaNet:
    details, prefix = hybrid_details(loader.description), f"{layer_prefix(layer)}linear_attn."
    group, heads = loader.reader.parallel, part_of(details.delta.num_value_heads, loader.reader.parallel)
    wide, narrow = projections(loader, prefix, details.delta)
    return GatedDeltaNet(
        loader.ops,
        details.delta.share(group.size),
        details.index_in_kind(layer),
        wide,
        narrow,
        loader.row(f"{prefix}out_proj", has_bias=False),
        split=split,
        conv_weight=loader.reader.read_spans(f"{prefix}conv1d.weight", channel_spans(loader, details.delta)).squeeze(1),
        decay_rate=loader.reader.read_float32(f"{prefix}A_log")[heads].exp(),
        dt_bias=loader.reader.read_float32(f"{prefix}dt_bias")[heads],
        norm=loader.reader.read(f"{prefix}norm.weight"),
        norm_eps=loader.description.rms_norm_eps,
    )
