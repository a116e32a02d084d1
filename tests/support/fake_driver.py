"""A CUDA driver without a device: the functions of libcuda that are asked, over given devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FakeDevice:
    """What the driver reports of a device."""

    name: str = "Some Device"
    compute_capability: tuple[int, int] = (9, 0)
    memory_bytes: int = 80 << 30
    multiprocessors: int = 132


class FakeDriver:
    """Has the signatures of ctypes functions: pointers are ``byref`` objects, results are status codes."""

    def __init__(
        self, devices: Sequence[FakeDevice] = (FakeDevice(),), *, version: int = 13000, status: int = 0
    ) -> None:
        self.devices = devices
        self.version = version
        self.status = status

    def cuDriverGetVersion(self, value: Any) -> int:
        value._obj.value = self.version
        return 0

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, value: Any) -> int:
        value._obj.value = len(self.devices)
        return 0

    def cuDeviceGet(self, handle: Any, ordinal: int) -> int:
        handle._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, buffer: Any, length: int, handle: Any) -> int:
        buffer.value = self.devices[handle.value].name.encode()[: length - 1]
        return 0

    def cuDeviceTotalMem_v2(self, value: Any, handle: Any) -> int:
        value._obj.value = self.devices[handle.value].memory_bytes
        return 0

    def cuDeviceGetAttribute(self, value: Any, which: int, handle: Any) -> int:
        device = self.devices[handle.value]
        major, minor = device.compute_capability
        value._obj.value = {75: major, 76: minor, 16: device.multiprocessors}[which]
        return 0
