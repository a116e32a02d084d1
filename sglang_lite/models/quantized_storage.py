"""The tensors in which a checkpoint stores a quantized matrix: names, shapes, element types. Free of torch.

A family names its tensors as if nothing were quantized. Here each of its matrices is found in a checkpoint as it is
stored: plain, or as the parts of the checkpoint's scheme.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from sglang_lite.models.checkpoint import Checkpoint, TensorRequirement
from sglang_lite.models.family import Shapes
from sglang_lite.models.quantization import (
    WORD_BITS,
    AwqScheme,
    Fp8Scheme,
    GptqScheme,
    Granularity,
    Int8Scheme,
    Mxfp4Scheme,
    PackedIntScheme,
    QuantizationDescription,
    Scheme,
)
from sglang_lite.models.safetensors_header import FLOATING_DTYPES
from sglang_lite.types import StartupError

MXFP4_BLOCK = 32
"""Weights that share an exponent."""

_INT32 = frozenset({"I32"})
_INTEGER = frozenset({"I32", "I64"})
_INT8 = frozenset({"I8"})
_FP8 = frozenset({"F8_E4M3"})
_BYTES = frozenset({"U8"})
_SINGLE_SCALE: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix that a checkpoint holds quantized.

    Attributes:
        name: as the family names it.
        shape: of the matrix it stands for.
        scheme: how to read the parts.
        parts: role ("weight", "scale", ...) -> tensor name.
    """

    name: str
    shape: tuple[int, ...]
    scheme: Scheme
    parts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """Where a family's tensors are in a checkpoint.

    Attributes:
        required: tensor name -> what it must look like, in reading order.
        quantized: the family's name -> its parts, for the matrices that are stored quantized.
    """

    required: Mapping[str, TensorRequirement]
    quantized: Mapping[str, StoredMatrix]


def find_layout(
    expected: Shapes, checkpoint: Checkpoint, quantization: QuantizationDescription | None
) -> CheckpointLayout:
    """How a checkpoint stores the tensors that a family expects.

    A matrix that is there in a floating-point type is plain, listed as ignored or not: configurations do not list
    embeddings, routers and the like. Only what is neither plain nor listed must be there as parts.

    Raises:
        StartupError: a matrix does not divide into the words or groups of the scheme.
    """
    required: dict[str, TensorRequirement] = {}
    quantized: dict[str, StoredMatrix] = {}
    for name, shape in expected.items():
        entry = checkpoint.tensors.get(name)
        is_plain = entry is not None and entry.dtype in FLOATING_DTYPES
        if quantization is None or is_plain or not _can_be_quantized(name, shape, quantization):
            required[name] = TensorRequirement((shape,))
            continue
        parts = _parts(name, shape, quantization.scheme, checkpoint)
        required.update(dict(parts.values()))
        quantized[name] = StoredMatrix(
            name, shape, quantization.scheme, {role: part for role, (part, _) in parts.items()}
        )
    return CheckpointLayout(required, quantized)


def _can_be_quantized(name: str, shape: tuple[int, ...], quantization: QuantizationDescription) -> bool:
    if isinstance(quantization.scheme, Mxfp4Scheme):
        return len(shape) == 3 and ".experts." in name and not quantization.is_ignored(name)
    is_matrix = len(shape) == 2 and name.endswith(".weight") and "embed_tokens" not in name
    return is_matrix and not quantization.is_ignored(name.removesuffix(".weight"))


_Parts = dict[str, tuple[str, TensorRequirement]]
"""role -> (tensor name, requirement)."""


def _parts(name: str, shape: tuple[int, ...], scheme: Scheme, checkpoint: Checkpoint) -> _Parts:
    match scheme:
        case Fp8Scheme():
            return _fp8_parts(name, shape, scheme)
        case Int8Scheme():
            scales = _scale_shapes(shape, scheme.granularity, None)
            return {
                "weight": (name, TensorRequirement((shape,), _INT8)),
                "scale": (f"{name}_scale", TensorRequirement(scales)),
            }
        case AwqScheme():
            return _awq_parts(name, shape, scheme)
        case GptqScheme():
            return _gptq_parts(name, shape, scheme, checkpoint)
        case PackedIntScheme():
            return _packed_int_parts(name, shape, scheme)
        case Mxfp4Scheme():
            return _mxfp4_parts(name, shape)
        case _:
            assert_never(scheme)


