"""How a quantized checkpoint stores its matrices, as ``quantization_config`` says it. Free of torch.

A scheme is one storage format with its parameters. ``models.quantized_storage`` knows the tensors of each, and
``models.dequantize`` what they stand for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from sglang_lite.models.config_files import ConfigReader
from sglang_lite.types import StartupError

CONFIG_KEYS = ("quantization_config", "compression_config")
WORD_BITS = 32
"""Width of the words that small integers are packed into."""


class Granularity(Enum):
    """How many weights share one scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    BLOCK = "block"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Scheme:
    """float8_e4m3 weights [out, in] with scales; weight = stored * scale.

    Attributes:
        granularity: one scale, one an output, or one a block.
        block: rows and columns of a block; used by ``Granularity.BLOCK`` alone.
        scale_suffix: the scale tensor is the weight's name with this behind ``weight``.
        static_activations: the checkpoint also brings the scale of the layer's input.
    """

    granularity: Granularity
    block: tuple[int, int] = (128, 128)
    scale_suffix: str = "_scale"
    static_activations: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqScheme:
    """AWQ, ``gemm`` layout: int32 words of 8 outputs in the order 0 2 4 6 1 3 5 7; weight = (stored - zero) * scale.

    Attributes:
        group_size: inputs that share a scale and a zero; None for all of them.
    """

    group_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqScheme:
    """GPTQ: words of neighbouring inputs; weight = (stored - zero) * scale, groups of inputs chosen by ``g_idx``.

    Attributes:
        bits: of a value: 2, 4 or 8.
        group_size: inputs that share a scale and a zero; None for all of them.
        activation_order: groups are not runs of neighbouring inputs, so ``g_idx`` has to be there.
        zero_offset: what is added to a stored zero: 1 in the first format, 0 in ``gptq_v2``.
    """

    bits: int
    group_size: int | None
    activation_order: bool
    zero_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Scheme:
    """compressed-tensors ``int-quantized``: int8 weights [out, in]; weight = stored * scale.

    Attributes:
        granularity: one scale, or one an output.
    """

    granularity: Granularity


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedIntScheme:
    """compressed-tensors ``pack-quantized``: words of neighbouring inputs;
    weight = (stored - 2^(bits - 1) - zero) * scale.

    Attributes:
        bits: of a value: 4 or 8.
        group_size: inputs that share a scale; None for one scale an output.
        symmetric: the checkpoint holds no zeros.
        activation_order: groups are not runs of neighbouring inputs but chosen by ``weight_g_idx``.
    """

    bits: int
    group_size: int | None
    symmetric: bool = True
    activation_order: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Scheme:
    """Expert matrices as 4-bit floats (e2m1) in blocks of 32 inputs with one power of two each."""


Scheme = Fp8Scheme | Int8Scheme | AwqScheme | GptqScheme | PackedIntScheme | Mxfp4Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationDescription:
    """How a checkpoint stores its matrices.

    Attributes:
        method: ``quant_method`` of the configuration.
        scheme: of every quantized matrix.
        ignored: modules that are not quantized: names or parts of names, or regular expressions behind ``re:``.
    """

    method: str
    scheme: Scheme
    ignored: tuple[str, ...] = ()

    def is_ignored(self, module: str) -> bool:
        """Whether ``module`` (a weight's name without ``.weight``) is listed as not quantized.

        A listed name covers the modules below it and may leave out what stands before it, but only at a dot:
        ``mlp.gate`` covers ``model.layers.0.mlp.gate`` and not ``model.layers.0.mlp.gate_proj``.
        """
        for pattern in self.ignored:
            if pattern.startswith("re:"):
                if re.match(pattern.removeprefix("re:"), module):
                    return True
            elif f".{pattern}." in f".{module}.":
                return True
        return False


def read_quantization(config: ConfigReader) -> QuantizationDescription | None:
    """What config.json says of quantization; None for plain floating-point weights.

    Raises:
        StartupError: the method or one of its parameters is not supported; names it and what is.
    """
    for key in CONFIG_KEYS:
        if config.values.get(key) is not None:
            return _describe(_object(config, key))
    return None


def _describe(config: ConfigReader) -> QuantizationDescription:
    method = config.values.get("quant_method", "compressed-tensors" if "config_groups" in config.values else None)
    normalized = method.lower().replace("_", "-") if isinstance(method, str) else None
    if normalized is None or normalized not in _METHODS:
        raise StartupError(
            f"{config.source}: quantization method {method!r} ({config.prefix}quant_method) is not supported; "
            f"supported methods: {', '.join(_METHODS)}. Use a checkpoint in one of these or an unquantized one."
        )
    return QuantizationDescription(method=normalized, scheme=_METHODS[normalized](config), ignored=_ignored(config))


def _fp8(config: ConfigReader) -> Fp8Scheme:
    _require(config, "fmt", "e4m3")
    activations = _choice(config, "activation_scheme", ("dynamic", "static"), "dynamic")
    if config.values.get("weight_block_size") is None:
        return Fp8Scheme(granularity=Granularity.TENSOR, static_activations=activations == "static")
    if activations == "static":
        raise config.error("activation_scheme", "'dynamic' together with weight_block_size")
    return Fp8Scheme(
        granularity=Granularity.BLOCK, block=_block(config, "weight_block_size"), scale_suffix="_scale_inv"
    )


def _awq(config: ConfigReader) -> AwqScheme:
    _require(config, "bits", 4, "w_bit")
    _require(config, "version", "gemm")
    if not config.boolean("zero_point", True):
        raise config.error("zero_point", "true (AWQ checkpoints hold zeros)")
    return AwqScheme(group_size=_group_size(config, "group_size", "q_group_size"))


