"""Sums over the ranks of one machine by ``sgl_kernel``'s all-reduce, which reads the peers' memory directly.

Small sums are what decoding waits for, and the kernel makes one of up to 8 MiB in a few microseconds. Everything else
goes to the group that it is built over (torch.distributed).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.collectives import Collectives, PeerMemory
from sglang_lite.adapters.cuda.selection import Selection
from sglang_lite.adapters.cuda.wheels import Wheels
from sglang_lite.adapters.dispatch import TABLE, Package, why_not

GROUP_SIZES = (2, 4, 6, 8)
MAX_BYTES = 8 << 20
"""Larger sums are faster by rings."""

PACK_BYTES = 16
"""The kernel reads packs of this size."""

_RANK_DATA_BYTES = 8 << 20
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_OFFSET = struct.Struct("<q")


class PeerAllReduce:
    """The kernel and its memory: a signal area and a buffer on every rank, opened by all others.

    Args:
        wheels: the modules.
        selection: what the dispatch table chooses for this device.
        base: the group, with which addresses are exchanged.
        memory: of this rank's device.
        device: of this rank.
        full_nvlink: every pair of devices has a direct link. Without it the kernel serves two ranks only.

    Raises:
        OperationInputError: a group that the kernel does not serve.
    """

    def __init__(
        self,
        wheels: Wheels,
        selection: Selection,
        base: Collectives,
        memory: PeerMemory,
        device: torch.device,
        *,
        full_nvlink: bool,
    ) -> None:
        problem = peer_refusal(selection, base.size, full_nvlink=full_nvlink)
        if problem is not None:
            raise OperationInputError(problem)
        self._kernels: Any = wheels.sgl_kernel
        self._base = base
        self._memory = memory
        self._device = device
        self._signals = self._shared(self._kernels.meta_size() + MAX_BYTES)
        self._buffers = self._shared(MAX_BYTES)
        # Holds the addresses of the peers' buffers, those of captured graphs too.
        self._rank_data = torch.empty(_RANK_DATA_BYTES, dtype=torch.uint8, device=device)
        self._handle: int = self._kernels.init_custom_ar(self._signals, self._rank_data, base.rank, full_nvlink)
        self._kernels.register_buffer(self._handle, self._buffers)

    def takes(self, tensor: Tensor) -> bool:
        """Whether the kernel sums this tensor."""
        num_bytes = tensor.numel() * tensor.element_size()
        return (
            tensor.dtype in _DTYPES
            and tensor.is_contiguous()
            and 0 < num_bytes <= MAX_BYTES
            and num_bytes % PACK_BYTES == 0
        )

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """In place: the input is copied to this rank's buffer first, from which the peers read."""
        buffer = self._buffers[self._base.rank]
        self._kernels.all_reduce(self._handle, tensor, tensor, buffer, MAX_BYTES)
        return tensor

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Around the capture of graphs that sum. Afterwards the ranks tell each other what the graphs read.

        Every rank captures the same sums in the same order.
        """
        yield
        handles, offsets = self._kernels.get_graph_buffer_ipc_meta(self._handle)
        packed = struct.pack("<q", len(offsets)) + bytes(handles) + b"".join(map(_OFFSET.pack, offsets))
        all_handles, all_offsets = [], []
        for data in self._exchange(packed):
            (count,) = _OFFSET.unpack_from(data)
            end = len(data) - count * _OFFSET.size
            all_handles.append(list(data[_OFFSET.size : end]))
            all_offsets.append([offset for (offset,) in _OFFSET.iter_unpack(data[end:])])
        self._kernels.register_graph_buffers(self._handle, all_handles, all_offsets)

    def close(self) -> None:
        """Give the memory back. Every rank calls it, after its last sum."""
        self._kernels.dispose(self._handle)
        for addresses in (self._signals, self._buffers):
            for rank, address in enumerate(addresses):
                if rank != self._base.rank:
                    self._memory.close(address)
        self._exchange(b"\0" * _OFFSET.size)  # nobody frees before everybody has closed
        for addresses in (self._signals, self._buffers):
            self._memory.free(addresses[self._base.rank])

    def _shared(self, num_bytes: int) -> list[int]:
        """Addresses here of one buffer on each rank, by rank."""
        own = self._memory.allocate(num_bytes)
        handles = self._exchange(self._memory.export(own))
        return [own if rank == self._base.rank else self._memory.open(handle) for rank, handle in enumerate(handles)]

    def _exchange(self, data: bytes) -> list[bytes]:
        """Everyone's bytes, of one length, by rank."""
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        received = self._base.all_gather(sent, 0).cpu().view(self._base.size, -1)
        return [bytes(row.tolist()) for row in received]


class PeerGroup:
    """A group whose small sums go through peers' memory. See ``adapters.collectives.Collectives``."""

    def __init__(self, base: Collectives, peers: PeerAllReduce) -> None:
        self._base = base
        self._peers = peers

    @property
    def rank(self) -> int:
        """Of this process."""
        return self._base.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._base.size

    @property
    def expert_parts(self) -> int:
        """Into how many parts the experts are split."""
        return self._base.expert_parts

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        return self._peers.all_reduce(tensor) if self._peers.takes(tensor) else self._base.all_reduce(tensor)

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Everyone's tensor, joined along ``dim``."""
        return self._base.all_gather(tensor, dim)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, in place."""
        return self._base.broadcast(tensor)


def peer_refusal(selection: Selection, size: int, *, full_nvlink: bool) -> str | None:
    """None when the kernel serves a group of this size on one machine, else why not."""
    if size not in GROUP_SIZES:
        return f"the all-reduce kernel serves {', '.join(map(str, GROUP_SIZES))} ranks, not {size}"
    if size > 2 and not full_nvlink:
        return f"the all-reduce kernel serves {size} ranks only where every pair of devices has a direct NVLink"
    for provider in TABLE["collective.all_reduce"].providers:
        if provider.package is Package.SGL_KERNEL:
            return why_not(provider, selection.target, "bfloat16")
    return "the dispatch table has no all-reduce kernel"
