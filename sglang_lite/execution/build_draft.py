"""The draft model of a host or a device: what it takes, and how it is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.adapters.cpu import CpuOperations
from sglang_lite.config import ServerConfig
from sglang_lite.execution.build import kv_geometry, load_on_host
from sglang_lite.execution.draft_model import DraftModel
from sglang_lite.execution.model_runner import ModelRunner
from sglang_lite.layers.parallel import ParallelGroup
from sglang_lite.models.description import ModelDescription, read_description
from sglang_lite.models.registry import expected_tensors


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft model before it is loaded.

    Attributes:
        directory: of its checkpoint.
        is_loaded_here: false on the ranks that take rank 0's guesses.
    """

    directory: str
    description: ModelDescription
    is_loaded_here: bool

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Memory of its parameters on this rank."""
        if not self.is_loaded_here:
            return 0
        return sum(math.prod(shape) for shape in expected_tensors(self.description).values()) * dtype.itemsize

    def geometry(self, geometry: KVGeometry) -> KVGeometry:
        """Its pool: the pages of the served model's, with what its own tokens leave in them."""
        return kv_geometry(self.description.kv, geometry.num_pages, geometry.page_size, geometry.dtype)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """KV of a token on this rank."""
        return kv_geometry(self.description.kv, 1, 1, dtype).bytes_per_token if self.is_loaded_here else 0

    def load_on_host(
        self,
        geometry: KVGeometry,
        *,
        vocabulary: int,
        dtype: torch.dtype,
        num_rows: int,
        context_length: int,
        num_threads: int,
        workspace_bytes: int,
        parallel: ParallelGroup,
    ) -> DraftModel:
        """Load it, where it is loaded.

        Args:
            geometry: of the served model's pool.
            vocabulary: tokens of the served model.
            dtype: of the weights.
            num_rows: rows of the request table.
            workspace_bytes: memory that decode attention may use beside the pool.

        Raises:
            StartupError: the checkpoint is not usable, or the pool cannot be allocated.
        """
        ops = CpuOperations(workspace_bytes=workspace_bytes)
        runner = None
        if self.is_loaded_here:
            model = load_on_host(self.directory, ops, dtype, context_length, num_threads)
            runner = ModelRunner(model, ops, self.geometry(geometry), num_rows=num_rows)
        return DraftModel(
            runner,
            draft_vocabulary=self.description.vocab_size,
            vocabulary=vocabulary,
            device=ops.device,
            parallel=parallel,
        )


def draft_plan(config: ServerConfig, parallel: ParallelGroup) -> DraftPlan | None:
    """The draft model of the configuration; None without one."""
    directory = config.speculative_draft_model_path
    if directory is None:
        return None
    return DraftPlan(directory, read_description(directory), parallel.rank == 0)
