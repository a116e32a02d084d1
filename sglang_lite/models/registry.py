"""From a model directory to a model: what is supported, start-up checks, loading.

Only ``load_model`` imports torch; the rest serves the start-up checks of the front process.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from sglang_lite.models.checkpoint import Checkpoint
from sglang_lite.models.description import ModelDescription, read_description
from sglang_lite.models.families import FAMILIES, resolve_architecture, supported_architectures
from sglang_lite.models.family import Shapes
from sglang_lite.models.quantized_storage import CheckpointLayout, find_layout
from sglang_lite.models.share import share_of

if TYPE_CHECKING:
    import torch

    from sglang_lite.adapters.base import Operations
    from sglang_lite.layers.adapted import AdapterSlots
    from sglang_lite.layers.parallel import ParallelGroup
    from sglang_lite.models.base import CausalLanguageModel
    from sglang_lite.models.weight_reader import WeightReader

__all__ = ["check_checkpoint", "expected_tensors", "load_model", "resolve_architecture", "supported_architectures"]

OUTPUT_MATRIX = "lm_head.weight"


def expected_tensors(description: ModelDescription) -> Shapes:
    """name -> shape of every tensor the model reads, in reading order."""
    return FAMILIES[description.architecture].expected_tensors(description)


def open_checkpoint(directory: Path | str, description: ModelDescription) -> Checkpoint:
    """The checkpoint of a directory, its tensors under the names that the family uses.

    Raises:
        StartupError: the files are not a checkpoint.
    """
    return Checkpoint.open(directory).renamed(FAMILIES[description.architecture].canonical_name)


def settle_output_matrix(description: ModelDescription, checkpoint: Checkpoint) -> ModelDescription:
    """The description with ``tie_word_embeddings`` as the checkpoint has it.

    The two configurations of a wrapped decoder may disagree about it; whether an output matrix is there does not.
    """
    if not description.is_wrapped:
        return description
    return dataclasses.replace(description, tie_word_embeddings=OUTPUT_MATRIX not in checkpoint.tensors)


def check_checkpoint(directory: Path | str, description: ModelDescription) -> Checkpoint:
    """Check from headers alone that a directory holds every tensor of the model, whole and with the right shape.

    Raises:
        StartupError: names the file and the tensor at fault.
    """
    checkpoint = open_checkpoint(directory, description)
    checkpoint.require(stored_tensors(settle_output_matrix(description, checkpoint), checkpoint).required)
    return checkpoint


def stored_tensors(description: ModelDescription, checkpoint: Checkpoint) -> CheckpointLayout:
    """How the checkpoint stores what the model reads; the same as ``expected_tensors`` where nothing is quantized.

    Raises:
        StartupError: a matrix cannot be stored in the way that config.json states.
    """
    return find_layout(expected_tensors(description), checkpoint, description.quantization)


class _ModelModule(Protocol):
    """A module that wires a family."""

    def build(
        self, description: ModelDescription, reader: WeightReader, ops: Operations, num_positions: int
    ) -> CausalLanguageModel: ...


def load_model(
    path: Path | str,
    *,
    ops: Operations,
    dtype: torch.dtype | None = None,
    overrides: Mapping[str, Any] | None = None,
    context_length: int | None = None,
    progress: bool = True,
    parallel: ParallelGroup | None = None,
    adapters: AdapterSlots | None = None,
) -> tuple[CausalLanguageModel, ModelDescription]:
    """Read a model directory and build the model on the device of ``ops``.

    Args:
        path: directory with config.json and safetensors weights.
        ops: operations of the device.
        dtype: element type of weights and activations; None means float32.
        overrides: top-level keys that replace those of config.json.
        context_length: positions to prepare for, when more than the model's own context length.
        progress: draw a progress bar for long loads.
        parallel: the ranks that share the model; None for one that has it all.
        adapters: slots of low-rank adapters, for a model that is not shared by ranks; None for no adapters.

    Returns:
        The model, and the description of the whole model.

    Raises:
        StartupError: the configuration or the checkpoint is not usable; nothing was read in that case.
    """
    import torch

    from sglang_lite.layers.parallel import SINGLE
    from sglang_lite.models.load_progress import LoadProgress
    from sglang_lite.models.weight_reader import WeightReader

    description = read_description(path, overrides)
    checkpoint = check_checkpoint(path, description)
    description = settle_output_matrix(description, checkpoint)
    layout = stored_tensors(description, checkpoint)
    num_bytes = sum(checkpoint.tensors[name].num_bytes for name in layout.required)
    bar = LoadProgress(num_bytes, enabled=progress)
    num_positions = max(description.context_length, context_length or 0)
    module = cast("_ModelModule", importlib.import_module(FAMILIES[description.architecture].module))
    group = parallel or SINGLE
    with WeightReader(checkpoint, dtype or torch.float32, ops.device, bar, group, layout.quantized, adapters) as reader:
        model = module.build(share_of(description, group.size), reader, ops, num_positions)
    return model, description
