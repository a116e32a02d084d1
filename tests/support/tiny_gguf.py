"""A small GGUF file of the Llama architecture with the tensor types and metadata of the demo model's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from tests.support.chain_model import byte_characters

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS = 64, 4, 2, 16, 96, 2
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

Tensors = dict[str, np.ndarray]


def write_tiny_gguf(path: Path, *, architecture: str = "llama", extra_tensor: str | None = None) -> Tensors:
    """Write the file; returns the float32 tensors by GGUF name, before quantization, rows as the file orders them."""
    writer = GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = [*CONTROL, *byte_characters(), "he"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    tensors = _tensors(len(tokens))
    if extra_tensor is not None:
        tensors[extra_tensor] = np.ones(HIDDEN, np.float32)
    for name, tensor in tensors.items():
        kind = _kind(name, tensor)
        data = tensor if kind is GGMLQuantizationType.F32 else quantize(tensor, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _kind(name: str, tensor: np.ndarray) -> GGMLQuantizationType:
    if tensor.ndim == 1:
        return GGMLQuantizationType.F32
    return GGMLQuantizationType.Q8_0 if name.startswith("token_embd") else GGMLQuantizationType.Q4_1


def _tensors(vocabulary_size: int) -> Tensors:
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocabulary_size, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"blk.{layer}"
        shapes |= {
            f"{prefix}.attn_norm.weight": (HIDDEN,),
            f"{prefix}.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.ffn_norm.weight": (HIDDEN,),
            f"{prefix}.ffn_gate.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.ffn_up.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.ffn_down.weight": (HIDDEN, INTERMEDIATE),
        }
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
