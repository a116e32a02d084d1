"""The draft model or draft head of a host or a device: what it takes, and how it is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.adapters.cpu import CpuOperations
from sglang_lite.config import ServerConfig
from sglang_lite.execution.build import kv_geometry
from sglang_lite.execution.build_host import load_on_host
from sglang_lite.execution.draft_head import HeadDrafter, HiddenShape, HostHeadPass
from sglang_lite.execution.draft_model import DraftModel
from sglang_lite.execution.model_runner import ModelRunner
from sglang_lite.layers.parallel import ParallelGroup
from sglang_lite.models.base import CausalLanguageModel
from sglang_lite.models.dense import DenseDecoder
from sglang_lite.models.description import ModelDescription, read_description
from sglang_lite.models.draft_head import load_draft_head
from sglang_lite.models.draft_head_config import DraftHeadDescription
from sglang_lite.models.draft_settings import draft_head
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

    def bytes_per_token(self, dtype: torch.dtype, page_size: int) -> int:
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
        target: CausalLanguageModel,
    ) -> DraftModel:
        """Load it, where it is loaded.

        Args:
            target: the served model, which a draft model does not need.
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


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """A draft head before it is loaded; it reads the hidden states of a model that is whole on this rank."""

    head: DraftHeadDescription

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Memory of its parameters."""
        return sum(math.prod(shape) for shape in self.head.tensors().values()) * dtype.itemsize

    def geometry(self, geometry: KVGeometry) -> KVGeometry:
        """Its pool: the pages of the served model's, with one layer."""
        return kv_geometry(self.head.decoder.kv, geometry.num_pages, geometry.page_size, geometry.dtype)

    def bytes_per_token(self, dtype: torch.dtype, page_size: int) -> int:
        """KV of a token, and its share of the hidden state that is kept for its page."""
        hidden_bytes = self.head.decoder.hidden_size * dtype.itemsize
        return kv_geometry(self.head.decoder.kv, 1, 1, dtype).bytes_per_token + -(-hidden_bytes // page_size)

    def hidden_shape(
        self, geometry: KVGeometry, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> HiddenShape:
        """The hidden states it keeps beside a pool of that geometry."""
        hidden_size = self.head.decoder.hidden_size
        return HiddenShape(num_rows, geometry.num_pages, geometry.page_size, hidden_size, dtype, device)

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
        target: CausalLanguageModel,
    ) -> HeadDrafter:
        """Load it; see ``DraftPlan.load_on_host``."""
        if not isinstance(target, DenseDecoder):
            raise TypeError(f"{type(target).__name__} has no place for a draft head")
        ops = CpuOperations(workspace_bytes=workspace_bytes)
        head = load_draft_head(self.head, target, ops=ops, dtype=dtype, context_length=context_length)
        head_pass = HostHeadPass(head, ops, self.geometry(geometry))
        return HeadDrafter(head_pass, self.hidden_shape(geometry, num_rows, dtype, ops.device))


def draft_plan(
    config: ServerConfig, description: ModelDescription, directory: Path | str, parallel: ParallelGroup
) -> DraftPlan | HeadPlan | None:
    """The draft model or head of the configuration; None without one.

    Args:
        description, directory: of the served model.
    """
    head = draft_head(config, description, directory)
    if head is not None:
        return HeadPlan(head)
    directory = config.speculative_draft_model_path or ""
    if not directory:
        return None
    return DraftPlan(directory, read_description(directory), parallel.rank == 0)
