"""Facts about devices, asked of a driver."""

from __future__ import annotations

from typing import Any

from sglang_lite.adapters.device_facts import DeviceFacts, read_driver
from tests.support.fake_driver import FakeDevice, FakeDriver


def test_devices_and_version() -> None:
    driver = FakeDriver([FakeDevice("A", (8, 9), 24 << 30, 128), FakeDevice("B", (9, 0), 80 << 30, 132)], version=12080)
    found = read_driver(lambda: driver)
    assert found.problem is None
    assert found.version == (12, 8)
    assert found.devices == (DeviceFacts(0, "A", (8, 9), 24 << 30, 128), DeviceFacts(1, "B", (9, 0), 80 << 30, 132))
    assert [device.sm for device in found.devices] == [89, 90]


def test_no_driver() -> None:
    def absent() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    found = read_driver(absent)
    assert found.version is None
    assert found.devices == ()
    assert found.problem is not None
    assert "no CUDA driver (libcuda.so.1 cannot be loaded" in found.problem
    assert "install the NVIDIA driver" in found.problem


def test_a_driver_that_does_not_initialise() -> None:
    found = read_driver(lambda: FakeDriver(status=803))
    assert found.version == (13, 0)
    assert found.problem is not None
    assert "cuInit returned 803" in found.problem
    assert "different versions" in found.problem
    unexplained = read_driver(lambda: FakeDriver(status=1)).problem
    assert unexplained is not None
    assert "cuInit returned 1)" in unexplained


def test_no_visible_device() -> None:
    found = read_driver(lambda: FakeDriver([]))
    assert found.problem is not None
    assert "CUDA_VISIBLE_DEVICES" in found.problem
