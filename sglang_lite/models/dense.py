"""The decoder of Llama, Mistral, Qwen2 and Qwen3, which takes other blocks for other families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionPlan, Operations, PackedLinear
from sglang_lite.layers.feed_forward import FeedForward
from sglang_lite.layers.given_embeddings import GivenEmbeddings
from sglang_lite.layers.parallel import ParallelEmbedding
from sglang_lite.layers.rotary import RotaryTable
from sglang_lite.layers.self_attention import SelfAttention
from sglang_lite.models.decoder_loader import LayerLoader
from sglang_lite.models.dense_names import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix
from sglang_lite.models.description import ModelDescription
from sglang_lite.models.linear_loader import LinearLoader
from sglang_lite.models.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """x += attention(norm(x)); x += mlp(norm(x)).

    ``next_norm`` is the norm that follows the layer (the next layer's first, or the final one), so that every
    residual addition fuses with the norm behind it.
    """

    attention: SelfAttention
    post_attention_norm: Tensor
    mlp: FeedForward
    next_norm: Tensor


class DenseDecoder:
    """A decoder-only language model over the paged pool (see ``models.base.CausalLanguageModel``)."""

    def __init__(
        self,
        description: ModelDescription,
        ops: Operations,
        rotary: RotaryTable,
        embed: ParallelEmbedding,
        first_norm: Tensor,
        layers: list[DenseLayer],
        lm_head: PackedLinear,
    ) -> None:
        self.num_layers = description.num_layers
        self.num_kv_heads = description.num_kv_heads
        self.head_dim = description.head_dim
        self.vocab_size = description.vocab_size
        self.kv = description.kv
        self._ops = ops
        self._eps = description.rms_norm_eps
        self._rotary = rotary
        self._embed = embed
        self._first_norm = first_norm
        self._layers = layers
        self._lm_head = lm_head

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
        add_rms_norm, eps = self._ops.add_rms_norm, self._eps
        cos, sin = self._rotary.at(positions)
        residual = self._embed(token_ids)
        if given is not None:
            residual = given.put_into(residual)
        x = self._ops.rms_norm(residual, self._first_norm, eps)
        for layer in self._layers:
            x = layer.attention(x, cos, sin, pool, plan)
            x, residual = add_rms_norm(x, residual, layer.post_attention_norm, eps)
            x = layer.mlp(x)
            x, residual = add_rms_norm(x, residual, layer.next_norm, eps)
        return x

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64[T] -> [T, hidden], what the first layer reads."""
        return self._embed(token_ids)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> float32[S, vocab]."""
        return self._lm_head(hidden).float()


LayerBlocks = Callable[[LayerLoader, int], tuple[SelfAttention, FeedForward]]
"""Loads the two blocks of a layer, given its index."""


def layer_blocks(description: ModelDescription) -> LayerBlocks:
    """What loads the blocks of a layer."""
    return dense_blocks


def dense_blocks(loader: LayerLoader, layer: int) -> tuple[SelfAttention, FeedForward]:
    """The blocks of a layer without experts."""
    return loader.attention(layer), loader.dense_mlp(layer)


def build(description: ModelDescription, reader: WeightReader, ops: Operations, num_positions: int) -> DenseDecoder:
    """Read the weights and hand the matrices to the device's packing.

    Args:
        description: what the model looks like; its tensors are known to be in the checkpoint.
        reader: where they are read from.
        ops: operations of the device the model runs on.
        num_positions: positions the rotary table covers.
    """
    return build_decoder(description, reader, ops, num_positions, dense_blocks)


def build_decoder(
    description: ModelDescription,
    reader: WeightReader,
    ops: Operations,
    num_positions: int,
    blocks: LayerBlocks,
) -> DenseDecoder:
    """As ``build`` for any family whose layers add attention and a feed-forward block behind a norm each."""
    embedding = reader.read_vocabulary(EMBEDDING)
    first_norm = next_norm = reader.read(f"{layer_prefix(0)}input_layernorm.weight")
    linears = LinearLoader(reader, ops)
    loader = LayerLoader(description, reader, linears, ops)
    layers: list[DenseLayer] = []
    for layer in range(description.num_layers):
        is_last = layer + 1 == description.num_layers
        next_norm = reader.read(FINAL_NORM if is_last else f"{layer_prefix(layer + 1)}input_layernorm.weight")
        attention, feed_forward = blocks(loader, layer)
        post_attention_norm = reader.read(f"{layer_prefix(layer)}post_attention_layernorm.weight")
        layers.append(DenseLayer(attention, post_attention_norm, feed_forward, next_norm))
    tied = description.tie_word_embeddings
    lm_head = linears.tied_vocabulary(embedding, description.vocab_size) if tied else linears.vocabulary(LM_HEAD)
    embed = ParallelEmbedding(ops, embedding, reader.parallel)
    rotary = RotaryTable(description.rope, num_positions, ops.device)
    return DenseDecoder(description, ops, rotary, embed, first_norm, layers, lm_head)