def _gptq(config: ConfigReader) -> GptqScheme:
    bits = _one_of(config, "bits", (2, 4, 8), 4)
    layout = _choice(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    if config.values.get("dynamic"):
        raise config.error("dynamic", "absent: parameters that differ by module are not supported")
    return GptqScheme(
        bits=bits,
        group_size=_group_size(config, "group_size"),
        activation_order=config.boolean("desc_act", False),
        zero_offset=1 if layout == "gptq" else 0,
    )


def _mxfp4(config: ConfigReader) -> Mxfp4Scheme:
    return Mxfp4Scheme()


def _compressed_tensors(config: ConfigReader) -> Scheme:
    for key in ("sparsity_config", "transform_config"):
        part = config.values.get(key)
        if part and not (isinstance(part, Mapping) and part.get("format") == "dense"):
            raise config.error(key, "absent: sparse and transformed weights are not supported")
    groups = _object(config, "config_groups")
    if not groups.values:
        raise config.error("config_groups", "an object with at least one group")
    schemes = [_compressed_group(config, _object(groups, name)) for name in groups.values]
    if any(scheme != schemes[0] for scheme in schemes):
        raise config.error("config_groups", "groups that store weights in one way: mixed schemes are not supported")
    return schemes[0]


def _compressed_group(config: ConfigReader, group: ConfigReader) -> Scheme:
    layout = group.values.get("format") or config.values.get("format")
    weights = _object(group, "weights")
    match layout:
        case "float-quantized" | "naive-quantized":
            return _compressed_float(group, weights)
        case "int-quantized":
            _require(weights, "num_bits", 8)
            _require(weights, "type", "int")
            _require_symmetric(weights)
            return Int8Scheme(granularity=_granularity(weights))
        case "pack-quantized":
            _require(weights, "type", "int")
            kind = _choice(weights, "strategy", ("group", "channel"), "group")
            return PackedIntScheme(
                bits=_one_of(weights, "num_bits", (4, 8), 4),
                group_size=_group_size(weights, "group_size") if kind == "group" else None,
                symmetric=weights.boolean("symmetric", True),
                activation_order=weights.values.get("actorder") in ("group", True),
            )
        case _:
            raise config.error("format", "'float-quantized', 'naive-quantized', 'int-quantized' or 'pack-quantized'")


def _compressed_float(group: ConfigReader, weights: ConfigReader) -> Fp8Scheme:
    _require(weights, "num_bits", 8)
    _require(weights, "type", "float")
    _require_symmetric(weights)
    activations = group.values.get("input_activations")
    static = isinstance(activations, Mapping) and activations.get("dynamic") is False
    if weights.values.get("strategy") == "block":
        block = _block(weights, "block_structure")
        return Fp8Scheme(granularity=Granularity.BLOCK, block=block, static_activations=static)
    return Fp8Scheme(granularity=_granularity(weights), static_activations=static)


def _granularity(weights: ConfigReader) -> Granularity:
    allowed = (Granularity.TENSOR.value, Granularity.CHANNEL.value)
    return Granularity(_choice(weights, "strategy", allowed, Granularity.TENSOR.value))


def _require_symmetric(weights: ConfigReader) -> None:
    if not weights.boolean("symmetric", True):
        raise weights.error("symmetric", "true in this format")


_METHODS: Mapping[str, Callable[[ConfigReader], Scheme]] = MappingProxyType(
    {
        "fp8": _fp8,
        "awq": _awq,
        "gptq": _gptq,
        "compressed-tensors": _compressed_tensors,
        "mxfp4": _mxfp4,
    }
)


def _object(config: ConfigReader, key: str) -> ConfigReader:
    value = config.values.get(key)
    if not isinstance(value, Mapping):
        raise config.error(key, "an object")
    return ConfigReader(value, config.source, f"{config.prefix}{key}.")


def _require(config: ConfigReader, key: str, expected: int | str, other_key: str | None = None) -> None:
    """An absent value counts as the expected one: writers leave the usual ones out."""
    if other_key is not None and key not in config.values:
        key = other_key
    value = config.values.get(key, expected)
    if (value.lower() if isinstance(value, str) else value) != expected:
        raise config.error(key, f"{expected!r}")


def _one_of(config: ConfigReader, key: str, allowed: tuple[int, ...], default: int) -> int:
    value = config.values.get(key, default)
    if type(value) is not int or value not in allowed:
        raise config.error(key, " or ".join(str(choice) for choice in allowed))
    return value


def _choice(config: ConfigReader, key: str, allowed: tuple[str, ...], default: str) -> str:
    value = config.values.get(key)
    if value is None:
        return default
    if value not in allowed:
        raise config.error(key, " or ".join(repr(choice) for choice in allowed))
    return str(value)


def _group_size(config: ConfigReader, key: str, other_key: str | None = None) -> int | None:
    """Inputs of a group; -1 is how writers say that there is one group."""
    if other_key is not None and key not in config.values:
        key = other_key
    return None if config.values.get(key) == -1 else config.integer(key)


def _block(config: ConfigReader, key: str) -> tuple[int, int]:
    value: Any = config.values.get(key)
    if not isinstance(value, list) or len(value) != 2 or not all(type(side) is int and side > 0 for side in value):
        raise config.error(key, "two positive integers: rows and columns of a block")
    return value[0], value[1]


def _ignored(config: ConfigReader) -> tuple[str, ...]:
    names: list[str] = []
    for key in ("ignore", "ignored_layers", "modules_to_not_convert"):
        value = config.values.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise config.error(key, "a list of module names")
        names.extend(value)
    for name in names:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise StartupError(
                f"{config.source}: '{config.prefix}ignore' holds the invalid regular expression {name!r}: {error}"
            ) from error
    return tuple(dict.fromkeys(names))
