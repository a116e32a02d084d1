"""The parts of a decoder layer that most families load in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from sglang_lite.adapters.base import Operations, PackedLinear
from sglang_lite.layers.attention import Attention, AttentionShape
from sglang_lite.layers.mlp import GatedMLP
from sglang_lite.models.dense_names import layer_prefix
from sglang_lite.models.linear_loader import LinearLoader
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class LayerLoader:
    """Reads the parts of decoder layers onto the device.

    Attributes:
        description: of the model, or of this rank's share of it.
        reader: of the checkpoint.
        linears: makes the linear layers.
        ops: operations of the device.
    """

    description: ModelDescription
    reader: WeightReader
    linears: LinearLoader
    ops: Operations

    def column(
        self, prefix: str, names: Sequence[str], *, has_bias: bool, parts: Sequence[int] | None = None
    ) -> PackedLinear:
        """Projections ``prefix + name`` of one input, see ``LinearLoader.column``."""
        biases = [f"{prefix}{name}.bias" for name in names] if has_bias else None
        return self.linears.column([f"{prefix}{name}.weight" for name in names], bias_names=biases, parts=parts)

    def row(self, name: str, *, has_bias: bool) -> PackedLinear:
        """A projection split by input, see ``LinearLoader.row``."""
        return self.linears.row(f"{name}.weight", bias_name=f"{name}.bias" if has_bias else None)

    def norm_adding_one(self, name: str) -> Tensor:
        """The weight of a norm that multiplies by 1 + w."""
        return (self.reader.read_float32(name) + 1.0).to(self.reader.dtype)

    def attention(
        self,
        layer: int,
        *,
        scale: float | None = None,
        sinks: Tensor | None = None,
        score_cap: float | None = None,
        norms_add_one: bool = False,
    ) -> Attention:
        """``self_attn`` of a layer.

        Args:
            scale: factor on the scores; None for head_dim^-0.5.
            sinks, score_cap: see ``Attention``.
            norms_add_one: the norms of q and k multiply by 1 + w.
        """
        description, prefix = self.description, f"{layer_prefix(layer)}self_attn."
        has_norms = description.query_key_norm
        read_norm = self.norm_adding_one if norms_add_one else self.reader.read
        shape = AttentionShape(
            num_heads=description.num_heads,
            num_kv_heads=description.num_kv_heads,
            head_dim=description.head_dim,
            scale=description.head_dim**-0.5 if scale is None else scale,
        )
        return Attention(
            self.ops,
            shape,
            layer,
            self.column(
                prefix,
                ("q_proj", "k_proj", "v_proj"),
                has_bias=description.qkv_bias,
                parts=self.linears.head_parts(description),
            ),
            self.row(f"{prefix}o_proj", has_bias=description.output_bias),
            query_norm=read_norm(f"{prefix}q_norm.weight") if has_norms else None,
            key_norm=read_norm(f"{prefix}k_norm.weight") if has_norms else None,
            norm_eps=description.rms_norm_eps,
            sliding_window=description.sliding_windows[layer],
            sinks=sinks,
            score_cap=score_cap,
        )

    def dense_mlp(self, layer: int, activation: Callable[[Tensor], Tensor] | None = None) -> GatedMLP:
        """``mlp`` of a layer without experts; ``activation`` as ``GatedMLP`` takes it."""
        prefix, has_bias = f"{layer_prefix(layer)}mlp.", self.description.mlp_bias
        gate_up = self.column(prefix, ("gate_proj", "up_proj"), has_bias=has_bias)
        return GatedMLP(self.ops, gate_up, self.row(f"{prefix}down_proj", has_bias=has_bias), activation)
