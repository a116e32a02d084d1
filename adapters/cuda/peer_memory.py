"""Device memory shared between the processes of one machine, through the CUDA runtime."""

from __future__ import annotations

import ctypes

import torch

from sglang_lite.types import StartupError

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
"""``cudaIpcMemLazyEnablePeerAccess``: links are opened with the first use."""


class _Handle(ctypes.Structure):
    """``cudaIpcMemHandle_t``, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class CudaPeerMemory:
    """See ``adapters.collectives.PeerMemory``. Everything happens on the current device.

    Args:
        library: the CUDA runtime; None takes the one that torch has loaded.

    Raises:
        StartupError: there is none, or one of its functions fails.
    """

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self._library = library if library is not None else _runtime()

    def allocate(self, num_bytes: int) -> int:
        """Address of new memory, zero everywhere."""
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self._call("cudaMemset", address, ctypes.c_int(0), ctypes.c_size_t(num_bytes))
        self._call("cudaDeviceSynchronize")
        return address.value or 0

    def export(self, address: int) -> bytes:
        """The 64 bytes that another process opens it by."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Address here of memory that another process exported."""
        address = ctypes.c_void_p()
        given = _Handle((ctypes.c_ubyte * _HANDLE_BYTES).from_buffer_copy(handle))
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value or 0

    def close(self, address: int) -> None:
        """Give back an address from ``open``."""
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def free(self, address: int) -> None:
        """Give back memory from ``allocate``."""
        self._call("cudaFree", ctypes.c_void_p(address))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise StartupError(
                f"{name} failed with CUDA error {code}: this machine does not share device memory between processes "
                "(containers need --ipc=host); start without the all-reduce kernel"
            )


def _runtime() -> ctypes.CDLL:
    version = torch.version.cuda
    if version is None:
        raise StartupError("this torch build has no CUDA runtime to share device memory with")
    name = f"libcudart.so.{version.partition('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise StartupError(f"cannot load {name} to share device memory between processes: {error}") from error
