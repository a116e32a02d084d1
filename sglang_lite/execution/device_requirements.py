"""What a model needs of a device: element types, and operations that something must serve."""

from __future__ import annotations

import torch

from sglang_lite.adapters.capability import CapabilityRecord, require_operations
from sglang_lite.adapters.cuda.selection import Selection, dtype_name
from sglang_lite.config import ServerConfig
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.types import StartupError

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
_KV_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}

_EVERY_MODEL = (
    "norm.rms",
    "norm.add_rms",
    "activation.silu_and_mul",
    "rotary.cache",
    "linear.dense",
    "embedding",
    "kv.copy_pages",
)
_SAMPLING = ("sampling.softmax", "sampling.top_k_renormalize", "sampling.top_p_renormalize", "sampling.draw")


def device_dtype(config: ServerConfig, description: ModelDescription) -> torch.dtype:
    """Element type of weights and activations: ``--dtype``, else float16 where the checkpoint has it, else bfloat16.

    Raises:
        StartupError: the kernels do not take the type.
    """
    if config.dtype == "auto":
        return torch.float16 if description.dtype == "float16" else torch.bfloat16
    if config.dtype not in _DTYPES:
        raise StartupError(
            f"--dtype {config.dtype}: the kernels of --device cuda compute in 16-bit types; use auto, "
            f"{', '.join(_DTYPES)}"
        )
    return _DTYPES[config.dtype]


def device_kv_dtype(config: ServerConfig, dtype: torch.dtype) -> torch.dtype:
    """Element type of the pool: ``--kv-cache-dtype``, else that of the activations.

    Raises:
        StartupError: the attention kernels do not take the type.
    """
    name = config.kv_cache_dtype
    if name == "auto":
        return dtype
    if name not in _KV_DTYPES:
        raise StartupError(f"--kv-cache-dtype {name}: not served with --device cuda; use auto, {', '.join(_KV_DTYPES)}")
    found = _KV_DTYPES[name]
    if found == torch.bfloat16 and dtype == torch.float16:
        raise StartupError(
            f"--kv-cache-dtype {name} with --dtype float16: keys and queries need one 16-bit type; use auto"
        )
    return found


def required_operations(description: ModelDescription, kv_dtype: torch.dtype) -> list[str]:
    """Operations of the dispatch table that the model's layers call."""
    needed = [*_EVERY_MODEL]
    if description.kv.num_tensors == 1:
        needed += ["latent.append", "latent.attention"]
    else:
        needed += ["kv.append", "attention.prefill", "attention.decode"]
        if any(window is not None for window in description.sliding_windows):
            needed.append("attention.window")
        if kv_dtype.itemsize == 1:
            needed.append("attention.fp8_cache")
    return needed


def select_providers(
    record: CapabilityRecord, description: ModelDescription, dtype: torch.dtype, kv_dtype: torch.dtype
) -> Selection:
    """The choices for a device, after a check that everything the model needs is served.

    Raises:
        StartupError: names every operation that is not, with the reasons.
    """
    if description.kv.num_tensors == 1 and kv_dtype.itemsize == 1:
        raise StartupError(
            f"--kv-cache-dtype with 8 bits: {description.architecture} keeps latent rows, and no kernel attends over "
            f"those as {dtype_name(kv_dtype)}; use --kv-cache-dtype auto"
        )
    require_operations(record, required_operations(description, kv_dtype), dtype_name(dtype))
    require_operations(record, _SAMPLING, "float32")
    target = record.target
    return Selection(target, enable_pdl=target.sm >= 90)
