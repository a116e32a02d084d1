"""From a configuration to an executor on an accelerator, over the host's stand-ins for device and kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_lite.adapters.capability import CapabilityRecord, capability_record
from sglang_lite.adapters.device_facts import CudaDriver, DeviceFacts
from sglang_lite.adapters.kernel_lines import installed_kernels as wheels_of
from sglang_lite.config import ServerConfig
from sglang_lite.configuration.loading import load_config
from sglang_lite.execution import build_device
from sglang_lite.execution.build import build_executor
from sglang_lite.execution.build_device import build_device_runner
from sglang_lite.execution.device_executor import DeviceExecutor
from sglang_lite.execution.device_runner import DeviceRunner
from sglang_lite.execution.executor import TorchExecutor
from sglang_lite.layers.parallel import SingleRank
from sglang_lite.models.description import read_description
from sglang_lite.types import StartupError
from tests.support.host_device import HostDevice
from tests.support.kernel_doubles import installed_kernels
from tests.support.step_plans import PlanMaker, PlannedSequence
from tests.support.tiny_checkpoints import CASES, save_checkpoint
from tests.support.tiny_heads import save_eagle_head

WHEELS = {"sglang-kernel": "0.4.10", "flashinfer-python": "0.7.2"}


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_checkpoint(CASES["llama"], directory)
    return directory


@pytest.fixture(scope="module")
def first_token(tiny_llama: Path) -> int:
    """What the host continues the prompt [1] with, in the same element type."""
    config = ServerConfig(model_path=str(tiny_llama), device="cpu", dtype="bfloat16", max_total_tokens=64)
    executor, limits = build_executor(config, read_description(tiny_llama))
    maker = PlanMaker(limits.geometry.page_size, limits.geometry.num_pages)
    executor.submit(maker.plan([], [(PlannedSequence(0), [1])]))
    token = int(executor.collect().tokens[0])
    executor.close()
    return token


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with installed_kernels():
        yield


def record(compute_capability: tuple[int, int] = (9, 0), wheels: dict[str, str] = WHEELS) -> CapabilityRecord:
    facts = DeviceFacts(0, "Some Device", compute_capability, 80 << 30, 132)
    return capability_record(facts, wheels_of(wheels.get))


def build(
    model: Path, device: HostDevice | None = None, facts: CapabilityRecord | None = None, **options: Any
) -> build_device.BuiltRunner:
    config = ServerConfig(model_path=str(model), **{"device": "cuda", "max_running_requests": 4, **options})
    return build_device_runner(config, read_description(model), model, device or HostDevice(), facts or record())


def test_a_server_that_starts(tiny_llama: Path, first_token: int) -> None:
    device = HostDevice()
    built = build(tiny_llama, device, cuda_graph_max_bs_decode=3)
    assert isinstance(built.runner, DeviceRunner)
    assert built.runner.captured_batch_sizes == (1, 2, 3) and device.captures == 3
    limits = built.limits
    assert (limits.dtype, limits.kv_dtype, limits.max_running_requests) == ("bfloat16", "bfloat16", 4)
    assert set(limits.startup_seconds) == {"load", "capture"}
    executor = DeviceExecutor(built.runner)
    maker = PlanMaker(limits.geometry.page_size, limits.geometry.num_pages)
    sequences = [PlannedSequence(row) for row in range(2)]
    plans = [maker.plan([], [(sequence, [1]) for sequence in sequences]), maker.plan(sequences)]
    for plan in plans:
        executor.submit(plan)
    assert executor.in_flight == 2
    assert executor.collect().tokens.tolist() == [first_token] * 2
    assert len(executor.collect().tokens) == 2
    executor.close()
    executor.close()


def test_a_draft_model_shares_the_memory(tiny_llama: Path, first_token: int) -> None:
    alone = build(tiny_llama)
    options = {"speculative_algorithm": "standalone", "speculative_draft_model_path": str(tiny_llama)}
    drafted = build(tiny_llama, **options)
    assert drafted.limits.weight_bytes == 2 * alone.limits.weight_bytes
    # Pages of two equal models, from memory that weights of tiny models hardly change.
    assert drafted.limits.geometry.num_pages == pytest.approx(alone.limits.geometry.num_pages / 2, rel=0.01)
    geometry = drafted.limits.geometry
    plan = PlanMaker(geometry.page_size, geometry.num_pages).plan([], [(PlannedSequence(0), [1])])
    assert drafted.runner.run(plan).tokens.tolist() == [first_token]


@pytest.mark.parametrize("algorithm", ["eagle", "nextn"])
def test_a_draft_head_shares_the_memory(tiny_llama: Path, tmp_path: Path, first_token: int, algorithm: str) -> None:
    save_eagle_head(tmp_path)
    alone = build(tiny_llama)
    drafted = build(tiny_llama, speculative_algorithm=algorithm, speculative_draft_model_path=str(tmp_path))
    assert drafted.limits.weight_bytes > alone.limits.weight_bytes
    assert drafted.limits.geometry.num_pages < 0.9 * alone.limits.geometry.num_pages
    geometry = drafted.limits.geometry
    plan = PlanMaker(geometry.page_size, geometry.num_pages).plan([], [(PlannedSequence(0), [1])])
    assert drafted.runner.run(plan).tokens.tolist() == [first_token]


def test_a_step_that_fails_ends_alone(tiny_llama: Path, first_token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_lite.execution.base import ExecutionError

    runner = build(tiny_llama).runner
    assert isinstance(runner, DeviceRunner)
    executor = DeviceExecutor(runner)
    maker = PlanMaker(runner.geometry.page_size, runner.geometry.num_pages)
    good, bad = (maker.plan([], [(PlannedSequence(row), [1])]) for row in range(2))
    real = DeviceRunner.launch

    def launch(self: DeviceRunner, plan: Any) -> Any:
        if plan.step == bad.step:
            raise MemoryError("no room")
        return real(self, plan)

    monkeypatch.setattr(DeviceRunner, "launch", launch)
    for plan in (bad, good):
        executor.submit(plan)
    with pytest.raises(ExecutionError, match=rf"step {bad.step} failed: MemoryError: no room"):
        executor.collect()
    assert executor.wait(5.0) and executor.collect().tokens.tolist() == [first_token]
    executor.close()


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (1, 2, 4)),
        ({"disable_cuda_graph": True}, ()),
        ({"disable_decode_cuda_graph": True}, ()),
        ({"cuda_graph_bs_decode": ["3", "1", "9"]}, (1, 3)),
    ],
)
def test_what_is_captured(tiny_llama: Path, options: dict[str, Any], sizes: tuple[int, ...]) -> None:
    runner = build(tiny_llama, **options).runner
    assert isinstance(runner, DeviceRunner) and runner.captured_batch_sizes == sizes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, "--dtype float32: the kernels"),
        ({"kv_cache_dtype": "float32"}, "--kv-cache-dtype float32: not served"),
        ({"kv_cache_dtype": "bf16", "dtype": "float16"}, "keys and queries need one"),
        ({"cuda_graph_bs_decode": ["0"]}, "--cuda-graph-bs-decode 0"),
        ({"max_total_tokens": 24}, "not a multiple of --page-size"),
        ({"max_total_tokens": 16 << 30}, r"--max-total-tokens asks for .* token slots, which take .* GiB"),
    ],
)
def test_refusals(tiny_llama: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        build(tiny_llama, **options)


def test_everything_that_is_not_served_is_named_before_weights_are_read(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*arguments: object, **keywords: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(build_device, "load_model", unreachable)
    with pytest.raises(StartupError, match=r"norm\.rms \(.*attention\.prefill \(.*attention\.decode \("):
        build(tiny_llama, facts=record(wheels={}))


def test_eight_bit_pool(tiny_llama: Path) -> None:
    built = build(tiny_llama, kv_cache_dtype="fp8_e4m3")
    assert built.limits.geometry.dtype == torch.float8_e4m3fn and built.limits.kv_dtype == "float8_e4m3fn"


def test_the_server_takes_this_path(tiny_llama: Path, first_token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_lite.execution import build as host_build

    monkeypatch.setattr(host_build, "resolve_device", lambda name: name)
    monkeypatch.setattr(build_device, "open_cuda_device", lambda config, rank: (HostDevice(), record()))
    config = ServerConfig(model_path=str(tiny_llama), device="cuda", max_running_requests=2, enable_pdmux=True)
    executor, limits = host_build.build_executor(config, read_description(tiny_llama))
    assert isinstance(executor, DeviceExecutor) and isinstance(executor, TorchExecutor)
    maker = PlanMaker(limits.geometry.page_size, limits.geometry.num_pages)
    sequence = PlannedSequence(0)
    executor.submit(maker.plan([], [(sequence, [1])]))
    executor.submit(maker.plan([sequence], [(PlannedSequence(1), [1])]))
    assert executor.collect().tokens.tolist() == [first_token]
    assert executor.collect().tokens.tolist()[1] == first_token
    executor.close()


def test_the_device_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinals come from the options; a device that is not there or too old is named before anything is allocated."""
    devices = tuple(
        DeviceFacts(ordinal, "Some Device", capability, 80 << 30, 132)
        for ordinal, capability in enumerate([(9, 0), (7, 5), (8, 0)])
    )
    monkeypatch.setattr(build_device, "read_driver", lambda: CudaDriver((13, 0), devices, None))
    monkeypatch.setattr(build_device, "installed_kernels", lambda: wheels_of(WHEELS.get))
    opened: list[int] = []
    monkeypatch.setattr(build_device, "CudaDevice", opened.append)
    config = ServerConfig(device="cuda", tp_size=2, gpu_id_step=2)
    records = [build_device.open_cuda_device(config, rank)[1] for rank in range(2)]
    assert opened == [0, 2] and [found.sm for found in records] == [90, 80]
    with pytest.raises(StartupError, match=r"ordinal 3 for rank 0: the CUDA driver shows 3 devices"):
        build_device.open_cuda_device(ServerConfig(device="cuda", base_gpu_id=3), 0)
    with pytest.raises(StartupError, match=r"compute capability 7\.5"):
        build_device.open_cuda_device(ServerConfig(device="cuda", base_gpu_id=1), 0)
    assert opened == [0, 2]


def test_two_streams_and_several_ranks(tiny_llama: Path) -> None:
    config = ServerConfig(model_path=str(tiny_llama), device="cuda", enable_pdmux=True)
    with pytest.raises(StartupError, match="--enable-pdmux with --tp-size 2"):
        build_device_runner(
            config, read_description(tiny_llama), tiny_llama, HostDevice(), record(), parallel=_TwoRanks()
        )


class _TwoRanks(SingleRank):
    @property
    def size(self) -> int:
        return 2


def test_options_of_captured_steps() -> None:
    given = ["--device", "cuda", "--cuda-graph-max-bs", "32", "--cuda-graph-bs", "1", "8", "--enable-pd-multiplexing"]
    config = load_config(["some/model", *given, "--disable-cuda-graph-padding"])
    assert (config.cuda_graph_max_bs_decode, config.cuda_graph_bs_decode) == (32, ["1", "8"])
    assert config.enable_pdmux and config.disable_cuda_graph_padding and not config.disable_cuda_graph
    assert config.ignored_flags == {} and config.unknown_flags == {}
