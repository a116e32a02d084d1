"""The parallel group over torch.distributed: NCCL between CUDA devices, gloo between processes on hosts."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from sglang_lite.types import StartupError

JOIN_SECONDS = 600.0
"""How long the ranks wait for each other at the start (the slowest one has to load its libraries)."""


class TorchGroup:
    """See ``layers.parallel.ParallelGroup``.

    Args:
        rank, size: of this process in torch's default process group, which is initialised.
        expert_parts: into how many parts the experts are split (``--ep-size``).
    """

    def __init__(self, rank: int, size: int, *, expert_parts: int = 1) -> None:
        self._rank = rank
        self._size = size
        self._expert_parts = expert_parts

    @property
    def rank(self) -> int:
        """Of this process."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    @property
    def expert_parts(self) -> int:
        """Into how many parts the experts are split."""
        return self._expert_parts

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Everyone's tensor, joined along ``dim``."""
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self._size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, in place."""
        dist.broadcast(tensor, src=0)
        return tensor


def join_group(
    store: Store, rank: int, size: int, device: torch.device, *, expert_parts: int = 1, on_one_machine: bool
) -> TorchGroup:
    """Wait for the other ranks and connect to them. The choice of library is the device's.

    Args:
        store: where the ranks find each other.
        device: of this rank.
        on_one_machine: every rank runs here, so host traffic stays on the loopback interface.

    Raises:
        StartupError: torch has no NCCL though the device needs it, or the others did not come.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and not dist.is_nccl_available():
        raise StartupError(f"--tp-size {size} on CUDA needs NCCL, which this torch does not have; install a CUDA build")
    if backend == "gloo" and on_one_machine:
        # Without it gloo resolves the host's name, which containers often cannot.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=JOIN_SECONDS),
            device_id=device if backend == "nccl" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise StartupError(f"tensor parallel rank {rank} of {size} cannot join the others: {error}") from error
    return TorchGroup(rank, size, expert_parts=expert_parts)


def leave_group() -> None:
    """Disconnect from the other ranks, if this process ever joined them."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
