"""A double of the all-reduce kernel between threads: memory by address, and ranks that wait for each other."""

from __future__ import annotations

import itertools
import struct
import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.support.kernel_doubles.checks import require

HANDLE_BYTES = 64


@dataclass
class Node:
    """One machine: all memory by address, and a meeting point of its ranks."""

    size: int
    memory: dict[int, Tensor] = field(default_factory=dict)
    opened: dict[int, int] = field(default_factory=dict)
    gathered: dict[int, Tensor] = field(default_factory=dict)
    ranks: dict[int, _Rank] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=20)

    def at(self, address: int) -> Tensor:
        """Memory behind an address of any process."""
        return self.memory[self.opened.get(address, address)]


class NodeMemory:
    """``PeerMemory`` of one rank."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def allocate(self, num_bytes: int) -> int:
        address = next(self._node.numbers) << 32
        self._node.memory[address] = torch.zeros(num_bytes, dtype=torch.uint8)
        return address

    def export(self, address: int) -> bytes:
        return struct.pack("<q", address).ljust(HANDLE_BYTES, b"\xee")

    def open(self, handle: bytes) -> int:
        require(len(handle) == HANDLE_BYTES and handle.endswith(b"\xee"), "not a handle")
        here = next(self._node.numbers) << 32
        (self._node.opened[here],) = struct.unpack_from("<q", handle)
        return here

    def close(self, address: int) -> None:
        del self._node.opened[address]

    def free(self, address: int) -> None:
        require(address not in self._node.opened.values(), "freed while another rank has it open")
        del self._node.memory[address]


class NodeGroup:
    """Collectives of one rank through the node's memory."""

    def __init__(self, node: Node, rank: int) -> None:
        self._node = node
        self.rank = rank
        self.size = node.size
        self.expert_parts = 1
        self.sums = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.sums += 1
        return tensor.copy_(self.all_gather(tensor.unsqueeze(0), 0).sum(0))

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self._node.gathered[self.rank] = tensor.clone()
        self._node.barrier.wait()
        joined = torch.cat([self._node.gathered[rank] for rank in range(self.size)], dim)
        self._node.barrier.wait()
        return joined

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(self.all_gather(tensor.unsqueeze(0), 0)[0])


@dataclass
class _Rank:
    rank: int
    signals: list[int]
    buffers: list[int] = field(default_factory=list)
    captured: list[int] = field(default_factory=list)
    registered: list[list[int]] = field(default_factory=list)


class PeerKernels:
    """The functions of ``sgl_kernel.allreduce`` on one node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.capturing = False

    def meta_size(self) -> int:
        return 4096

    def init_custom_ar(self, ipc_tensors: list[int], rank_data: Tensor, rank: int, full_nvlink: bool) -> int:
        require(len(ipc_tensors) == self.node.size, "init_custom_ar: one signal area a rank")
        require(rank_data.dtype == torch.uint8 and rank_data.numel() >= 8 << 20, "init_custom_ar: rank_data")
        require(ipc_tensors[rank] not in self.node.opened, "init_custom_ar: the own area is the one at its rank")
        for address in ipc_tensors:
            require(self.node.at(address).numel() >= self.meta_size(), "init_custom_ar: too small")
        handle = next(self.node.numbers)
        self.node.ranks[handle] = _Rank(rank, ipc_tensors)
        return handle

    def register_buffer(self, fa: int, fake_ipc_ptrs: list[int]) -> None:
        self.node.ranks[fa].buffers = fake_ipc_ptrs

    def all_reduce(self, fa: int, inp: Tensor, out: Tensor, reg_buffer: int, reg_buffer_sz_bytes: int) -> None:
        rank = self.node.ranks[fa]
        data = inp.reshape(-1).view(torch.uint8)
        require(reg_buffer == rank.buffers[rank.rank], "all_reduce: not the buffer that the peers read")
        require(data.numel() <= reg_buffer_sz_bytes and data.numel() % 16 == 0, "all_reduce: size")
        self.node.at(reg_buffer)[: data.numel()] = data
        if self.capturing:
            rank.captured.append(reg_buffer)
        self.node.barrier.wait()
        parts = [self.node.at(buffer)[: data.numel()].view(inp.dtype).float() for buffer in rank.buffers]
        total = torch.stack(parts).sum(0)
        self.node.barrier.wait()
        out.copy_(total.view(out.shape))

    def get_graph_buffer_ipc_meta(self, fa: int) -> tuple[list[int], list[int]]:
        captured = self.node.ranks[fa].captured
        handles = b"".join(struct.pack("<q", address).ljust(HANDLE_BYTES, b"\xee") for address in captured)
        return list(handles), [7 * index for index in range(len(captured))]

    def register_graph_buffers(self, fa: int, handles: list[list[int]], offsets: list[list[int]]) -> None:
        rank = self.node.ranks[fa]
        require(len(handles) == len(offsets) == self.node.size, "register_graph_buffers: one list a rank")
        for given, places in zip(handles, offsets, strict=True):
            require(len(given) == HANDLE_BYTES * len(places), "register_graph_buffers: 64 bytes a buffer")
            require(places == [7 * index for index in range(len(rank.captured))], "register_graph_buffers: offsets")
            starts = range(0, len(given), HANDLE_BYTES)
            rank.registered.append([struct.unpack_from("<q", bytes(given), start)[0] for start in starts])

    def dispose(self, fa: int) -> None:
        del self.node.ranks[fa]

    def doubles(self) -> dict[str, object]:
        """By public path."""
        names = "meta_size init_custom_ar register_buffer all_reduce get_graph_buffer_ipc_meta register_graph_buffers"
        return {f"sgl_kernel.{name}": getattr(self, name) for name in [*names.split(), "dispose"]}
