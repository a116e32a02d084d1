"""F2: a Qwen3 checkpoint whose greedy next token is a fixed function of the last token.

Token ids 0..255 are the bytes, 256 is ``XX``, then bos, eos, pad. Chains: ``A`` -> BCDABCDA... without end,
``a`` -> the bytes of "é🙂!" and eos, ``p`` -> q XX r s t eos, ``0`` -> 1..9 eos, ``G`` -> g eos, anything else -> eos.
After every token the successor has logit 5.6554, the second choice 4.5243, the third 3.3932, all others 0.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCABULARY_SIZE = 260
DOUBLE_X, BOS, EOS, PAD = 256, 257, 258, 259
CONTEXT_LENGTH = 1024
HIDDEN_SIZE = 512
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INTERMEDIATE_SIZE = 4, 2, 64, 128
SECOND, SECOND_OF_TILDE, THIRD = ord("~"), ord("|"), ord("^")
SUCCESSOR_LOGPROB, SECOND_LOGPROB, THIRD_LOGPROB, OTHER_LOGPROB = -0.84412, -1.97520, -3.10629, -6.49953

SMILE = "é🙂!"

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY_SIZE,
    "num_hidden_layers": 1,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": INTERMEDIATE_SIZE,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": CONTEXT_LENGTH,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "torch_dtype": "float32",
}

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':' + message['content'] }}"
    "{% if not loop.last %}|{% endif %}{% endfor %}"
)


def successors(overrides: dict[int, int] | None = None) -> np.ndarray:
    """int64[260]: the greedy next token after every token. ``overrides`` changes single entries."""
    result = np.full(VOCABULARY_SIZE, EOS, np.int64)
    chains: list[list[int]] = [
        [*b"ABCDA"],
        [*b"a", *SMILE.encode(), EOS],
        [*b"pq", DOUBLE_X, *b"rst", EOS],
        [*b"0123456789", EOS],
        [*b"Gg", EOS],
    ]
    for chain in chains:
        for token, following in itertools.pairwise(chain):
            result[token] = following
    for token, following in (overrides or {}).items():
        result[token] = following
    return result


def build_chain_model(
    directory: Path, *, overrides: dict[int, int] | None = None, context_length: int = CONTEXT_LENGTH
) -> Path:
    """Write the checkpoint and its byte tokenizer into ``directory`` (made when absent) and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, "max_position_embeddings": context_length}
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    _write_tokenizer(directory)
    save_file(_tensors(successors(overrides)), str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def _tensors(following: np.ndarray) -> dict[str, np.ndarray]:
    tokens = np.arange(VOCABULARY_SIZE)
    embedding = np.zeros((VOCABULARY_SIZE, HIDDEN_SIZE), np.float32)
    embedding[tokens, tokens] = 1
    output = np.zeros((VOCABULARY_SIZE, HIDDEN_SIZE), np.float32)
    output[THIRD, tokens] = 0.6
    output[np.where(following == SECOND, SECOND_OF_TILDE, SECOND), tokens] = 0.8
    output[following, tokens] = 1
    layer = "model.layers.0"
    result = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.full(HIDDEN_SIZE, 0.25, np.float32),
        "lm_head.weight": output,
    }
    for norm, size in (
        ("input_layernorm", HIDDEN_SIZE),
        ("post_attention_layernorm", HIDDEN_SIZE),
        ("self_attn.q_norm", HEAD_DIM),
        ("self_attn.k_norm", HEAD_DIM),
    ):
        result[f"{layer}.{norm}.weight"] = np.ones(size, np.float32)
    for projection, rows, columns in (
        ("self_attn.q_proj", NUM_HEADS * HEAD_DIM, HIDDEN_SIZE),
        ("self_attn.k_proj", NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
        ("self_attn.v_proj", NUM_KV_HEADS * HEAD_DIM, HIDDEN_SIZE),
        ("self_attn.o_proj", HIDDEN_SIZE, NUM_HEADS * HEAD_DIM),
        ("mlp.gate_proj", INTERMEDIATE_SIZE, HIDDEN_SIZE),
        ("mlp.up_proj", INTERMEDIATE_SIZE, HIDDEN_SIZE),
        ("mlp.down_proj", HIDDEN_SIZE, INTERMEDIATE_SIZE),
    ):
        result[f"{layer}.{projection}.weight"] = np.zeros((rows, columns), np.float32)
    return result


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary, in byte order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    characters, substitutes = [], 0
    for byte in range(256):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + substitutes))
            substitutes += 1
    return characters


def _write_tokenizer(directory: Path) -> None:
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    vocabulary["XX"] = DOUBLE_X
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("X", "X")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {BOS: "<|bos|>", EOS: "<|eos|>", PAD: "<|pad|>"}
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special.values()])
    tokenizer.save(str(directory / "tokenizer.json"))
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    document = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
        "bos_token": special[BOS],
        "eos_token": special[EOS],
        "pad_token": special[PAD],
        "added_tokens_decoder": {str(index): {"content": text, **flags} for index, text in special.items()},
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(document, indent=2), encoding="utf-8")
