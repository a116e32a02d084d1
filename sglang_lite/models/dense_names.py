"""Names and shapes of the checkpoint tensors of a decoder. Free of torch."""

from __future__ import annotations

from collections.abc import Callable

from sglang_lite.models.model_description import ModelDescription

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

Shapes = dict[str, tuple[int, ...]]


def layer_prefix(layer: int) -> str:
    """Prefix of the tensors of a decoder layer."""
    return f"model.layers.{layer}."


def expected_tensors(description: ModelDescription) -> Shapes:
    """name -> shape of every tensor that a decoder without experts reads, in reading order."""
    return decoder_tensors(description, lambda layer: attention_tensors(description) | mlp_tensors(description))


def decoder_tensors(description: ModelDescription, blocks: Callable[[int], Shapes]) -> Shapes:
    """Embedding, norms and output matrix of a decoder around the tensors of its layers.

    Args:
        blocks: layer -> name -> shape of what it has besides ``input_layernorm`` and ``post_attention_layernorm``,
            behind the layer's prefix.
    """
    hidden = description.hidden_size
    shapes: Shapes = {EMBEDDING: (description.vocab_size, hidden)}
    for layer in range(description.num_layers):
        norms: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        shapes.update({layer_prefix(layer) + name: shape for name, shape in (norms | blocks(layer)).items()})
    shapes[FINAL_NORM] = (hidden,)
    if not description.tie_word_embeddings:
        shapes[LM_HEAD] = (description.vocab_size, hidden)
    return shapes


def attention_tensors(description: ModelDescription) -> Shapes:
    """``self_attn`` of a layer with grouped key/value heads, behind the layer's prefix."""
    hidden, head_dim = description.hidden_size, description.head_dim
    query, key_value = description.num_heads * head_dim, description.num_kv_heads * head_dim
    shapes: Shapes = {}
    _add_projection(shapes, "self_attn.q_proj", query, hidden, has_bias=description.qkv_bias)
    _add_projection(shapes, "self_attn.k_proj", key_value, hidden, has_bias=description.qkv_bias)
    _add_projection(shapes, "self_attn.v_proj", key_value, hidden, has_bias=description.qkv_bias)
    _add_projection(shapes, "self_attn.o_proj", hidden, query, has_bias=description.output_bias)
    if description.query_key_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (head_dim,)
    return shapes


def mlp_tensors(description: ModelDescription) -> Shapes:
    """``mlp`` of a layer without experts, behind the layer's prefix."""
    hidden, intermediate, has_bias = description.hidden_size, description.intermediate_size, description.mlp_bias
    shapes: Shapes = {}
    _add_projection(shapes, "mlp.gate_proj", intermediate, hidden, has_bias=has_bias)
    _add_projection(shapes, "mlp.up_proj", intermediate, hidden, has_bias=has_bias)
    _add_projection(shapes, "mlp.down_proj", hidden, intermediate, has_bias=has_bias)
    return shapes


def _add_projection(shapes: Shapes, name: str, rows: int, columns: int, *, has_bias: bool) -> None:
    shapes[f"{name}.weight"] = (rows, columns)
    if has_bias:
        shapes[f"{name}.bias"] = (rows,)