def _fp8_parts(name: str, shape: tuple[int, ...], scheme: Fp8Scheme) -> _Parts:
    parts = {
        "weight": (name, TensorRequirement((shape,), _FP8)),
        "scale": (
            name + scheme.scale_suffix,
            TensorRequirement(_scale_shapes(shape, scheme.granularity, scheme.block)),
        ),
    }
    if scheme.static_activations:
        input_scale = f"{name.removesuffix('.weight')}.input_scale"
        parts["input_scale"] = (input_scale, TensorRequirement(_SINGLE_SCALE))
    return parts


def _scale_shapes(
    shape: tuple[int, ...], granularity: Granularity, block: tuple[int, int] | None
) -> tuple[tuple[int, ...], ...]:
    out, inputs = shape
    match granularity:
        case Granularity.TENSOR:
            return _SINGLE_SCALE
        case Granularity.CHANNEL:
            return ((out, 1), (out,))
        case Granularity.BLOCK:
            rows, columns = block or (1, inputs)
            return ((-(-out // rows), -(-inputs // columns)),)
        case _:
            assert_never(granularity)


def _awq_parts(name: str, shape: tuple[int, ...], scheme: AwqScheme) -> _Parts:
    out, inputs = shape
    stem = name.removesuffix(".weight")
    groups = _groups(name, inputs, scheme.group_size)
    words = _words(name, out, "outputs", 4)
    return {
        "weight": (f"{stem}.qweight", TensorRequirement(((inputs, words),), _INT32)),
        "zeros": (f"{stem}.qzeros", TensorRequirement(((groups, words),), _INT32)),
        "scale": (f"{stem}.scales", TensorRequirement(((groups, out),))),
    }


def _gptq_parts(name: str, shape: tuple[int, ...], scheme: GptqScheme, checkpoint: Checkpoint) -> _Parts:
    out, inputs = shape
    stem = name.removesuffix(".weight")
    groups = _groups(name, inputs, scheme.group_size)
    words = _words(name, inputs, "inputs", scheme.bits)
    zero_words = _words(name, out, "outputs", scheme.bits)
    parts: _Parts = {
        "weight": (f"{stem}.qweight", TensorRequirement(((words, out),), _INT32)),
        "zeros": (f"{stem}.qzeros", TensorRequirement(((groups, zero_words),), _INT32)),
        "scale": (f"{stem}.scales", TensorRequirement(((groups, out),))),
    }
    if scheme.activation_order or f"{stem}.g_idx" in checkpoint.tensors:
        parts["group_index"] = (f"{stem}.g_idx", TensorRequirement(((inputs,),), _INTEGER))
    return parts


def _packed_int_parts(name: str, shape: tuple[int, ...], scheme: PackedIntScheme) -> _Parts:
    out, inputs = shape
    groups = _groups(name, inputs, scheme.group_size)
    words = _words(name, inputs, "inputs", scheme.bits)
    parts: _Parts = {
        "weight": (f"{name}_packed", TensorRequirement(((out, words),), _INT32)),
        "scale": (f"{name}_scale", TensorRequirement(((out, groups),))),
        "shape": (f"{name}_shape", TensorRequirement(((2,),), _INTEGER)),
    }
    if not scheme.symmetric:
        zero_words = _words(name, out, "outputs", scheme.bits)
        parts["zeros"] = (f"{name}_zero_point", TensorRequirement(((zero_words, groups),), _INT32))
    if scheme.activation_order:
        parts["group_index"] = (f"{name}_g_idx", TensorRequirement(((inputs,),), _INTEGER))
    return parts


def _mxfp4_parts(name: str, shape: tuple[int, ...]) -> _Parts:
    """The family's matrix is [experts, in, out]; blocks run along the inputs of [experts, out, in]."""
    experts, inputs, out = shape
    blocks = _groups(name, inputs, MXFP4_BLOCK)
    return {
        "weight": (f"{name}_blocks", TensorRequirement(((experts, out, blocks, MXFP4_BLOCK // 2),), _BYTES)),
        "scale": (f"{name}_scales", TensorRequirement(((experts, out, blocks),), _BYTES)),
    }


def _groups(name: str, inputs: int, group_size: int | None) -> int:
    if group_size is None:
        return 1
    if inputs % group_size:
        raise StartupError(
            f"tensor {name} has {inputs} inputs, which do not divide into the groups of {group_size} that the "
            f"quantization configuration states"
        )
    return inputs // group_size


def _words(name: str, extent: int, what: str, bits: int) -> int:
    per_word = WORD_BITS // bits
    if extent % per_word:
        raise StartupError(
            f"tensor {name} has {extent} {what}, which do not divide into {WORD_BITS}-bit words of {per_word} values; "
            f"such a matrix cannot be stored with {bits} bits a value"
        )
    return extent // per_word
