"""Quantizers, quantized weights and products with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from sglang_lite.adapters.quantized import (
    AwqWeight,
    Fp8Weight,
    GptqWeight,
    Int8Weight,
    Mxfp4Weight,
    Nvfp4Weight,
    PackedIntWeight,
    QuantizedWeight,
)
from sglang_lite.adapters.verification.case import Case, Source, Subject, Tensors, Tolerance

_OUT, _IN, _GROUP, _EXPERTS = 256, 256, 128, 3
_ANY_WORD = (-(2**31), 2**31)


def quantized_cases(source: Source) -> Iterator[Case]:
    """Quantizers by what they stand for, products by their results, weights of every format."""
    yield from _quantizers(source)
    yield from _products(source)
    for name in FORMATS:
        yield _dequantized(source, name)
        yield _packed(source, name)
    yield _packed_experts(source)


def fp8_blocks(source: Source, *lead: int) -> dict[str, Tensor]:
    """float8 with a scale for each 128 x 128."""
    return {
        "weight": source.normal(*lead, _OUT, _IN, dtype=torch.float32).to(torch.float8_e4m3fn),
        "scale": (source.uniform(*lead, _OUT // 128, _IN // 128) + 0.5) * _IN**-0.5,
    }


def _fp8_channels(source: Source) -> dict[str, Tensor]:
    weight = source.normal(_OUT, _IN, dtype=torch.float32).to(torch.float8_e4m3fn)
    return {"weight": weight, "scale": (source.uniform(_OUT, 1) + 0.5) * _IN**-0.5}


def _int8(source: Source) -> dict[str, Tensor]:
    weight = source.integers(-127, 128, _OUT, _IN, dtype=torch.int8)
    return {"weight": weight, "scale": (source.uniform(_OUT, 1) + 0.5) / 64 * _IN**-0.5}


def _words(source: Source, *shape: int) -> Tensor:
    return source.integers(*_ANY_WORD, *shape).to(torch.int32)


def _awq(source: Source) -> dict[str, Tensor]:
    return {
        "qweight": _words(source, _IN, _OUT // 8),
        "qzeros": _words(source, _IN // _GROUP, _OUT // 8),
        "scales": ((source.uniform(_IN // _GROUP, _OUT) + 0.5) / 4 * _IN**-0.5).to(source.dtype),
    }


def _gptq(source: Source) -> dict[str, Tensor]:
    return {
        "qweight": _words(source, _IN // 8, _OUT),
        "qzeros": _words(source, _IN // _GROUP, _OUT // 8),
        "scales": ((source.uniform(_IN // _GROUP, _OUT) + 0.5) / 4 * _IN**-0.5).to(source.dtype),
    }


def _packed_int(source: Source) -> dict[str, Tensor]:
    return {
        "packed": _words(source, _OUT, _IN // 8),
        "scale": ((source.uniform(_OUT, _IN // 32) + 0.5) / 4 * _IN**-0.5).to(source.dtype),
    }


def _mxfp4(source: Source) -> dict[str, Tensor]:
    return {
        "blocks": source.integers(0, 256, _OUT, _IN // 32, 16).to(torch.uint8),
        "scales": source.integers(120, 124, _OUT, _IN // 32).to(torch.uint8),
    }


def _nvfp4(source: Source) -> dict[str, Tensor]:
    return {
        "packed": source.integers(0, 256, _OUT, _IN // 2).to(torch.uint8),
        "scale": (source.uniform(_OUT, _IN // 16) + 0.5).to(torch.float8_e4m3fn),
        "global_scale": torch.tensor(_IN**-0.5 / 3),
    }


FORMATS: dict[str, tuple[Callable[[Source], Tensors], Callable[[Tensors], QuantizedWeight]]] = {
    "fp8, blocks": (fp8_blocks, lambda given: Fp8Weight(given["weight"], given["scale"], (128, 128))),
    "fp8, a scale an output": (_fp8_channels, lambda given: Fp8Weight(given["weight"], given["scale"])),
    "int8": (_int8, lambda given: Int8Weight(given["weight"], given["scale"])),
    "awq": (_awq, lambda given: AwqWeight(given["qweight"], given["qzeros"], given["scales"])),
    "gptq": (_gptq, lambda given: GptqWeight(given["qweight"], given["qzeros"], given["scales"])),
    "int4, groups of 32": (_packed_int, lambda given: PackedIntWeight(given["packed"], given["scale"], _IN)),
    "mxfp4": (_mxfp4, lambda given: Mxfp4Weight(given["blocks"], given["scales"])),
    "nvfp4": (_nvfp4, lambda given: Nvfp4Weight(given["packed"], given["scale"], given["global_scale"])),
}
"""Format -> how random ones are made, and how the weight is put together from its tensors."""


def _weight(name: str, given: Tensors) -> QuantizedWeight:
    return FORMATS[name][1](given)


def _dequantized(source: Source, name: str) -> Case:
    def dequantize(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        return (subject.operations.quantized.dequantize(_weight(name, given), torch.float32),)

    shape = f"{name} [{_OUT}, {_IN}]"
    return Case("QuantizedOperations.dequantize", shape, FORMATS[name][0](source), dequantize, Tolerance(1e-6, 1e-5))


def _packed(source: Source, name: str) -> Case:
    tokens = source.extent(1, 5, 33)

    def product(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        quantized, weight = subject.operations.quantized, _weight(name, given)
        if quantized.refusal(weight) is not None:  # the product that such a device computes
            plain = quantized.dequantize(weight, given["x"].dtype)
            return (torch.nn.functional.linear(given["x"], plain, given["bias"]),)
        return (quantized.pack_linear(weight, given["bias"])(given["x"]),)

    inputs = FORMATS[name][0](source) | {"x": source.normal(tokens, _IN), "bias": source.normal(_OUT)}
    shape = f"[{tokens}, {_IN}] x {name} [{_OUT}, {_IN}]"
    # Devices with float8 or int8 products round the activations too, to three bits of mantissa at worst.
    also = ("QuantizedOperations.refusal",)
    return Case("QuantizedOperations.pack_linear", shape, inputs, product, Tolerance(0.12, 0.05), also=also)


def _packed_experts(source: Source) -> Case:
    tokens, per_token = source.extent(1, 9), 2
    inputs = {
        "x": source.normal(tokens, _IN),
        "ids": torch.stack([source.permutation(_EXPERTS)[:per_token] for _ in range(tokens)]).to(torch.int32),
        "weights": source.uniform(tokens, per_token),
    }
    for prefix in ("w13", "w2"):
        made = fp8_blocks(source, _EXPERTS)
        if prefix == "w2":
            made = {"weight": made["weight"][:, :, :128].contiguous(), "scale": made["scale"][:, :, :1].contiguous()}
        inputs |= {f"{prefix}_{name}": tensor for name, tensor in made.items()}

    def run(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        quantized = subject.operations.quantized
        w13 = Fp8Weight(given["w13_weight"], given["w13_scale"], (128, 128))
        w2 = Fp8Weight(given["w2_weight"], given["w2_scale"], (128, 128))
        packed = quantized.pack_experts(w13, w2)
        return (packed(given["x"], given["ids"], given["weights"]),)

    shape = f"[{tokens}, {_IN}], {per_token} of {_EXPERTS} fp8 experts"
    also = ("QuantizedOperations.experts_refusal",)  # what decides which of its ways pack_experts goes
    return Case("QuantizedOperations.pack_experts", shape, inputs, run, Tolerance(0.12, 0.05), also=also)


def _quantizers(source: Source) -> Iterator[Case]:
    tokens = source.extent(1, 9, 64)
    inputs = {"x": source.normal(tokens, _IN), "scale": torch.tensor([0.01])}

    def tensor(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        return _values(*subject.operations.quantized.quantize_fp8_tensor(given["x"]))

    def static(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        return _values(*subject.operations.quantized.quantize_fp8_tensor(given["x"], given["scale"]))

    def token(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        return _values(*subject.operations.quantized.quantize_fp8_token(given["x"]))

    def group(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        values, scales = subject.operations.quantized.quantize_fp8_group(given["x"], _GROUP)
        return values.float() * scales.repeat_interleave(_GROUP, -1), scales

    def int8(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        return _values(*subject.operations.quantized.quantize_int8_token(given["x"]))

    calls = {
        "quantize_fp8_tensor": (tensor, static),
        "quantize_fp8_token": (token,),
        "quantize_fp8_group": (group,),
        "quantize_int8_token": (int8,),
    }
    for name, variants in calls.items():
        for call in variants:
            # A value halfway between two neighbours may go either way: one step of float8 or of int8 apart.
            yield Case(f"QuantizedOperations.{name}", f"[{tokens}, {_IN}]", inputs, call, Tolerance(0.03, 0.07))


def _values(quantized: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """What quantized values stand for, and their scales."""
    return quantized.float() * scale, scale


def _products(source: Source) -> Iterator[Case]:
    tokens = source.extent(1, 9, 64)
    fp8 = {
        "x": source.normal(tokens, _IN, dtype=torch.float32).to(torch.float8_e4m3fn),
        "x_scale": source.uniform(tokens, 1) + 0.5,
        "group_scale": source.uniform(tokens, _IN // _GROUP) + 0.5,
    }
    int8 = {
        "x": source.integers(-127, 128, tokens, _IN, dtype=torch.int8),
        "x_scale": (source.uniform(tokens, 1) + 0.5) / 64,
    }
    dtype = source.dtype

    def channels(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        product = subject.operations.quantized.fp8_gemm
        return (product(given["x"], given["x_scale"], given["weight"], given["scale"], dtype).float(),)

    def blocks(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        product = subject.operations.quantized.fp8_block_gemm
        return (product(given["x"], given["group_scale"], given["weight"], given["scale"], dtype).float(),)

    def integers(subject: Subject, given: Tensors) -> tuple[Tensor, ...]:
        product = subject.operations.quantized.int8_gemm
        return (product(given["x"], given["x_scale"], given["weight"], given["scale"], dtype).float(),)

    shape = f"[{tokens}, {_IN}] x [{_OUT}, {_IN}]"
    tolerance = source.within(8, 4)
    by_kernel = {
        "linear.fp8_per_channel": ("fp8_gemm", fp8 | _fp8_channels(source), channels),
        "linear.fp8_blocks": ("fp8_block_gemm", fp8 | fp8_blocks(source), blocks),
        "linear.int8": ("int8_gemm", int8 | _int8(source), integers),
    }
    for kernel, (name, inputs, call) in by_kernel.items():
        yield Case(f"QuantizedOperations.{name}", shape, inputs, call, tolerance, kernel=kernel)
