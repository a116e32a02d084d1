"""What models with recurrent and full-attention layers share in their descriptions. Free of torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sglang_lite.layers.delta_shape import DeltaShape
from sglang_lite.models.config_files import ConfigReader
from sglang_lite.models.model_description import KVDescription, ModelDescription, RecurrentDescription
from sglang_lite.models.moe_config import MoEDescription
from sglang_lite.types import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridDetails:
    """The layers of a hybrid model.

    Attributes:
        full_attention: per layer, whether it keeps KV; the others are recurrent.
        delta: heads of the recurrent layers.
        moe: the experts of sparse layers; None when all layers are dense.
    """

    full_attention: tuple[bool, ...]
    delta: DeltaShape
    moe: MoEDescription | None

    def index_in_kind(self, layer: int) -> int:
        """Index of a layer among those of its kind: its place in the KV pool or among the states."""
        return self.full_attention[:layer].count(self.full_attention[layer])

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return self.moe is not None and self.moe.sparse_layers[layer]


def hybrid_details(description: ModelDescription) -> HybridDetails:
    """The details of a hybrid model's description."""
    if not isinstance(description.details, HybridDetails):
        raise TypeError(f"{description.architecture} is not described as a hybrid model")
    return description.details


def with_hybrid_layers(
    plain: ModelDescription, kv: KVDescription, details: HybridDetails, config: ConfigReader
) -> ModelDescription:
    """A description completed for a hybrid model.

    Args:
        plain: of a decoder whose layers all have attention.
        kv: what a token leaves in one full-attention layer; the number of layers is set here.

    Raises:
        StartupError: one of the two kinds of layers is missing.
    """
    num_full = sum(details.full_attention)
    if not 0 < num_full < plain.num_layers:
        raise StartupError(
            f"{config.source}: {num_full} of {plain.num_layers} layers have full attention; {plain.architecture} needs "
            f"at least one layer of full attention and one of linear attention"
        )
    delta = details.delta
    return dataclasses.replace(
        plain,
        kv=dataclasses.replace(kv, num_layers=num_full),
        recurrent=RecurrentDescription(
            num_layers=plain.num_layers - num_full,
            conv_channels=delta.conv_channels,
            conv_kernel=delta.conv_kernel,
            num_heads=delta.num_value_heads,
            key_dim=delta.key_dim,
            value_dim=delta.value_dim,
        ),
        details=details,
    )
