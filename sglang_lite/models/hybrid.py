"""The decoder of models whose layers are recurrent or attend, see ``hybrid_config.HybridDetails``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionPlan, Operations, PackedLinear
from sglang_lite.layers.feed_forward import FeedForward
from sglang_lite.layers.given_embeddings import GivenEmbeddings
from sglang_lite.layers.parallel import ParallelEmbedding
from sglang_lite.layers.recurrent_step import RecurrentStep
from sglang_lite.layers.rotary import RotaryTable
from sglang_lite.models.decoder_loader import LayerLoader
from sglang_lite.models.dense_names import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix
from sglang_lite.models.linear_loader import LinearLoader
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.weight_reader import WeightReader


@dataclass(frozen=True, slots=True)
class HybridStep:
    """What the layers of a step share.

    Attributes:
        cos, sin: float32[T, rotary_dim / 2] at the tokens' positions; empty without rotary embeddings.
        pool, plan: of the KV pool; recurrent: the states.
    """

    cos: Tensor
    sin: Tensor
    pool: Tensor
    plan: AttentionPlan
    recurrent: RecurrentStep


class Mixer(Protocol):
    """The part of a layer that lets tokens see earlier ones."""

    def __call__(self, x: Tensor, step: HybridStep) -> Tensor:
        """[T, hidden] -> [T, hidden]."""


@dataclass(frozen=True, slots=True)
class HybridLayer:
    """x += mixer(norm(x)); x += feed_forward(norm(x)). ``next_norm`` is the norm that follows the layer."""

    mixer: Mixer
    post_attention_norm: Tensor
    feed_forward: FeedForward
    next_norm: Tensor


class HybridDecoder:
    """See ``models.base.CausalLanguageModel`` and ``RecurrentLanguageModel``."""

    def __init__(
        self,
        description: ModelDescription,
        ops: Operations,
        rotary: RotaryTable | None,
        embed: ParallelEmbedding,
        first_norm: Tensor,
        layers: list[HybridLayer],
        lm_head: PackedLinear,
    ) -> None:
        if description.recurrent is None:
            raise TypeError(f"{description.architecture} is described without recurrent layers")
        self.kv = description.kv
        self.num_layers = description.kv.num_layers
        self.num_kv_heads = description.kv.num_kv_heads
        self.head_dim = description.kv.key_width
        self.vocab_size = description.vocab_size
        self.recurrent = description.recurrent
        self.activation_dtype = first_norm.dtype
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
        recurrent: RecurrentStep | None = None,
        *,
        given: GivenEmbeddings | None = None,
    ) -> Tensor:
        """int64[T] ids and positions -> [T, hidden], after the final norm. Writes KV and states of the tokens."""
        if recurrent is None:
            raise ValueError("this model has recurrent layers; its forward pass needs their states")
        add_rms_norm, eps = self._ops.add_rms_norm, self._eps
        residual = self._embed(token_ids)
        if given is not None:
            residual = given.put_into(residual)
        cos, sin = self._rotary.at(positions) if self._rotary is not None else (residual[:0], residual[:0])
        step = HybridStep(cos, sin, pool, plan, recurrent)
        x = self._ops.rms_norm(residual, self._first_norm, eps)
        for layer in self._layers:
            x = layer.mixer(x, step)
            x, residual = add_rms_norm(x, residual, layer.post_attention_norm, eps)
            x = layer.feed_forward(x)
            x, residual = add_rms_norm(x, residual, layer.next_norm, eps)
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> float32[S, vocab]."""
        return self._lm_head(hidden).float()


LayerBlocks = Callable[[LayerLoader, int], tuple[Mixer, FeedForward]]
"""Loads the two blocks of a layer, given its index."""


def build_hybrid(
    description: ModelDescription,
    reader: WeightReader,
    ops: Operations,
    rotary: RotaryTable | None,
    blocks: LayerBlocks,
    read_norm: Callable[[str], Tensor],
) -> HybridDecoder:
    """Read the weights and hand the matrices to the device's packing.

    Args:
        rotary: None for a model without rotary embeddings.
        blocks: loads the blocks of a layer.
        read_norm: reads the weight of a norm over the hidden state, ready to multiply with.
    """
    embedding = reader.read_vocabulary(EMBEDDING)
    linears = LinearLoader(reader, ops)
    loader = LayerLoader(description, reader, linears, ops)
    first_norm = read_norm(f"{layer_prefix(0)}input_layernorm.weight")
    layers: list[HybridLayer] = []
    for layer in range(description.num_layers):
        is_last = layer + 1 == description.num_layers
        next_norm = read_norm(FINAL_NORM if is_last else f"{layer_prefix(layer + 1)}input_layernorm.weight")
        mixer, feed_forward = blocks(loader, layer)
        post_attention_norm = read_norm(f"{layer_prefix(layer)}post_attention_layernorm.weight")
        layers.append(HybridLayer(mixer, post_attention_norm, feed_forward, next_norm))
    tied = description.tie_word_embeddings
    lm_head = linears.tied_vocabulary(embedding, description.vocab_size) if tied else linears.vocabulary(LM_HEAD)
    embed = ParallelEmbedding(ops, embedding, reader.parallel)
    return HybridDecoder(description, ops, rotary, embed, first_norm, layers, lm_head)
