"""A GGUF file of the Llama architecture as a Hugging Face directory: float32 safetensors, config, tokenizer.

Tensors are dequantized by the ``gguf`` package. The rows of the query and key projections, which GGUF keeps in
interleaved-rope order, are put back into the two halves that a "rotate half" rope expects.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gguf import GGUFReader

Float32Array = npt.NDArray[np.float32]
Report = Callable[[int, int], None]
"""Called with (elements converted, elements in all)."""

WEIGHTS_NAME = "model.safetensors"

_CONTROL_TOKEN = 3
_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class ConversionError(Exception):
    """The GGUF file is not one that can be converted; the message names the tensor or key."""


def convert(source: Path, directory: Path, report: Report) -> None:
    """Write config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json.

    Args:
        source: the GGUF file.
        directory: exists and is empty.
        report: told about progress, tensor by tensor.

    Raises:
        ConversionError: not a Llama file, or a tensor of an unknown name.
        ImportError: the ``gguf`` package is not installed.
    """
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(str(source))
    architecture = _value(reader, "general.architecture")
    if architecture != "llama":
        raise ConversionError(f"{source}: general.architecture is {architecture!r}, only 'llama' can be converted")
    tensors = _read_tensors(reader, report)
    _write_json(directory / "config.json", _model_config(reader, tied="lm_head.weight" not in tensors))
    _write_json(directory / "generation_config.json", _special_ids(reader))
    _write_tokenizer(reader, directory)
    save_file(tensors, str(directory / WEIGHTS_NAME), metadata={"format": "pt"})


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``.

    Raises:
        ConversionError: no Llama tensor has that name.
    """
    match name.split("."):
        case ["blk", layer, kind, "weight"] if kind in _LAYER_NAMES and layer.isdigit():
            return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"
        case [kind, "weight"] if kind in _GLOBAL_NAMES:
            return f"{_GLOBAL_NAMES[kind]}.weight"
    raise ConversionError(f"unexpected tensor {name!r} in the GGUF file")


def unpermute(weight: Float32Array, num_heads: int) -> Float32Array:
    """Rows of [num_heads * head_dim, in] from interleaved pairs to two halves per head."""
    rows, width = weight.shape
    half = rows // num_heads // 2
    return np.ascontiguousarray(weight.reshape(num_heads, half, 2, width).swapaxes(1, 2).reshape(rows, width))


def _read_tensors(reader: GGUFReader, report: Report) -> dict[str, Float32Array]:
    from gguf.quants import dequantize

    heads = {
        "attn_q": int(_value(reader, "llama.attention.head_count")),
        "attn_k": int(_value(reader, "llama.attention.head_count_kv")),
    }
    total = sum(int(tensor.n_elements) for tensor in reader.tensors)
    done = 0
    result: dict[str, Float32Array] = {}
    for tensor in reader.tensors:
        # GGUF lists extents innermost first.
        shape = tuple(int(extent) for extent in reversed(tensor.shape))
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(shape)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = unpermute(weight, heads[kind])
        result[hugging_face_name(tensor.name)] = np.ascontiguousarray(weight)
        done += int(tensor.n_elements)
        report(done, total)
    return result


def _value(reader: GGUFReader, key: str) -> Any:
    field = reader.fields.get(key)
    if field is None:
        raise ConversionError(f"the GGUF file has no {key!r}")
    return field.contents()


def _shortest(value: float) -> float:
    """A number stored as float32, written with the digits it was given (1e-5, not 9.99999974e-06)."""
    return float(str(np.float32(value)))


def _special_ids(reader: GGUFReader) -> dict[str, int]:
    return {
        "bos_token_id": int(_value(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_value(reader, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(_value(reader, "tokenizer.ggml.padding_token_id")),
    }


def _model_config(reader: GGUFReader, *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": int(_value(reader, "llama.embedding_length")),
        "intermediate_size": int(_value(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(_value(reader, "llama.block_count")),
        "num_attention_heads": int(_value(reader, "llama.attention.head_count")),
        "num_key_value_heads": int(_value(reader, "llama.attention.head_count_kv")),
        "head_dim": int(_value(reader, "llama.rope.dimension_count")),
        "vocab_size": int(_value(reader, "llama.vocab_size")),
        "max_position_embeddings": int(_value(reader, "llama.context_length")),
        "rope_theta": _shortest(_value(reader, "llama.rope.freq_base")),
        "rms_norm_eps": _shortest(_value(reader, "llama.attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **_special_ids(reader),
    }


def _write_tokenizer(reader: GGUFReader, directory: Path) -> None:
    """A byte-level BPE tokenizer whose control tokens are special added tokens, and the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = _value(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = _value(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [(index, tokens[index]) for index, kind in enumerate(kinds) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for _, token in control])
    tokenizer.save(str(directory / "tokenizer.json"))
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    special = _special_ids(reader)
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": int(_value(reader, "llama.context_length")),
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
            "bos_token": tokens[special["bos_token_id"]],
            "eos_token": tokens[special["eos_token_id"]],
            "pad_token": tokens[special["pad_token_id"]],
            "unk_token": tokens[int(_value(reader, "tokenizer.ggml.unknown_token_id"))],
            "added_tokens_decoder": {str(index): {"content": token, **flags} for index, token in control},
            "chat_template": _value(reader, "tokenizer.chat_template"),
        },
    )


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
