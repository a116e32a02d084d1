"""Sums through peers' memory, with threads as ranks and a double of the kernel."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cuda import collectives
from sglang_lite.adapters.cuda.collectives import PeerAllReduce, PeerGroup, peer_refusal
from sglang_lite.adapters.cuda.peer_memory import CudaPeerMemory
from sglang_lite.adapters.cuda.selection import Selection
from sglang_lite.adapters.cuda.wheels import load_wheels
from sglang_lite.adapters.dispatch import Target
from sglang_lite.types import StartupError
from tests.support.kernel_doubles.peers import Node, NodeGroup, NodeMemory, PeerKernels
from tests.support.kernel_stubs import installed_stubs

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "MAX_BYTES", 1024)


LINE = "sglang-kernel"
SELECTION = Selection(Target(90, LINE, has_flashinfer=True))


def on_ranks(size: int, work: Callable[[NodeGroup, PeerAllReduce], object]) -> tuple[list[object], Node]:
    """Run ``work`` on every rank at once."""
    node = Node(size)
    kernels = PeerKernels(node)

    def run(rank: int) -> object:
        group = NodeGroup(node, rank)
        peers = PeerAllReduce(load_wheels(), SELECTION, group, NodeMemory(node), HOST, full_nvlink=True)
        result = work(group, peers)
        peers.close()
        return result

    with installed_stubs(LINE, kernels.doubles()), ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size))), node


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_sums_go_through_the_kernel(size: int, dtype: torch.dtype) -> None:
    def work(group: NodeGroup, peers: PeerAllReduce) -> tuple[Tensor, Tensor, int]:
        shared = PeerGroup(group, peers)
        first = shared.all_reduce(torch.full((2, 16), float(group.rank + 1)).to(dtype))
        second = shared.all_reduce(torch.arange(16.0).to(dtype) * group.rank)
        return first, second, group.sums

    results, _ = on_ranks(size, work)
    for first, second, sums in results:  # type: ignore[misc]  # what work returns
        assert first.unique().tolist() == [sum(range(1, size + 1))]
        assert torch.equal(second, (torch.arange(16.0) * sum(range(size))).to(dtype))
        assert sums == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(512),  # too large
        torch.ones(3),  # no whole packs
        torch.ones(8, dtype=torch.float64),
        torch.ones(8, 16)[:, :4],  # strided
    ],
    ids=["large", "ragged", "float64", "strided"],
)
def test_other_sums_go_to_the_group(tensor: Tensor) -> None:
    def work(group: NodeGroup, peers: PeerAllReduce) -> tuple[Tensor, int]:
        return PeerGroup(group, peers).all_reduce(tensor.clone(memory_format=torch.preserve_format)), group.sums

    if tensor.is_contiguous():
        results, _ = on_ranks(2, work)
        assert all(sums == 1 and torch.equal(total, tensor * 2) for total, sums in results)  # type: ignore[misc]
    else:
        results, _ = on_ranks(2, lambda group, peers: peers.takes(tensor))
        assert results == [False, False]


def test_the_rest_is_the_groups() -> None:
    def work(group: NodeGroup, peers: PeerAllReduce) -> tuple[object, ...]:
        shared = PeerGroup(group, peers)
        mine = torch.tensor([float(shared.rank)])
        return shared.all_gather(mine, 0).tolist(), shared.broadcast(mine).tolist(), shared.size, shared.expert_parts

    results, _ = on_ranks(2, work)
    assert results == [([0.0, 1.0], [0.0], 2, 1)] * 2


def test_ranks_tell_each_other_what_graphs_read() -> None:
    node = Node(2)
    kernels = PeerKernels(node)
    seen = {}

    def run(rank: int) -> None:
        group = NodeGroup(node, rank)
        peers = PeerAllReduce(load_wheels(), SELECTION, group, NodeMemory(node), HOST, full_nvlink=False)
        with peers.capturing():
            peers.all_reduce(torch.ones(16))
            peers.all_reduce(torch.ones(16))
        (seen[rank],) = [state for state in list(node.ranks.values()) if state.rank == rank]

    kernels.capturing = True
    with installed_stubs(LINE, kernels.doubles()), ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    own = [seen[rank].captured for rank in range(2)]
    assert len(own[0]) == 2 and own[0] != own[1]
    assert seen[0].registered == seen[1].registered == own


def test_memory_is_given_back() -> None:
    _, node = on_ranks(4, lambda group, peers: peers.all_reduce(torch.ones(8)))
    assert not node.memory and not node.opened and not node.ranks


def test_groups_that_the_kernel_does_not_serve() -> None:
    assert peer_refusal(SELECTION, 2, full_nvlink=False) is None
    assert "2, 4, 6, 8 ranks, not 3" in str(peer_refusal(SELECTION, 3, full_nvlink=True))
    assert "direct NVLink" in str(peer_refusal(SELECTION, 4, full_nvlink=False))
    older = Selection(Target(90, "sgl-kernel", has_flashinfer=True))
    assert "does not have it" in str(peer_refusal(older, 2, full_nvlink=True))
    node = Node(3)
    with installed_stubs(LINE), pytest.raises(OperationInputError, match="not 3"):
        PeerAllReduce(load_wheels(), SELECTION, NodeGroup(node, 0), NodeMemory(node), HOST, full_nvlink=True)


class Runtime(SimpleNamespace):
    """The functions of the CUDA runtime; memory is the process's own, a handle holds its address."""

    def __init__(self) -> None:
        super().__init__(blocks={}, closed=[], freed=[])

    def cudaMalloc(self, address: object, size: ctypes.c_size_t) -> int:
        block = ctypes.create_string_buffer(os.urandom(size.value), size.value)
        where = ctypes.addressof(block)
        self.blocks[where] = block
        ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))[0] = where  # type: ignore[call-overload, arg-type]
        return 0

    def cudaMemset(self, address: ctypes.c_void_p, value: ctypes.c_int, size: ctypes.c_size_t) -> int:
        ctypes.memset(address.value or 0, value.value, size.value)
        return 0

    def cudaDeviceSynchronize(self) -> int:
        return 0

    def cudaIpcGetMemHandle(self, handle: object, address: ctypes.c_void_p) -> int:
        ctypes.memmove(handle, (address.value or 0).to_bytes(64, "little"), 64)  # type: ignore[arg-type]
        return 0

    def cudaIpcOpenMemHandle(self, address: object, handle: ctypes.Structure, flags: ctypes.c_uint) -> int:
        assert flags.value == 1
        where = int.from_bytes(bytes(handle), "little")
        ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))[0] = where  # type: ignore[call-overload, arg-type]
        return 0

    def cudaIpcCloseMemHandle(self, address: ctypes.c_void_p) -> int:
        self.closed.append(address.value)
        return 0

    def cudaFree(self, address: ctypes.c_void_p) -> int:
        self.freed.append(address.value)
        return 0


def test_memory_of_the_cuda_runtime() -> None:
    runtime = Runtime()
    memory = CudaPeerMemory(runtime)  # type: ignore[arg-type]
    address = memory.allocate(100)
    assert ctypes.string_at(address, 100) == bytes(100)
    handle = memory.export(address)
    assert len(handle) == 64
    assert memory.open(handle) == address
    memory.close(address)
    memory.free(address)
    assert runtime.closed == runtime.freed == [address]


def test_a_failure_of_the_cuda_runtime_is_named() -> None:
    runtime = Runtime()
    runtime.cudaMalloc = lambda *arguments: 2  # type: ignore[method-assign]
    with pytest.raises(StartupError, match="cudaMalloc failed with CUDA error 2"):
        CudaPeerMemory(runtime).allocate(8)  # type: ignore[arg-type]
