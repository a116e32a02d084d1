"""Writes quantized checkpoints, each beside a plain one that holds the values it stands for.

A packer chooses stored integers and scales, computes the values from these in NumPy, and only then packs the integers
into the format's words; nothing here unpacks. So a loader that reads the packed form as the plain values is right.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

AWQ_NIBBLE_TO_OUTPUT = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix in a format: tensors by what comes behind the module's name, and the values they stand for."""

    tensors: Mapping[str, Tensor]
    values: Floats


@dataclass(frozen=True, slots=True)
class Format:
    """A storage format: what config.json says of it and how a matrix [out, in] is packed."""

    config: Mapping[str, Any]
    pack: Callable[[Floats], Packed]
    key: str = field(default="quantization_config")


def e4m3_table() -> Floats:
    """Value of every byte as float8_e4m3fn; the two that are not numbers are infinite, so that none is nearest."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[(exponent == 15) & (mantissa == 7)] = np.inf
    return np.where(byte >> 7, -magnitude, magnitude).astype(np.float32)


def nearest_fp8(values: Floats) -> tuple[npt.NDArray[np.uint8], Floats]:
    """(bytes, what they stand for) of the nearest float8_e4m3fn."""
    table = e4m3_table()
    stored = np.abs(values[..., None] - table).argmin(-1).astype(np.uint8)
    return stored, table[stored]


def expanded(scale: Floats, shape: tuple[int, int], block: tuple[int, int]) -> Floats:
    """A scale a block -> a scale a weight."""
    return np.kron(scale, np.ones(block, np.float32))[: shape[0], : shape[1]].astype(np.float32)


def pack_fp8(weight: Floats, scale: Floats, per_weight: Floats, suffix: str, extra: dict[str, Tensor]) -> Packed:
    stored, values = nearest_fp8(weight / per_weight)
    tensors = {
        "weight": torch.from_numpy(stored).view(torch.float8_e4m3fn),
        f"weight{suffix}": torch.from_numpy(scale),
        **extra,
    }
    return Packed(tensors, values * per_weight)


def fp8_blocks(weight: Floats, block: tuple[int, int], suffix: str = "_scale_inv") -> Packed:
    rows, columns = (-(-extent // side) for extent, side in zip(weight.shape, block, strict=True))
    scale = np.empty((rows, columns), np.float32)
    for row in range(rows):
        for column in range(columns):
            part = weight[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
            scale[row, column] = np.abs(part).max() / 448
    return pack_fp8(weight, scale, expanded(scale, (weight.shape[0], weight.shape[1]), block), suffix, {})


def fp8_tensor(weight: Floats, *, static: bool = False, shape: tuple[int, ...] = ()) -> Packed:
    scale = np.float32(np.abs(weight).max() / 448)
    extra = {"input_scale": torch.tensor(0.5)} if static else {}
    return pack_fp8(weight, np.full(shape, scale, np.float32), np.full_like(weight, scale), "_scale", extra)


def fp8_channel(weight: Floats) -> Packed:
    scale = (np.abs(weight).max(1, keepdims=True) / 448).astype(np.float32)
    return pack_fp8(weight, scale, np.broadcast_to(scale, weight.shape), "_scale", {})


def int8_channel(weight: Floats) -> Packed:
    scale = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
    stored = np.rint(weight / scale).astype(np.int8)
    return Packed({"weight": torch.from_numpy(stored), "weight_scale": torch.from_numpy(scale)}, stored * scale)


def to_words(values: Array, axis: int, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unsigned values packed along an axis into int32 words, the first (or ``order``'s first) in the lowest bits."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    grouped = (
        np.moveaxis(values, axis, -1).astype(np.uint64).reshape(*np.moveaxis(values, axis, -1).shape[:-1], -1, per_word)
    )
    words = np.zeros(grouped.shape[:-1], np.uint64)
    for position, source in enumerate(order):
        words |= grouped[..., source] << np.uint64(bits * position)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)))


def grouped_integers(
    weight: Floats, group_index: Array, bits: int, lowest_zero: int = 0
) -> tuple[Array, Array, Floats, Floats]:
    """Quantize [out, in] with a zero and a half-precision scale for each output and group of inputs.

    Returns:
        stored [out, in], zeros [out, groups], scales [out, groups], values [out, in].
    """
    num_groups, most = int(group_index.max()) + 1, (1 << bits) - 1
    zeros = np.empty((weight.shape[0], num_groups), np.int64)
    scales = np.empty((weight.shape[0], num_groups), np.float32)
    for group in range(num_groups):
        members = weight[:, group_index == group]
        low, high = np.minimum(members.min(1), -1e-3), np.maximum(members.max(1), 1e-3)
        scales[:, group] = ((high - low) / most).astype(np.float16)
        zeros[:, group] = np.clip(np.rint(-low / scales[:, group]), lowest_zero, most)
    per_zero, per_scale = zeros[:, group_index], scales[:, group_index]
    stored = np.clip(np.rint(weight / per_scale) + per_zero, 0, most).astype(np.int64)
    return stored, zeros, scales, ((stored - per_zero) * per_scale).astype(np.float32)


def half(values: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).half()


def neighbours(inputs: int, group_size: int | None) -> Array:
    return np.arange(inputs) // (group_size or inputs)


def scattered(inputs: int, group_size: int) -> Array:
    """As activation order leaves them: groups of equal size, their members anywhere."""
    return np.random.default_rng(inputs).permutation(inputs) // group_size


def awq(weight: Floats, group_size: int) -> Packed:
    stored, zeros, scales, values = grouped_integers(weight, neighbours(weight.shape[1], group_size), 4)
    return Packed(
        {
            "qweight": to_words(stored.T, 1, 4, AWQ_NIBBLE_TO_OUTPUT),
            "qzeros": to_words(zeros.T, 1, 4, AWQ_NIBBLE_TO_OUTPUT),
            "scales": half(scales.T),
        },
        values,
    )


def gptq(weight: Floats, group_size: int | None, *, bits: int = 4, offset: int = 1, reordered: bool = False) -> Packed:
    inputs = weight.shape[1]
    group_index = scattered(inputs, group_size or inputs) if reordered else neighbours(inputs, group_size)
    stored, zeros, scales, values = grouped_integers(weight, group_index, bits, lowest_zero=offset)
    tensors = {
        "qweight": to_words(stored.T, 0, bits),
        "qzeros": to_words(zeros.T - offset, 1, bits),
        "scales": half(scales.T),
    }
    if reordered:
        tensors["g_idx"] = torch.from_numpy(group_index).int()
    return Packed(tensors, values)


def packed_integers(
    weight: Floats, group_size: int | None, *, bits: int = 4, symmetric: bool = True, reordered: bool = False
) -> Packed:
    inputs = weight.shape[1]
    group_index = scattered(inputs, group_size or inputs) if reordered else neighbours(inputs, group_size)
    if symmetric:
        middle = 1 << (bits - 1)
        num_groups = int(group_index.max()) + 1
        extents = [np.abs(weight[:, group_index == group]).max(1) for group in range(num_groups)]
        scales = (np.stack(extents, 1) / (middle - 1)).astype(np.float16).astype(np.float32)
        signed = np.clip(np.rint(weight / scales[:, group_index]), -middle, middle - 1)
        stored, values = (signed + middle).astype(np.int64), (signed * scales[:, group_index]).astype(np.float32)
    else:
        stored, zeros, scales, values = grouped_integers(weight, group_index, bits)
    tensors = {
        "weight_packed": to_words(stored, 1, bits),
        "weight_scale": half(scales),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = to_words(zeros, 0, bits)
    if reordered:
        tensors["weight_g_idx"] = torch.from_numpy(group_index).int()
    return Packed(tensors, values)


def mxfp4(experts: Floats) -> tuple[Tensor, Tensor, Floats]:
    """[E, out, in] -> (blocks, scales, values)."""
    blocks = experts.reshape(*experts.shape[:-1], -1, 32)
    largest = np.abs(blocks).max(-1)
    exponents = np.clip(np.floor(np.log2(np.maximum(largest, 1e-30))) - 2, -127, 127)
    unit = (2.0**exponents)[..., None]
    nibbles = np.abs(np.abs(blocks / unit)[..., None] - E2M1).argmin(-1)
    values = np.where(blocks < 0, -E2M1[nibbles], E2M1[nibbles]) * unit
    nibbles = nibbles + 8 * (blocks < 0)
    stored = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).astype(np.uint8)
    return (
        torch.from_numpy(stored),
        torch.from_numpy((exponents + 127).astype(np.uint8)),
        values.reshape(experts.shape).astype(np.float32),
    )


def compressed(layout: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def _float8(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}


def _int(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, "dynamic": False, **more}


def _gptq(bits: int = 4, group_size: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": False, "sym": True, **more}


FORMATS: dict[str, Format] = {
    "fp8_blocks_128": Format(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        lambda weight: fp8_blocks(weight, (128, 128)),
    ),
    "fp8_blocks_uneven": Format(
        {"quant_method": "fp8", "weight_block_size": [48, 40], "modules_to_not_convert": ["lm_head"]},
        lambda weight: fp8_blocks(weight, (48, 40)),
    ),
    "fp8_tensor": Format({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_tensor),
    "fp8_tensor_static": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        lambda weight: fp8_tensor(weight, static=True),
    ),
    "compressed_fp8_channel": Format(
        compressed("float-quantized", _float8("channel"), {"dynamic": True, "strategy": "token"}), fp8_channel
    ),
    "compressed_fp8_tensor": Format(
        compressed("float-quantized", _float8("tensor"), {"dynamic": False, "strategy": "tensor"}),
        lambda weight: fp8_tensor(weight, static=True, shape=(1,)),
        key="compression_config",
    ),
    "compressed_fp8_blocks": Format(
        compressed("float-quantized", _float8("block", block_structure=[64, 32])),
        lambda weight: fp8_blocks(weight, (64, 32), "_scale"),
    ),
    "compressed_int8": Format(compressed("int-quantized", _int(8, "channel")), int8_channel),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        lambda weight: awq(weight, 32),
    ),
    "gptq": Format(_gptq(), lambda weight: gptq(weight, 32)),
    "gptq_one_group": Format(_gptq(group_size=-1), lambda weight: gptq(weight, None)),
    "gptq_v2": Format(_gptq(checkpoint_format="gptq_v2", sym=False), lambda weight: gptq(weight, 32, offset=0)),
    "gptq_8_bits": Format(_gptq(bits=8, sym=False), lambda weight: gptq(weight, 32, bits=8)),
    "gptq_reordered": Format(_gptq(desc_act=True), lambda weight: gptq(weight, 32, reordered=True)),
    "compressed_int4_32": Format(
        compressed("pack-quantized", _int(4, "group", group_size=32)), lambda weight: packed_integers(weight, 32)
    ),
    "compressed_int4_128": Format(
        compressed("pack-quantized", _int(4, "group", group_size=128)), lambda weight: packed_integers(weight, 128)
    ),
    "compressed_int4_channel": Format(
        compressed("pack-quantized", _int(4, "channel")), lambda weight: packed_integers(weight, None)
    ),
    "compressed_int4_zeros": Format(
        compressed("pack-quantized", _int(4, "group", group_size=32) | {"symmetric": False}),
        lambda weight: packed_integers(weight, 32, symmetric=False),
    ),
    "compressed_int4_reordered": Format(
        compressed("pack-quantized", _int(4, "group", group_size=32, actorder="group")),
        lambda weight: packed_integers(weight, 32, reordered=True),
    ),
    "compressed_int8_packed": Format(
        compressed("pack-quantized", _int(8, "group", group_size=32)),
        lambda weight: packed_integers(weight, 32, bits=8),
    ),
}


def quantize_checkpoint(
    source: Path, packed: Path, plain: Path, storage: Format, applies: Callable[[str], bool] | None = None
) -> None:
    """Write the matrices of a plain checkpoint in a format, and what they stand for as a plain checkpoint.

    Args:
        source: holds config.json and model.safetensors.
        packed, plain: directories to make.
        applies: which tensors become quantized; default: every projection of a layer.
    """
    quantized: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not (applies or is_projection)(name):
            quantized[name] = values[name] = tensor
            continue
        result = storage.pack(tensor.float().numpy())
        stem = name.removesuffix("weight")
        quantized.update({stem + part: stored.clone() for part, stored in result.tensors.items()})
        values[name] = torch.from_numpy(np.ascontiguousarray(result.values))
    config = json.loads((source / "config.json").read_text())
    write_checkpoint(plain, config, values)
    write_checkpoint(packed, {**config, storage.key: dict(storage.config)}, quantized)


def write_checkpoint(directory: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """config.json and one model.safetensors."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")
