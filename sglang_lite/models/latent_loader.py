"""From a checkpoint to a layer of latent attention on the device."""

from __future__ import annotations

from sglang_lite.adapters.base import Operations
from sglang_lite.layers.key_indexer import Indexer, IndexerShape, KeyIndexer
from sglang_lite.layers.latent_attention import CompressedQuery, DirectQuery, LatentAttention, LatentShape
from sglang_lite.models.latent_config import (
    INDEXER,
    LATENT_DOWN,
    LATENT_NORM,
    LATENT_UP,
    OUTPUT,
    QUERY,
    QUERY_DOWN,
    QUERY_NORM,
    QUERY_UP,
    LatentDescription,
)
from sglang_lite.models.linear_loader import LinearLoader
from sglang_lite.models.weight_reader import Shard, WeightReader


def load_latent_attention(
    reader: WeightReader,
    linears: LinearLoader,
    ops: Operations,
    prefix: str,
    latent: LatentDescription,
    *,
    num_heads: int,
    norm_eps: float,
    pool_layer: int,
    indexer: KeyIndexer | None = None,
) -> LatentAttention:
    """The attention of one layer. Heads are split over the ranks; latent rows are whole on every rank.

    Args:
        prefix: of the layer's tensors.
        num_heads: query heads of this rank.
        pool_layer: index of this layer among those with KV.
    """
    shape = LatentShape(
        num_heads=num_heads,
        latent_dim=latent.latent_dim,
        nope_dim=latent.nope_dim,
        rope_dim=latent.rope_dim,
        scale=latent.scale,
        rotates=latent.rotates,
        is_interleaved=latent.is_interleaved,
    )
    group = reader.parallel
    shard = Shard(0, group.rank, group.size) if group.size > 1 else None
    output_bias = f"{prefix}{OUTPUT}.bias" if latent.has_bias else None
    return LatentAttention(
        ops,
        shape,
        pool_layer,
        _load_queries(reader, linears, ops, prefix, latent, norm_eps),
        ops.latent.pack_projection(reader.read_merged([prefix + LATENT_UP], shard), num_heads, latent.nope_dim),
        linears.row(f"{prefix}{OUTPUT}.weight", bias_name=output_bias),
        latent_norm=reader.read(prefix + LATENT_NORM),
        norm_eps=norm_eps,
        indexer=indexer,
    )


def _load_queries(
    reader: WeightReader,
    linears: LinearLoader,
    ops: Operations,
    prefix: str,
    latent: LatentDescription,
    norm_eps: float,
) -> DirectQuery | CompressedQuery:
    names = [LATENT_DOWN] if latent.query_rank is None else [QUERY_DOWN, LATENT_DOWN]
    biases = [f"{prefix}{name}.bias" for name in names] if latent.has_bias else None
    down = linears.replicated([f"{prefix}{name}.weight" for name in names], bias_names=biases)
    if latent.query_rank is None:
        return DirectQuery(linears.column([f"{prefix}{QUERY}.weight"]), down)
    up = linears.column([f"{prefix}{QUERY_UP}.weight"])
    return CompressedQuery(ops, down, reader.read(prefix + QUERY_NORM), up, norm_eps)


def load_indexer(
    reader: WeightReader, linears: LinearLoader, ops: Operations, prefix: str, latent: LatentDescription
) -> Indexer:
    """The indexer of one layer, whole on every rank: all of them must choose the same keys."""
    index = latent.indexer
    if index is None:
        raise ValueError("the model has no indexer")
    prefix += INDEXER
    return Indexer(
        ops,
        IndexerShape(
            num_heads=index.num_heads,
            head_dim=index.head_dim,
            rope_dim=latent.rope_dim,
            top_k=index.top_k,
            is_interleaved=index.is_interleaved,
        ),
        linears.replicated([f"{prefix}wq_b.weight"]),
        linears.replicated([f"{prefix}wk.weight"]),
        linears.replicated([f"{prefix}weights_proj.weight"]),
        key_norm_weight=reader.read(f"{prefix}k_norm.weight"),
        key_norm_bias=reader.read(f"{prefix}k_norm.bias"),
    )
