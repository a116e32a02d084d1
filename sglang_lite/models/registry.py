"""From a model directory to a model: what is supported, start-up checks, loading.

Only ``load_model`` imports torch; the rest serves the start-up checks of the front process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_lite.models.checkpoint import Checkpoint
from sglang_lite.models.dense_names import expected_tensors
from sglang_lite.models.description import ModelDescription, read_description
from sglang_lite.models.families import resolve_architecture, supported_architectures

if TYPE_CHECKING:
    import torch

    from sglang_lite.adapters.base import Operations
    from sglang_lite.models.base import CausalLanguageModel

__all__ = ["check_checkpoint", "load_model", "resolve_architecture", "supported_architectures"]


def check_checkpoint(directory: Path | str, description: ModelDescription) -> Checkpoint:
    """Check from headers alone that a directory holds every tensor of the model, whole and with the right shape.

    Raises:
        StartupError: names the file and the tensor at fault.
    """
    checkpoint = Checkpoint.open(directory)
    checkpoint.require(expected_tensors(description))
    return checkpoint


def load_model(
    path: Path | str,
    *,
    ops: Operations,
    dtype: torch.dtype | None = None,
    overrides: Mapping[str, Any] | None = None,
    context_length: int | None = None,
    progress: bool = True,
) -> tuple[CausalLanguageModel, ModelDescription]:
    """Read a model directory and build the model on the device of ``ops``.

    Args:
        path: directory with config.json and safetensors weights.
        ops: operations of the device.
        dtype: element type of weights and activations; None means float32.
        overrides: top-level keys that replace those of config.json.
        context_length: positions to prepare for, when more than the model's own context length.
        progress: draw a progress bar for long loads.

    Raises:
        StartupError: the configuration or the checkpoint is not usable; nothing was read in that case.
    """
    import torch

    from sglang_lite.models.dense import build_dense_decoder
    from sglang_lite.models.load_progress import LoadProgress
    from sglang_lite.models.weight_reader import WeightReader

    description = read_description(path, overrides)
    checkpoint = check_checkpoint(path, description)
    num_bytes = sum(checkpoint.tensors[name].num_bytes for name in expected_tensors(description))
    bar = LoadProgress(num_bytes, enabled=progress)
    num_positions = max(description.context_length, context_length or 0)
    with WeightReader(checkpoint, dtype or torch.float32, ops.device, bar) as reader:
        model = build_dense_decoder(description, reader, ops, num_positions)
    return model, description
