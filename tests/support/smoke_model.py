"""F1: a three-word Qwen3 checkpoint that answers ``world`` to ``hi``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = {"[UNK]": 0, "hi": 1, "world": 2}
EOS = 2

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 3,
    "num_hidden_layers": 1,
    "hidden_size": 2,
    "intermediate_size": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}


def build_smoke_model(directory: Path) -> Path:
    """Write the checkpoint and its word tokenizer into ``directory`` (made when absent) and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2), encoding="utf-8")
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    save_file(tensors(), str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def tensors() -> dict[str, np.ndarray]:
    """All projections zero, all norms one: the answer follows from embedding and output matrix alone."""
    ones, zeros = np.ones(2, np.float32), np.zeros((2, 2), np.float32)
    layer = "model.layers.0"
    result = {
        "model.embed_tokens.weight": np.array([[0, 0], [1, 0], [0, 1]], np.float32),
        "model.norm.weight": ones,
        "lm_head.weight": np.array([[0, 0], [0, 1], [1, 0]], np.float32),
    }
    for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
        result[f"{layer}.{norm}.weight"] = ones.copy()
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
        result[f"{layer}.self_attn.{projection}.weight"] = zeros.copy()
    for projection in ("gate_proj", "up_proj", "down_proj"):
        result[f"{layer}.mlp.{projection}.weight"] = zeros.copy()
    return result
