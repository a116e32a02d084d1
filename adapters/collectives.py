"""Protocols of communication between the ranks that share a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """Ranks that run the same steps at the same time. Every rank calls the same operations in the same order."""

    @property
    def rank(self) -> int:
        """Of this process, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def expert_parts(self) -> int:
        """Into how many parts the experts of a layer are split."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, written into ``tensor``, which must be contiguous; returns it."""

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensors of all ranks, which have one shape, joined along ``dim`` in the order of the ranks."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """What rank 0 has in ``tensor``, written into everyone's; returns it."""


class PeerMemory(Protocol):
    """Device memory that other processes of the machine can open. Addresses are plain integers."""

    def allocate(self, num_bytes: int) -> int:
        """Address of new memory, zero everywhere."""

    def export(self, address: int) -> bytes:
        """What another process opens it by, of one length for all memory."""

    def open(self, handle: bytes) -> int:
        """Address here of memory that another process exported."""

    def close(self, address: int) -> None:
        """Give back an address from ``open``."""

    def free(self, address: int) -> None:
        """Give back memory from ``allocate``; nobody may have it open any more."""
