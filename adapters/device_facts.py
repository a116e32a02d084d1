"""CUDA devices as their driver describes them, asked through the driver's C interface. Needs no torch.

Asking the driver does not make a context: no memory of a device is taken, and a process that asked may still fork.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76
_MULTIPROCESSOR_COUNT = 16
"""CUdevice_attribute of the driver's interface."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device.

    Attributes:
        ordinal: as the process sees it (``CUDA_VISIBLE_DEVICES`` renumbers).
        name: for people; nothing is decided by it.
        compute_capability: (major, minor).
        memory_bytes: in all, not what is free.
        multiprocessors: streaming multiprocessors.
    """

    ordinal: int
    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int

    @property
    def sm(self) -> int:
        """10 * major + minor."""
        major, minor = self.compute_capability
        return 10 * major + minor


@dataclass(frozen=True, slots=True)
class CudaDriver:
    """What the driver says.

    Attributes:
        version: the newest CUDA version it runs, (major, minor); None without a driver.
        devices: visible devices by ordinal.
        problem: why there is no device to use, None when there is one.
    """

    version: tuple[int, int] | None
    devices: tuple[DeviceFacts, ...]
    problem: str | None


def load_driver_library() -> Any:
    """libcuda.so.1, as untyped as ctypes makes it.

    Raises:
        OSError: it is not there.
    """
    return ctypes.CDLL("libcuda.so.1")


def read_driver(load: Callable[[], Any] = load_driver_library) -> CudaDriver:
    """Ask the driver for its version and its devices.

    Args:
        load: returns the driver's library; raises OSError where there is none.
    """
    try:
        library = load()
    except OSError as error:
        return CudaDriver(
            None,
            (),
            f"no CUDA driver (libcuda.so.1 cannot be loaded: {error}); install the NVIDIA driver, or start the "
            "container with access to its GPUs",
        )
    version = _version(library)
    status = int(library.cuInit(0))
    if status:
        return CudaDriver(version, (), f"the CUDA driver does not initialise (cuInit returned {status}{_hint(status)})")
    count = ctypes.c_int()
    status = int(library.cuDeviceGetCount(ctypes.byref(count)))
    if status or count.value == 0:
        return CudaDriver(version, (), "the CUDA driver sees no device; check CUDA_VISIBLE_DEVICES and nvidia-smi")
    return CudaDriver(version, tuple(_device(library, ordinal) for ordinal in range(count.value)), None)


def _hint(status: int) -> str:
    """What the status codes that people meet mean."""
    meanings = {
        100: "no device",
        802: "the fabric manager is not ready",
        803: "kernel module and driver library are of different versions; reboot or reload the module",
        999: "unknown error; the kernel module may need a reload",
    }
    return f": {meanings[status]}" if status in meanings else ""


def _version(library: Any) -> tuple[int, int] | None:
    value = ctypes.c_int()
    if int(library.cuDriverGetVersion(ctypes.byref(value))):
        return None
    return value.value // 1000, value.value % 1000 // 10


def _device(library: Any, ordinal: int) -> DeviceFacts:
    handle, memory = ctypes.c_int(), ctypes.c_size_t()
    library.cuDeviceGet(ctypes.byref(handle), ordinal)
    name = ctypes.create_string_buffer(256)
    library.cuDeviceGetName(name, len(name), handle)
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        library.cuDeviceGetAttribute(ctypes.byref(value), which, handle)
        return value.value

    return DeviceFacts(
        ordinal=ordinal,
        name=name.value.decode(errors="replace"),
        compute_capability=(attribute(_COMPUTE_CAPABILITY_MAJOR), attribute(_COMPUTE_CAPABILITY_MINOR)),
        memory_bytes=memory.value,
        multiprocessors=attribute(_MULTIPROCESSOR_COUNT),
    )
