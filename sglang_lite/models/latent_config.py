"""Latent attention (MLA): what config.json says of it, its tensors' names and shapes, its row in the KV pool.

Free of torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_lite.models.config_files import ConfigReader
from sglang_lite.models.dense_names import Shapes
from sglang_lite.models.model_description import KVDescription
from sglang_lite.models.rope_config import yarn_score_magnitude
from sglang_lite.types import StartupError

QUERY = "self_attn.q_proj"
QUERY_DOWN = "self_attn.q_a_proj"
QUERY_NORM = "self_attn.q_a_layernorm.weight"
QUERY_UP = "self_attn.q_b_proj"
LATENT_DOWN = "self_attn.kv_a_proj_with_mqa"
LATENT_NORM = "self_attn.kv_a_layernorm.weight"
LATENT_UP = "self_attn.kv_b_proj.weight"
OUTPUT = "self_attn.o_proj"
INDEXER = "self_attn.indexer."


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerDescription:
    """How layers choose the keys that a query attends to.

    Attributes:
        num_heads, head_dim: of the index queries; one index key of ``head_dim`` per token.
        top_k: keys a query keeps.
        is_interleaved: index queries and keys rotate neighbouring pairs; else pairs half the rotary width apart.
        owners: per layer, whether it has an indexer; the others keep what the layer before them chose.
    """

    num_heads: int
    head_dim: int
    top_k: int
    is_interleaved: bool
    owners: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentDescription:
    """Extents of latent attention.

    Attributes:
        query_rank: width that queries are compressed to; None when they are projected at once.
        latent_dim: width of the latent that keys and values are made of (kv_lora_rank).
        nope_dim, rope_dim: widths of a query head without and with rotary embedding.
        value_dim: width of a head's value.
        scale: multiplies the scores.
        rotates: whether the rotary parts are rotated at all.
        is_interleaved: rotary pairs are neighbours; else half the rotary width apart.
        has_bias: the down projections and the output projection carry a bias.
        indexer: how keys are chosen; None when every query sees all of its past.
    """

    query_rank: int | None
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    rotates: bool = True
    is_interleaved: bool = True
    has_bias: bool = False
    indexer: IndexerDescription | None = None

    @property
    def row_width(self) -> int:
        """Elements that a token leaves in a layer's pool."""
        index = 0 if self.indexer is None else self.indexer.head_dim
        return self.latent_dim + self.rope_dim + index

    def kv(self, num_layers: int) -> KVDescription:
        """The pool of ``num_layers`` such layers."""
        return KVDescription(
            num_layers=num_layers,
            num_kv_heads=1,
            key_width=self.row_width,
            value_width=self.latent_dim,
            num_tensors=1,
        )


def read_latent(
    config: ConfigReader, *, rotates: bool = True, indexer: IndexerDescription | None = None
) -> LatentDescription:
    """Latent attention of a model.

    Args:
        rotates: False for models without rotary embedding.
        indexer: of models that choose keys.

    Raises:
        StartupError: an extent is absent or wrong.
    """
    nope_dim, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    query_rank = config.optional_integer("q_lora_rank")
    if indexer is not None:
        if query_rank is None:
            raise config.error("q_lora_rank", "a positive integer: index queries are made from compressed queries")
        if indexer.head_dim < rope_dim:
            raise config.error("index_head_dim", f"at least qk_rope_head_dim ({rope_dim})")
    return LatentDescription(
        query_rank=query_rank,
        latent_dim=config.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=config.integer("v_head_dim"),
        scale=(yarn_score_magnitude(config) if rotates else 1.0) / math.sqrt(nope_dim + rope_dim),
        rotates=rotates,
        is_interleaved=config.boolean("rope_interleave", True),
        has_bias=config.boolean("attention_bias", False),
        indexer=indexer,
    )


def read_indexer(config: ConfigReader, num_layers: int, *, is_interleaved: bool) -> IndexerDescription:
    """The indexer of a sparse-attention model.

    Args:
        is_interleaved: how index keys rotate where the configuration does not say.

    Raises:
        StartupError: an extent is absent or wrong, or the first layer has no indexer.
    """
    owners = _indexer_owners(config, num_layers)
    if not owners[0]:
        raise StartupError(f"{config.source}: the first layer has no indexer, so there is no choice of keys to share")
    return IndexerDescription(
        num_heads=config.integer("index_n_heads"),
        head_dim=config.integer("index_head_dim"),
        top_k=config.integer("index_topk"),
        is_interleaved=config.boolean("indexer_rope_interleave", is_interleaved),
        owners=owners,
    )


def _indexer_owners(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Per layer, whether it has an indexer of its own: a list, a pattern, or every n-th layer."""
    kinds = config.values.get("indexer_types")
    pattern = config.values.get("index_topk_pattern")
    for key, value, owner, sharer in (
        ("indexer_types", kinds, "full", "shared"),
        ("index_topk_pattern", pattern if kinds is None else None, "F", "S"),
    ):
        if value is None:
            continue
        is_one_a_layer = isinstance(value, list | str) and len(value) == num_layers
        if not is_one_a_layer or any(entry not in (owner, sharer) for entry in value):
            raise config.error(key, f"{num_layers} entries of {owner!r} and {sharer!r}, one a layer")
        return tuple(entry == owner for entry in value)
    every = config.integer("index_topk_freq", 1)
    offset = config.integer("index_skip_topk_offset", 2)
    return tuple(max(layer - offset + 1, 0) % every == 0 for layer in range(num_layers))


def latent_tensors(hidden_size: int, num_heads: int, latent: LatentDescription, layer: int) -> Shapes:
    """name -> shape of the tensors of a layer's attention, behind the layer's prefix."""
    query_width = num_heads * (latent.nope_dim + latent.rope_dim)
    shapes: Shapes = {}
    if latent.query_rank is None:
        shapes[f"{QUERY}.weight"] = (query_width, hidden_size)
    else:
        shapes |= _projection(QUERY_DOWN, latent.query_rank, hidden_size, has_bias=latent.has_bias)
        shapes[QUERY_NORM] = (latent.query_rank,)
        shapes[f"{QUERY_UP}.weight"] = (query_width, latent.query_rank)
    shapes |= _projection(LATENT_DOWN, latent.latent_dim + latent.rope_dim, hidden_size, has_bias=latent.has_bias)
    shapes[LATENT_NORM] = (latent.latent_dim,)
    shapes[LATENT_UP] = (num_heads * (latent.nope_dim + latent.value_dim), latent.latent_dim)
    shapes |= _projection(OUTPUT, hidden_size, num_heads * latent.value_dim, has_bias=latent.has_bias)
    if latent.indexer is not None and latent.indexer.owners[layer]:
        index = latent.indexer
        assert latent.query_rank is not None  # read_latent saw to it
        shapes[f"{INDEXER}wq_b.weight"] = (index.num_heads * index.head_dim, latent.query_rank)
        shapes[f"{INDEXER}wk.weight"] = (index.head_dim, hidden_size)
        shapes[f"{INDEXER}k_norm.weight"] = (index.head_dim,)
        shapes[f"{INDEXER}k_norm.bias"] = (index.head_dim,)
        shapes[f"{INDEXER}weights_proj.weight"] = (index.num_heads, hidden_size)
    return shapes


def _projection(name: str, out: int, width: int, *, has_bias: bool) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (out, width)}
    if has_bias:
        shapes[f"{name}.bias"] = (out,)
    return shapes
