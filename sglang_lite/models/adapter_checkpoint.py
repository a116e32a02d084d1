"""Reading the matrices of a low-rank adapter from a PEFT directory."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sglang_lite.layers.adapted import AdapterWeights
from sglang_lite.models.adapter_config import AdapterConfig, read_adapter_config
from sglang_lite.models.safetensors_header import FLOATING_DTYPES, TensorEntry, read_header
from sglang_lite.types import StartupError

WEIGHTS_NAME = "adapter_model.safetensors"

_TENSOR_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.\w+)?\.weight")
"""PEFT puts its wrapper's name before a module's, and sometimes the adapter's name before ``weight``."""


@dataclass(slots=True)
class _Pair:
    """The two tensors of a module; None until found."""

    module: str
    a: TensorEntry | None = None
    b: TensorEntry | None = None


def read_adapter(
    directory: Path | str,
    shapes: Mapping[str, tuple[int, int]],
    *,
    max_rank: int,
    canonical_name: Callable[[str], str],
    dtype: torch.dtype,
) -> dict[str, AdapterWeights]:
    """An adapter as weight name -> its matrices, on the host.

    Args:
        directory: holds adapter_config.json and adapter_model.safetensors.
        shapes: (out, in) of every projection that may be adapted, by weight name.
        max_rank: the largest rank there is room for.
        canonical_name: a checkpoint's tensor name -> the one in ``shapes``.
        dtype: of the results; the scaling is applied in float32 before.

    Raises:
        StartupError: the adapter is damaged, too large, of another model, or needs what is not supported; names the
            tensor or the field.
    """
    directory = Path(directory)
    config = read_adapter_config(directory)
    if config.max_rank > max_rank:
        raise StartupError(
            f"{directory}: the adapter has rank {config.max_rank}, over the limit of {max_rank}; "
            f"start the server with --max-lora-rank {config.max_rank}"
        )
    path = directory / WEIGHTS_NAME
    if not path.is_file():
        others = ", ".join(sorted(file.name for file in directory.glob("adapter_model.*"))) or "nothing"
        raise StartupError(
            f"no {WEIGHTS_NAME} in {directory} (found {others}); other formats have to be converted to safetensors"
        )
    pairs = _pairs(path, canonical_name)
    if not pairs:
        raise StartupError(f"{path} holds no low-rank matrices")
    for name, pair in pairs.items():
        _check(path, config, name, pair, shapes)
    return _read(path, config, pairs, dtype)


def _pairs(path: Path, canonical_name: Callable[[str], str]) -> dict[str, _Pair]:
    pairs: dict[str, _Pair] = {}
    for entry in read_header(path).values():
        found = _TENSOR_NAME.fullmatch(entry.name)
        if found is None:
            raise StartupError(
                f"tensor {entry.name} ({path}) is not a lora_A or lora_B matrix of a linear layer; "
                f"adapters of other modules are not supported"
            )
        module = found["module"]
        pair = pairs.setdefault(canonical_name(f"{module}.weight"), _Pair(module))
        if found["side"] == "A":
            pair.a = entry
        else:
            pair.b = entry
    return pairs


def _check(path: Path, config: AdapterConfig, name: str, pair: _Pair, shapes: Mapping[str, tuple[int, int]]) -> None:
    if pair.a is None or pair.b is None:
        missing = "lora_A" if pair.a is None else "lora_B"
        raise StartupError(f"missing adapter tensor {pair.module}.{missing}.weight ({path})")
    if name not in shapes:
        raise StartupError(
            f"tensor {pair.a.name} ({path}) adapts {pair.module}, which the server does not adapt: it is not a "
            f"projection of this model, not one that can be adapted, or not among --lora-target-modules"
        )
    out, inputs = shapes[name]
    rank = config.rank_of(pair.module)
    for entry, shape in ((pair.a, (rank, inputs)), (pair.b, (out, rank))):
        if entry.shape != shape:
            raise StartupError(
                f"tensor {entry.name} shape {list(entry.shape)} does not match expected {list(shape)} ({path}); "
                f"the adapter is of another model, or its configuration states another rank"
            )
        if entry.dtype not in FLOATING_DTYPES:
            raise StartupError(
                f"tensor {entry.name} has dtype {entry.dtype} ({path}); supported: {', '.join(sorted(FLOATING_DTYPES))}"
            )


def _read(
    path: Path, config: AdapterConfig, pairs: Mapping[str, _Pair], dtype: torch.dtype
) -> dict[str, AdapterWeights]:
    weights: dict[str, AdapterWeights] = {}
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            for name, pair in pairs.items():
                assert pair.a is not None and pair.b is not None  # checked before
                a = _finite(path, pair.a.name, file.get_tensor(pair.a.name))
                b = _finite(path, pair.b.name, file.get_tensor(pair.b.name))
                weights[name] = AdapterWeights(a.to(dtype), (b.float() * config.scaling_of(pair.module)).to(dtype))
    except (SafetensorError, OSError) as error:
        raise StartupError(f"invalid safetensors data in {path}: {error}") from error
    return weights


def _finite(path: Path, name: str, tensor: Tensor) -> Tensor:
    if not bool(torch.isfinite(tensor).all()):
        raise StartupError(f"tensor {name} ({path}) holds values that are not finite numbers; save the adapter again")
    return tensor
