"""From a checkpoint to a mixture-of-experts block on the device."""

from __future__ import annotations

from torch import Tensor

from sglang_lite.adapters.base import Operations
from sglang_lite.adapters.moe import SILU, ExpertActivation, GroupScore, PackedExperts, Routing, Scoring
from sglang_lite.layers.feed_forward import FeedForward
from sglang_lite.layers.mlp import GatedMLP
from sglang_lite.layers.moe import SparseMLP
from sglang_lite.layers.parallel import ExpertPart, expert_part
from sglang_lite.models.decoder_loader import LayerLoader
from sglang_lite.models.dense_names import layer_prefix
from sglang_lite.models.linear_loader import LinearLoader
from sglang_lite.models.moe_config import CORRECTION_BIAS, ROUTER, MoEDescription, shared_gate_name
from sglang_lite.models.quantized_experts import read_quantized_experts
from sglang_lite.models.weight_reader import Shard, WeightReader


def routing_rule(moe: MoEDescription) -> Routing:
    """The description's choice of experts as the operations take it."""
    return Routing(
        scoring=Scoring(moe.scoring),
        top_k=moe.top_k,
        renormalize=moe.renormalize,
        num_groups=moe.num_groups,
        kept_groups=moe.kept_groups,
        group_score=GroupScore(moe.group_score),
        scaling=moe.scaling,
        epsilon=moe.epsilon,
    )


def feed_forward(loader: LayerLoader, layer: int) -> FeedForward:
    """The experts of a sparse layer or the dense block of another; ``details`` are a MoEDescription."""
    moe = loader.description.details
    assert isinstance(moe, MoEDescription)
    if not moe.sparse_layers[layer]:
        return loader.dense_mlp(layer)
    hidden_size = loader.description.hidden_size
    return load_sparse_mlp(loader.reader, loader.linears, loader.ops, layer_prefix(layer), hidden_size, moe)


def load_sparse_mlp(
    reader: WeightReader,
    linears: LinearLoader,
    ops: Operations,
    prefix: str,
    hidden_size: int,
    moe: MoEDescription,
) -> SparseMLP:
    """The block of a sparse layer whose experts are separate gate, up and down matrices.

    Args:
        prefix: of the layer's tensors.
    """
    shared, shared_gate = None, None
    if moe.shared_intermediate_size:
        name = f"{prefix}mlp.{moe.shared_name}."
        gate_up = linears.column([f"{name}gate_proj.weight", f"{name}up_proj.weight"])
        shared = GatedMLP(ops, gate_up, linears.row(f"{name}down_proj.weight", summed=False))
        if moe.has_shared_gate:
            shared_gate = linears.replicated([prefix + shared_gate_name(moe)])
    return SparseMLP(
        ops,
        linears.replicated([prefix + ROUTER]),
        routing_rule(moe),
        load_experts(reader, ops, f"{prefix}mlp.experts.", hidden_size, moe),
        correction_bias=reader.read_float32(prefix + CORRECTION_BIAS) if moe.has_correction_bias else None,
        shared=shared,
        shared_gate=shared_gate,
        group=reader.parallel,
    )


def load_experts(
    reader: WeightReader,
    ops: Operations,
    prefix: str,
    hidden_size: int,
    moe: MoEDescription,
    *,
    activation: ExpertActivation = SILU,
) -> PackedExperts:
    """This rank's routed experts of a layer, or its part of their intermediate size.

    Every matrix is read straight into its place in the stack, so that the peak is one matrix above the result.
    """
    part = expert_part(moe.num_experts, reader.parallel)
    quantized = read_quantized_experts(reader, ops, prefix, part, activation)
    if quantized is not None:
        return ops.quantized.pack_experts(
            quantized.w13,
            quantized.w2,
            activation=activation,
            first_expert=part.first,
            total_experts=moe.num_experts,
        )
    intermediate = moe.intermediate_size // part.width_parts
    w13: Tensor | None = None
    w2: Tensor | None = None
    for expert in range(part.count):
        name = f"{prefix}{part.first + expert}."
        gate_up = reader.read_merged([f"{name}gate_proj.weight", f"{name}up_proj.weight"], width_shard(part, dim=0))
        down = reader.read_merged([f"{name}down_proj.weight"], width_shard(part, dim=1))
        if w13 is None or w2 is None:
            w13 = gate_up.new_empty(part.count, 2 * intermediate, hidden_size)
            w2 = down.new_empty(part.count, hidden_size, intermediate)
        w13[expert], w2[expert] = gate_up, down
    assert w13 is not None and w2 is not None  # a description has experts
    return ops.moe.pack_experts(w13, w2, activation=activation, first_expert=part.first, total_experts=moe.num_experts)


def width_shard(part: ExpertPart, *, dim: int) -> Shard | None:
    """This rank's part of an expert's intermediate size, which lies along ``dim``; None for all of it."""
    return Shard(dim, part.width_index, part.width_parts) if part.width_parts > 1 else None
