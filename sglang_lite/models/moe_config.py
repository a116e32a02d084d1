"""Mixture-of-experts blocks: what config.json says of them, their tensors' names and shapes. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang_lite.models.config_files import ConfigReader
from sglang_lite.models.dense_names import Shapes, attention_tensors, decoder_tensors, mlp_tensors
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.types import StartupError

MOST_EXPERTS = 65_536
"""Routed experts of a layer. Published models have some hundred at most."""

ROUTER = "mlp.gate.weight"
CORRECTION_BIAS = "mlp.gate.e_score_correction_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEDescription:
    """The experts of a model's sparse layers.

    Attributes:
        num_experts, top_k: routed experts, and how many of them a token goes through.
        intermediate_size: of one routed expert.
        sparse_layers: per layer, whether it has experts; the others are dense.
        scoring: logits to scores: softmax over all experts, a logistic function each, or softmax over the top k.
        renormalize: divide the chosen scores by their sum plus ``epsilon``.
        scaling: factor on the final weights.
        num_groups, kept_groups, group_score: experts are chosen from the best groups only; 1 and 1 without groups.
        has_correction_bias: a bias per expert is added to the scores that experts are chosen by.
        shared_intermediate_size: of the block that every token goes through; 0 without any.
        shared_name: its name in the checkpoint.
        has_shared_gate: a logistic function of the token scales the shared block.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    sparse_layers: tuple[bool, ...]
    scoring: Literal["softmax", "sigmoid", "top_k_softmax"] = "softmax"
    renormalize: bool = False
    epsilon: float = 0.0
    scaling: float = 1.0
    num_groups: int = 1
    kept_groups: int = 1
    group_score: Literal["max", "top_2_sum"] = "max"
    has_correction_bias: bool = False
    shared_intermediate_size: int = 0
    shared_name: str = "shared_experts"
    has_shared_gate: bool = False


def check_moe(config: ConfigReader, moe: MoEDescription) -> MoEDescription:
    """The description itself.

    Raises:
        StartupError: it asks for a choice of experts that cannot be made.
    """
    groups, kept = moe.num_groups, moe.kept_groups
    if moe.top_k > moe.num_experts:
        problem = f"num_experts_per_tok {moe.top_k} is more than the {moe.num_experts} experts"
    elif moe.num_experts % groups:
        problem = f"{moe.num_experts} experts are not divisible by n_group {groups}"
    elif kept > groups:
        problem = f"topk_group {kept} is more than n_group {groups}"
    elif moe.top_k > moe.num_experts // groups * kept:
        problem = f"num_experts_per_tok {moe.top_k} is more than the experts in topk_group {kept} of {groups} groups"
    elif groups > 1 and moe.group_score == "top_2_sum" and moe.num_experts // groups < 2:
        problem = f"n_group {groups} leaves less than two of the {moe.num_experts} experts a group"
    else:
        return moe
    raise StartupError(f"{config.source}: {problem}")


def number_of_experts(config: ConfigReader) -> int:
    """Routed experts, under whichever of its names the configuration has."""
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.values.get(key) is not None:
            return config.count(key, MOST_EXPERTS)
    raise config.error("num_experts", "a positive integer (or num_local_experts, n_routed_experts)")


def experts_per_token(config: ConfigReader) -> int:
    """How many routed experts a token goes through."""
    other = "num_experts_per_token"
    return config.integer(other if config.values.get(other) is not None else "num_experts_per_tok")


def layers_from(first: int, num_layers: int, *, step: int = 1) -> tuple[bool, ...]:
    """Per layer, whether it is sparse: every ``step``-th from ``first`` on, counted from layer 0."""
    return tuple(layer >= first and layer % step == 0 for layer in range(num_layers))


def read_sigmoid_moe(config: ConfigReader, sparse_layers: tuple[bool, ...]) -> MoEDescription:
    """Experts chosen by a logistic function each plus a correction bias, out of the groups whose two best are best.

    Raises:
        StartupError: a field is absent or malformed, or the choice cannot be made.
    """
    intermediate_size = config.integer("moe_intermediate_size")
    moe = MoEDescription(
        num_experts=number_of_experts(config),
        top_k=experts_per_token(config),
        intermediate_size=intermediate_size,
        sparse_layers=sparse_layers,
        scoring="sigmoid",
        renormalize=config.boolean("norm_topk_prob", True),
        epsilon=1e-20,
        scaling=config.number("routed_scaling_factor", 1.0),
        num_groups=config.integer("n_group", 1),
        kept_groups=config.integer("topk_group", 1),
        group_score="top_2_sum",
        has_correction_bias=True,
        shared_intermediate_size=number_of_shared_experts(config) * intermediate_size,
    )
    return check_moe(config, moe)


def number_of_shared_experts(config: ConfigReader) -> int:
    """``n_shared_experts``; absent or null means none."""
    shared = config.values.get("n_shared_experts") or 0
    if isinstance(shared, bool) or not isinstance(shared, int) or shared < 0:
        raise config.error("n_shared_experts", "a number of experts, 0 or null")
    return shared


def expected_tensors(description: ModelDescription) -> Shapes:
    """Tensors of a decoder with grouped key/value heads whose ``details`` are a MoEDescription."""
    moe = description.details
    assert isinstance(moe, MoEDescription)

    def blocks(layer: int) -> Shapes:
        sparse = moe.sparse_layers[layer]
        block = moe_tensors(description.hidden_size, moe) if sparse else mlp_tensors(description)
        return attention_tensors(description) | block

    return decoder_tensors(description, blocks)


def moe_tensors(hidden_size: int, moe: MoEDescription) -> Shapes:
    """name -> shape of the tensors of a sparse layer's block, behind the layer's prefix."""
    shapes: Shapes = {ROUTER: (moe.num_experts, hidden_size)}
    if moe.has_correction_bias:
        shapes[CORRECTION_BIAS] = (moe.num_experts,)
    for expert in range(moe.num_experts):
        shapes |= gated_block_tensors(f"mlp.experts.{expert}.", hidden_size, moe.intermediate_size)
    if moe.shared_intermediate_size:
        shapes |= gated_block_tensors(f"mlp.{moe.shared_name}.", hidden_size, moe.shared_intermediate_size)
    if moe.has_shared_gate:
        shapes[shared_gate_name(moe)] = (1, hidden_size)
    return shapes


def shared_gate_name(moe: MoEDescription) -> str:
    """Name of the matrix whose logistic function scales the shared block, behind the layer's prefix."""
    return f"mlp.{moe.shared_name}_gate.weight"


def gated_block_tensors(prefix: str, hidden_size: int, intermediate_size: int) -> Shapes:
    """name -> shape of the three matrices of a gated feed-forward block without biases."""
    return {
        f"{prefix}gate_proj.weight": (intermediate_size, hidden_size),
        f"{prefix}up_proj.weight": (intermediate_size, hidden_size),
        f"{prefix}down_proj.weight": (hidden_size, intermediate_size),
    }
