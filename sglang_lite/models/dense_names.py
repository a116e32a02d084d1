"""Names and shapes of the checkpoint tensors of a dense decoder. Free of torch."""

from __future__ import annotations

from sglang_lite.models.model_description import ModelDescription

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


def layer_prefix(layer: int) -> str:
    """Prefix of the tensors of a decoder layer."""
    return f"model.layers.{layer}."


def expected_tensors(description: ModelDescription) -> dict[str, tuple[int, ...]]:
    """name -> shape of every tensor the model reads, in reading order."""
    hidden = description.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (description.vocab_size, hidden)}
    for layer in range(description.num_layers):
        prefix = layer_prefix(layer)
        shapes.update({prefix + name: shape for name, shape in _layer_tensors(description).items()})
    shapes[FINAL_NORM] = (hidden,)
    if not description.tie_word_embeddings:
        shapes[LM_HEAD] = (description.vocab_size, hidden)
    return shapes


def _layer_tensors(description: ModelDescription) -> dict[str, tuple[int, ...]]:
    hidden, intermediate, head_dim = description.hidden_size, description.intermediate_size, description.head_dim
    query, key_value = description.num_heads * head_dim, description.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    projections = (
        ("self_attn.q_proj", query, hidden, description.qkv_bias),
        ("self_attn.k_proj", key_value, hidden, description.qkv_bias),
        ("self_attn.v_proj", key_value, hidden, description.qkv_bias),
        ("self_attn.o_proj", hidden, query, description.output_bias),
        ("mlp.gate_proj", intermediate, hidden, description.mlp_bias),
        ("mlp.up_proj", intermediate, hidden, description.mlp_bias),
        ("mlp.down_proj", hidden, intermediate, description.mlp_bias),
    )
    for name, rows, columns, has_bias in projections:
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if description.query_key_norm:
        shapes["self_attn.q_norm.weight"] = (head_dim,)
        shapes["self_attn.k_norm.weight"] = (head_dim,)
    return shapes
