"""What is read of ``quantization_config``, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_lite.models.config_files import ConfigReader
from sglang_lite.models.decoder_config import text_config
from sglang_lite.models.quantization import (
    AwqScheme,
    Fp8Scheme,
    GptqScheme,
    Granularity,
    Int8Scheme,
    Mxfp4Scheme,
    PackedIntScheme,
    QuantizationDescription,
    read_quantization,
)
from sglang_lite.types import StartupError
from tests.support.quantized_checkpoints import FORMATS, compressed

PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def read(values: dict[str, Any]) -> QuantizationDescription | None:
    return read_quantization(ConfigReader(values, "config.json"))


def read_scheme(quantization: dict[str, Any]) -> object:
    description = read({"quantization_config": quantization})
    assert description is not None
    return description.scheme


def test_plain_checkpoint() -> None:
    assert read({}) is None
    assert read({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("fp8_blocks_128", Fp8Scheme(granularity=Granularity.BLOCK, block=(128, 128), scale_suffix="_scale_inv")),
        ("fp8_tensor", Fp8Scheme(granularity=Granularity.TENSOR)),
        ("fp8_tensor_static", Fp8Scheme(granularity=Granularity.TENSOR, static_activations=True)),
        ("compressed_fp8_channel", Fp8Scheme(granularity=Granularity.CHANNEL)),
        ("compressed_fp8_blocks", Fp8Scheme(granularity=Granularity.BLOCK, block=(64, 32))),
        ("compressed_int8", Int8Scheme(granularity=Granularity.CHANNEL)),
        ("awq", AwqScheme(group_size=32)),
        ("gptq_one_group", GptqScheme(bits=4, group_size=None, activation_order=False, zero_offset=1)),
        ("gptq_v2", GptqScheme(bits=4, group_size=32, activation_order=False, zero_offset=0)),
        ("gptq_reordered", GptqScheme(bits=4, group_size=32, activation_order=True, zero_offset=1)),
        ("compressed_int4_128", PackedIntScheme(bits=4, group_size=128)),
        ("compressed_int4_channel", PackedIntScheme(bits=4, group_size=None)),
        ("compressed_int4_zeros", PackedIntScheme(bits=4, group_size=32, symmetric=False)),
        ("compressed_int4_reordered", PackedIntScheme(bits=4, group_size=32, activation_order=True)),
    ],
)
def test_schemes(name: str, scheme: object) -> None:
    assert read_scheme(dict(FORMATS[name].config)) == scheme


def test_names_that_writers_use_otherwise() -> None:
    assert read_scheme({"quant_method": "AWQ", "w_bit": 4, "q_group_size": 64}) == AwqScheme(group_size=64)
    assert read_scheme({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}) == Mxfp4Scheme()
    unnamed = compressed("pack-quantized", PACKED)
    del unnamed["quant_method"]
    description = read({"compression_config": unnamed})
    assert description is not None and description.method == "compressed-tensors"


def test_inside_a_wrapped_model() -> None:
    inner = {"text_config": {"quantization_config": compressed("pack-quantized", PACKED)}}
    outer = {"text_config": {}, "quantization_config": compressed("pack-quantized", PACKED)}
    for values in (inner, outer):
        description = read_quantization(text_config(ConfigReader(values, "config.json")))
        assert description is not None and description.scheme == PackedIntScheme(bits=4, group_size=32)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            r"method 'bitsandbytes' \(quantization_config.quant_method\).*awq",
        ),
        ({}, r"method None.*supported methods: fp8, awq, gptq, compressed-tensors, mxfp4"),
        ("awq", r"'quantization_config' must be an object, got 'awq'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"'quantization_config.fmt' must be 'e4m3', got 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size' must be two positive integers"),
        ({"quant_method": "fp8", "activation_scheme": "other"}, r"activation_scheme' must be 'dynamic' or 'static'"),
        (
            {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]},
            r"activation_scheme' must be 'dynamic' together with weight_block_size",
        ),
        ({"quant_method": "awq", "bits": 8, "group_size": 32}, r"bits' must be 4, got 8"),
        ({"quant_method": "awq", "version": "gemv", "group_size": 32}, r"version' must be 'gemm', got 'gemv'"),
        ({"quant_method": "awq", "zero_point": False, "group_size": 32}, r"zero_point' must be true"),
        ({"quant_method": "awq"}, r"group_size' must be a positive integer, it is absent"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 32}, r"bits' must be 2 or 4 or 8, got 3"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, r"checkpoint_format' must be 'gptq' or 'gptq_v2'"),
        ({"quant_method": "gptq", "group_size": 0}, r"group_size' must be a positive integer, got 0"),
        (
            {"quant_method": "gptq", "group_size": 32, "dynamic": {"+:.*": {"bits": 8}}},
            r"dynamic' must be absent: parameters that differ by module",
        ),
        ({"quant_method": "awq", "group_size": 32, "modules_to_not_convert": "lm_head"}, r"must be a list of module"),
        (
            {**compressed("pack-quantized", PACKED), "ignore": ["re:("]},
            r"ignore' holds the invalid regular expression 're:\('",
        ),
        (compressed("nvfp4-pack-quantized", PACKED), r"format' must be 'float-quantized'.*got 'nvfp4-pack-quantized'"),
        (compressed("pack-quantized", PACKED | {"num_bits": 2}), r"group_0.weights.num_bits' must be 4 or 8, got 2"),
        (compressed("pack-quantized", PACKED | {"strategy": "tensor"}), r"strategy' must be 'group' or 'channel'"),
        (compressed("int-quantized", PACKED | {"num_bits": 8}), r"strategy' must be 'tensor' or 'channel'"),
        (
            compressed("float-quantized", {"num_bits": 8, "type": "float", "symmetric": False}),
            r"weights.symmetric' must be true in this format",
        ),
        (
            {**compressed("pack-quantized", PACKED), "sparsity_config": {"format": "sparse-24-bitmask"}},
            r"sparsity_config' must be absent: sparse",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {}},
            r"config_groups' must be an object with",
        ),
        (
            {
                **compressed("pack-quantized", PACKED),
                "config_groups": {"a": {"weights": PACKED}, "b": {"weights": PACKED | {"group_size": 128}}},
            },
            r"config_groups' must be groups that store weights in one way",
        ),
    ],
)
def test_refusals(quantization: Any, message: str) -> None:
    with pytest.raises(StartupError, match=message) as caught:
        read({"quantization_config": quantization})
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize(
    ("pattern", "module", "ignored"),
    [
        ("lm_head", "lm_head", True),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("re:.*self_attn.*", "model.layers.3.self_attn.q_proj", True),
        ("re:.*mlp\\.(gate|up)_proj$", "model.layers.3.mlp.up_proj", True),
        ("re:.*mlp\\.(gate|up)_proj$", "model.layers.3.mlp.experts.0.up_proj", False),
    ],
)
def test_ignored_modules(pattern: str, module: str, ignored: bool) -> None:
    description = QuantizationDescription(method="awq", scheme=AwqScheme(group_size=32), ignored=(pattern,))
    assert description.is_ignored(module) is ignored
