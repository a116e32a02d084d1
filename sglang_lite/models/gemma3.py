"""The decoder of Gemma 3: norms before and behind each block, two rotary tables, scaled embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionPlan, Operations, PackedLinear
from sglang_lite.layers.attention import Attention
from sglang_lite.layers.given_embeddings import GivenEmbeddings
from sglang_lite.layers.mlp import GatedMLP
from sglang_lite.layers.parallel import ParallelEmbedding
from sglang_lite.layers.rotary import RotaryTable
from sglang_lite.models.decoder_loader import LayerLoader
from sglang_lite.models.dense_names import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix
from sglang_lite.models.gemma3_config import FEED_FORWARD_NORMS, details_of
from sglang_lite.models.linear_loader import LinearLoader
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class GemmaLayer:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x))).

    The norm before attention is the ``next_norm`` of the layer before, so that it fuses with the addition.

    Attributes:
        is_local: attention has a window, and its own rotary table.
    """

    attention: Attention
    is_local: bool
    attention_norm: Tensor
    mlp: GatedMLP
    pre_mlp_norm: Tensor
    mlp_norm: Tensor
    next_norm: Tensor


class GemmaDecoder:
    """A decoder-only language model over the paged pool (see ``models.base.CausalLanguageModel``).

    Args:
        rotary, local_rotary: of the layers that see all keys, and of those with a window.
        embedding_scale: factor on the embeddings, as rounded to the weights' type.
        logit_cap: c of c * tanh(x / c) on the logits; None without.
    """

    def __init__(
        self,
        description: ModelDescription,
        ops: Operations,
        rotary: RotaryTable,
        local_rotary: RotaryTable,
        embedding: ParallelEmbedding,
        embedding_scale: float,
        first_norm: Tensor,
        layers: list[GemmaLayer],
        lm_head: PackedLinear,
        logit_cap: float | None,
    ) -> None:
        self.num_layers = description.num_layers
        self.num_kv_heads = description.num_kv_heads
        self.head_dim = description.head_dim
        self.vocab_size = description.vocab_size
        self._ops = ops
        self._eps = description.rms_norm_eps
        self._rotary = rotary
        self._local_rotary = local_rotary
        self._embedding = embedding
        self._embedding_scale = embedding_scale
        self._first_norm = first_norm
        self._layers = layers
        self._lm_head = lm_head
        self._logit_cap = logit_cap

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        pool: Tensor,
        plan: AttentionPlan,
        *,
        given: GivenEmbeddings | None = None,
    ) -> Tensor:
        """int64[T] ids and positions -> [T, hidden], after the final norm. Writes the tokens' KV into the pool."""
        ops, eps = self._ops, self._eps
        whole, local = self._rotary.at(positions), self._local_rotary.at(positions)
        residual = self._embedding(token_ids) * self._embedding_scale
        if given is not None:
            residual = given.put_into(residual)
        x = ops.rms_norm(residual, self._first_norm, eps)
        for layer in self._layers:
            cos, sin = local if layer.is_local else whole
            x = layer.attention(x, cos, sin, pool, plan)
            x = ops.rms_norm(x, layer.attention_norm, eps)
            x, residual = ops.add_rms_norm(x, residual, layer.pre_mlp_norm, eps)
            x = ops.rms_norm(layer.mlp(x), layer.mlp_norm, eps)
            x, residual = ops.add_rms_norm(x, residual, layer.next_norm, eps)
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> float32[S, vocab]."""
        logits = self._lm_head(hidden).float()
        if self._logit_cap is None:
            return logits
        return logits.div_(self._logit_cap).tanh_().mul_(self._logit_cap)


def build(description: ModelDescription, reader: WeightReader, ops: Operations, num_positions: int) -> GemmaDecoder:
    """See ``models.family.Family.module``."""
    details = details_of(description)
    linears = LinearLoader(reader, ops)
    loader = LayerLoader(description, reader, linears, ops)
    embedding = reader.read_vocabulary(EMBEDDING)
    first_norm = loader.norm_adding_one(f"{layer_prefix(0)}input_layernorm.weight")
    layers = [_build_layer(loader, layer) for layer in range(description.num_layers)]
    tied = description.tie_word_embeddings
    return GemmaDecoder(
        description,
        ops,
        RotaryTable(description.rope, num_positions, ops.device),
        RotaryTable(details.local_rope, num_positions, ops.device),
        ParallelEmbedding(ops, embedding, reader.parallel),
        float(torch.tensor(description.hidden_size**0.5).to(reader.dtype)),
        first_norm,
        layers,
        linears.tied_vocabulary(embedding, description.vocab_size) if tied else linears.vocabulary(LM_HEAD),
        details.logit_cap,
    )


def _build_layer(loader: LayerLoader, layer: int) -> GemmaLayer:
    details, prefix = details_of(loader.description), layer_prefix(layer)
    is_last = layer + 1 == loader.description.num_layers
    pre_mlp_norm, mlp_norm = (loader.norm_adding_one(f"{prefix}{name}") for name in FEED_FORWARD_NORMS)
    return GemmaLayer(
        attention=loader.attention(layer, scale=details.scale, score_cap=details.score_cap, norms_add_one=True),
        is_local=loader.description.sliding_windows[layer] is not None,
        attention_norm=loader.norm_adding_one(f"{prefix}post_attention_layernorm.weight"),
        mlp=loader.dense_mlp(layer, loader.ops.gelu_and_mul),
        pre_mlp_norm=pre_mlp_norm,
        mlp_norm=mlp_norm,
        next_norm=loader.norm_adding_one(FINAL_NORM if is_last else f"{layer_prefix(layer + 1)}input_layernorm.weight"),
    )
