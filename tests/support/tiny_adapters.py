"""Writes low-rank adapters as PEFT saves them, and the checkpoint into which one is merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path,
    base: Path,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    projections: Sequence[str] = ALL_PROJECTIONS,
    seed: int = 0,
    ranks: Mapping[str, int] | None = None,
    **config: Any,
) -> Path:
    """A random adapter of the model in ``base``.

    Args:
        ranks: projection -> its own rank (``rank_pattern``).
        config: further keys of adapter_config.json.
    """
    ranks = ranks or {}
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        projection = module.rpartition(".")[2]
        if projection not in projections or weight.dim() != 2:
            continue
        own, (out, inputs) = ranks.get(projection, rank), weight.shape
        stem = f"base_model.model.{module}"
        tensors[f"{stem}.lora_A.weight"] = 0.3 * torch.randn(own, inputs, generator=generator)
        tensors[f"{stem}.lora_B.weight"] = 0.3 * torch.randn(out, own, generator=generator)
    directory.mkdir(parents=True, exist_ok=True)
    document = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(projections),
        "bias": "none",
        "modules_to_save": None,
        "use_dora": False,
        "rank_pattern": dict(ranks),
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(document))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def merge_adapter(base: Path, adapter: Path, target: Path, *, scaling: float) -> Path:
    """The checkpoint of ``base`` with W + scaling B A in the place of every adapted W."""
    shutil.copytree(base, target)
    weights = load_file(base / "model.safetensors")
    pairs = load_file(adapter / "adapter_model.safetensors")
    for name, a in pairs.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = pairs[name.replace(".lora_A.", ".lora_B.")]
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + scaling * (b @ a)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target
