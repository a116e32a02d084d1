"""A draft head on the device (``draft_head_config``)."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionPlan, Operations, PackedLinear
from sglang_lite.layers.feed_forward import FeedForward
from sglang_lite.layers.rotary import RotaryTable
from sglang_lite.layers.self_attention import SelfAttention
from sglang_lite.models.decoder_loader import LayerLoader
from sglang_lite.models.dense import DenseDecoder, LayerBlocks
from sglang_lite.models.dense_names import layer_prefix
from sglang_lite.models.draft_head_config import (
    EMBEDDING_NORM,
    HIDDEN_NORM,
    INPUT_NORM,
    JOIN,
    JOIN_BIAS,
    OUTPUT_NORM,
    DraftHeadDescription,
)
from sglang_lite.models.families import FAMILIES
from sglang_lite.models.linear_loader import LinearLoader
from sglang_lite.models.load_progress import LoadProgress
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.weight_reader import WeightReader


class _HeadModule(Protocol):
    """A module whose family has a draft head."""

    def layer_blocks(self, description: ModelDescription) -> LayerBlocks: ...


class DraftHead:
    """One decoder layer over a pool of its own, between the served model's embedding and output matrix.

    Args:
        target: the served model.
        input_norms: of the embedding and of the hidden state; None where neither has one.
        layer_norms: before and behind the layer; None where neither has one.
    """

    def __init__(
        self,
        target: DenseDecoder,
        ops: Operations,
        *,
        eps: float,
        rotary: RotaryTable,
        join: PackedLinear,
        attention: SelfAttention,
        middle_norm: Tensor,
        mlp: FeedForward,
        input_norms: tuple[Tensor, Tensor] | None,
        layer_norms: tuple[Tensor, Tensor] | None,
    ) -> None:
        self._target = target
        self._ops = ops
        self._eps = eps
        self._rotary = rotary
        self._join = join
        self._attention = attention
        self._middle_norm = middle_norm
        self._mlp = mlp
        self._input_norms = input_norms
        self._layer_norms = layer_norms

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, previous: Tensor, positions: Tensor, pool: Tensor, plan: AttentionPlan
    ) -> Tensor:
        """What the head makes of tokens and the hidden states before them.

        Args:
            token_ids, positions: int64[T].
            previous: [T, hidden], of the token before each: the served model's after its final norm, or, for a token
                behind a guess, what this method gave for the guess.
            pool: of the head; the tokens' KV is written.

        Returns:
            [T, hidden], for ``logits`` and for the next guess.
        """
        ops, eps = self._ops, self._eps
        embedded = self._target.embed(token_ids)
        if self._input_norms is not None:
            embedded = ops.rms_norm(embedded, self._input_norms[0], eps)
            previous = ops.rms_norm(previous, self._input_norms[1], eps)
        residual = self._join(torch.cat([embedded, previous], dim=-1))
        norms = self._layer_norms
        x = residual if norms is None else ops.rms_norm(residual, norms[0], eps)
        cos, sin = self._rotary.at(positions)
        x = self._attention(x, cos, sin, pool, plan)
        x, residual = ops.add_rms_norm(x, residual, self._middle_norm, eps)
        x = self._mlp(x)
        if norms is None:
            return x + residual
        return ops.add_rms_norm(x, residual, norms[1], eps)[0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> float32[S, vocab], by the served model's output matrix."""
        return self._target.logits(hidden)


def load_draft_head(
    description: DraftHeadDescription,
    target: DenseDecoder,
    *,
    ops: Operations,
    dtype: torch.dtype,
    context_length: int,
) -> DraftHead:
    """Read a head's weights.

    Args:
        target: the served model, whole on this rank.
        ops: operations of the device; they keep what the head's attention leaves, so they are not the target's.

    Raises:
        StartupError: a tensor is not usable.
    """
    checkpoint = description.checkpoint()
    layout = description.layout(checkpoint)
    decoder = description.decoder
    module = cast("_HeadModule", importlib.import_module(FAMILIES[decoder.architecture].module))
    progress = LoadProgress(0, enabled=False)
    with WeightReader(checkpoint, dtype, ops.device, progress, quantized=layout.quantized) as reader:
        linears = LinearLoader(reader, ops)
        attention, mlp = module.layer_blocks(decoder)(LayerLoader(decoder, reader, linears, ops), 0)
        join = linears.replicated([JOIN], bias_names=[JOIN_BIAS] if description.has_bias else None)
        input_norms = layer_norms = None
        if description.is_normed:
            input_norms = reader.read(EMBEDDING_NORM), reader.read(HIDDEN_NORM)
            layer_norms = reader.read(INPUT_NORM), reader.read(OUTPUT_NORM)
        return DraftHead(
            target,
            ops,
            eps=decoder.rms_norm_eps,
            rotary=RotaryTable(decoder.rope, max(context_length, decoder.context_length), ops.device),
            join=join,
            attention=attention,
            middle_norm=reader.read(f"{layer_prefix(0)}post_attention_layernorm.weight"),
            mlp=mlp,
            input_norms=input_norms,
            layer_norms=layer_norms,
        )
