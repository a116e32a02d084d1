"""Wiring of the families with latent attention (``deepseek_config``)."""

from __future__ import annotations

from sglang_lite.adapters.base import Operations
from sglang_lite.layers.feed_forward import FeedForward
from sglang_lite.layers.key_indexer import KeyIndexer, RememberingIndexer, SharedIndexer
from sglang_lite.layers.latent_attention import LatentAttention
from sglang_lite.models.decoder_loader import LayerLoader
from sglang_lite.models.deepseek_config import details_of
from sglang_lite.models.dense import DenseDecoder, LayerBlocks, build_decoder
from sglang_lite.models.dense_names import layer_prefix
from sglang_lite.models.latent_loader import load_indexer, load_latent_attention
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.moe_loader import load_sparse_mlp
from sglang_lite.models.weight_reader import WeightReader


def build(description: ModelDescription, reader: WeightReader, ops: Operations, num_positions: int) -> DenseDecoder:
    """Read the weights and hand the matrices to the device's packing; see ``models.dense.build``."""
    return build_decoder(description, reader, ops, num_positions, layer_blocks(description))


def layer_blocks(description: ModelDescription) -> LayerBlocks:
    """What loads the blocks of the layers, which it is asked for in their order."""
    return _Blocks(description)


class _Blocks:
    """Loads the blocks of the layers, in their order: a layer without an indexer uses the last one before it."""

    def __init__(self, description: ModelDescription) -> None:
        self._latent = details_of(description).latent
        self._moe = details_of(description).moe
        self._shared: RememberingIndexer | None = None

    def __call__(self, loader: LayerLoader, layer: int) -> tuple[LatentAttention, FeedForward]:
        """Attention and feed-forward block of a layer."""
        attention = load_latent_attention(
            loader.reader,
            loader.linears,
            loader.ops,
            layer_prefix(layer),
            self._latent,
            num_heads=loader.description.num_heads,
            norm_eps=loader.description.rms_norm_eps,
            pool_layer=layer,
            indexer=self._indexer(loader, layer),
        )
        if self._moe is None or not self._moe.sparse_layers[layer]:
            return attention, loader.dense_mlp(layer)
        hidden_size = loader.description.hidden_size
        return attention, load_sparse_mlp(
            loader.reader, loader.linears, loader.ops, layer_prefix(layer), hidden_size, self._moe
        )

    def _indexer(self, loader: LayerLoader, layer: int) -> KeyIndexer | None:
        index = self._latent.indexer
        if index is None:
            return None
        if self._shared is not None and not index.owners[layer]:
            return SharedIndexer(self._shared)
        indexer = load_indexer(loader.reader, loader.linears, loader.ops, layer_prefix(layer), self._latent)
        is_shared = not all(index.owners[layer + 1 : layer + 2])
        self._shared = RememberingIndexer(indexer) if is_shared else None
        return self._shared or indexer
