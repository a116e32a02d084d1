"""Prefill and decode engines of a real model in one process, with real sessions over sockets between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_lite import DisaggregatedEngine, Engine
from sglang_lite.adapters.capability import CapabilityRecord, capability_record
from sglang_lite.adapters.device_facts import DeviceFacts
from sglang_lite.adapters.kernel_lines import installed_kernels as wheels_of
from sglang_lite.config import ServerConfig
from sglang_lite.disaggregation import build as sessions
from sglang_lite.execution import build as host_build
from sglang_lite.execution import transfer_memory
from sglang_lite.execution.build import BuiltRunner
from sglang_lite.execution.build_device import build_device_runner
from sglang_lite.execution.transfer_memory import location_of, page_reader
from sglang_lite.transfer.base import HOST, KVTransport, RegionLease
from sglang_lite.transfer.factory import open_transport
from sglang_lite.types import RequestError, StartupError
from tests.support.disaggregated_pair import prompt_of
from tests.support.host_device import HostDevice
from tests.support.kernel_doubles import installed_kernels
from tests.support.tiny_checkpoints import CASES, save_checkpoint

SECONDS = 20.0
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "skip_tokenizer_init": True,
    "max_total_tokens": 1024,
    "max_running_requests": 4,
    "chunked_prefill_size": 32,
    "disaggregation_verify_checksums": True,
}
GREEDY = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
PROMPTS = [prompt_of(seed, length) for seed, length in enumerate((5, 32, 150))]


def record() -> CapabilityRecord:
    facts = DeviceFacts(0, "Some Device", (9, 0), 80 << 30, 132)
    wheels = {"sglang-kernel": "0.4.10", "flashinfer-python": "0.7.2"}
    return capability_record(facts, wheels_of(wheels.get))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("model")
    save_checkpoint(CASES["qwen3"], directory)
    return directory


@pytest.fixture(scope="module")
def whole(model: Path) -> Iterator[Engine]:
    with Engine(ServerConfig(model_path=str(model)), **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module", params=["tcp", "mooncake"])
def pair(request: pytest.FixtureRequest, model: Path) -> Iterator[DisaggregatedEngine]:
    with DisaggregatedEngine(model_path=str(model), disaggregation_transfer_backend=request.param, **OPTIONS) as engine:
        yield engine


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_same_tokens_and_scores(pair: DisaggregatedEngine, whole: Engine) -> None:
    """Prompts of less than a page, of whole pages and of many chunks, all at once; the pages come back."""
    calls: Any = {"input_ids": PROMPTS, "sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": 2}
    for told, expected in zip(pair.generate(**calls), whole.generate(**calls), strict=True):
        assert told["output_ids"] == expected["output_ids"]
        mine, theirs = (each["meta_info"]["output_token_logprobs"] for each in (told, expected))
        assert [entry[0] for entry in mine] == pytest.approx([entry[0] for entry in theirs], abs=1e-4)
        assert told["meta_info"]["output_top_logprobs"][0][0][1] == expected["output_ids"][0]
    transfers = pair.prefill_load().transfers
    assert transfers is not None
    assert transfers.spans >= sum(-(-len(prompt) // 16) for prompt in PROMPTS)
    wait_until(pair.flush_cache)
    for load in (pair.load(), pair.prefill_load()):
        assert load.used_tokens == 0


def test_streams_and_choices(pair: DisaggregatedEngine, whole: Engine) -> None:
    expected = whole.generate(input_ids=PROMPTS[1], sampling_params=GREEDY)["output_ids"]
    stream = list(pair.generate(input_ids=PROMPTS[1], sampling_params=GREEDY, stream=True))
    assert len(stream) > 1
    assert stream[-1]["output_ids"] == expected
    choices = pair.generate(input_ids=PROMPTS[1], sampling_params={**GREEDY, "n": 2})
    assert [choice["output_ids"] for choice in choices] == [expected] * 2


def test_a_stream_that_is_given_up_frees_both_sides(pair: DisaggregatedEngine) -> None:
    stream = pair.generate(input_ids=PROMPTS[2], sampling_params={**GREEDY, "max_new_tokens": 80}, stream=True)
    next(stream)
    stream.close()
    wait_until(lambda: pair.load().used_tokens == 0 and pair.prefill_load().num_running == 0)


def test_what_it_does_not_do_is_refused(pair: DisaggregatedEngine, model: Path) -> None:
    with pytest.raises(RequestError, match="logprob_start_len must be -1"):
        pair.generate(input_ids=PROMPTS[0], return_logprob=True, logprob_start_len=0)
    with pytest.raises(StartupError, match="--tp-size 2 must be 1"):
        DisaggregatedEngine(model_path=str(model), **{**OPTIONS, "tp_size": 2})
    with pytest.raises(StartupError, match="use DisaggregatedEngine"):
        Engine(model_path=str(model), disaggregation_mode="decode", **OPTIONS)


class AnyMemory:
    """A transport that reaches memory of the device that stands in for one."""

    def __init__(self, inner: KVTransport) -> None:
        self._inner = inner
        self.locations: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def register(self, addr: int, length: int, location: str) -> RegionLease:
        """See ``KVTransport.register``."""
        self.locations.append(location)
        return self._inner.register(addr, length, HOST)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines run on the stand-ins for a device and its kernels, and their pools are said to lie there."""

    def runner(config: ServerConfig, description: Any, directory: Any, *rest: Any) -> BuiltRunner:
        return build_device_runner(config, description, directory, HostDevice(), record(), *rest)

    monkeypatch.setattr(host_build, "build_runner", runner)
    monkeypatch.setattr(transfer_memory, "location_of", lambda device: "cuda:0")
    with installed_kernels():
        yield


@pytest.mark.usefixtures("device")
def test_pages_of_a_device(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is registered where it lies, and pages are copied to the host for their checksums."""
    transports: list[AnyMemory] = []

    def open_any(name: str, **options: Any) -> Any:
        transports.append(AnyMemory(open_transport(name, **options)))
        return transports[-1]

    monkeypatch.setattr(sessions, "open_transport", open_any)
    calls: Any = {"input_ids": PROMPTS, "sampling_params": GREEDY}
    with Engine(model_path=str(model), **OPTIONS) as engine:
        expected = [each["output_ids"] for each in engine.generate(**calls)]
    with DisaggregatedEngine(model_path=str(model), disaggregation_transfer_backend="tcp", **OPTIONS) as pair:
        assert [each["output_ids"] for each in pair.generate(**calls)] == expected
        transfers = pair.prefill_load().transfers
    assert [transport.locations for transport in transports] == [["cuda:0"], ["cuda:0"]]
    assert transfers is not None
    assert transfers.transfers == len(PROMPTS)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("backend", ["tcp", "mooncake_tcp", "nixl"])
def test_a_transport_that_cannot_reach_the_device_is_refused(model: Path, backend: str) -> None:
    with pytest.raises(StartupError, match=r"cannot reach memory at cuda:0; it reaches host"):
        DisaggregatedEngine(model_path=str(model), disaggregation_transfer_backend=backend, **OPTIONS)


def test_how_a_pool_is_read() -> None:
    pool = torch.arange(48, dtype=torch.bfloat16).reshape(3, 1, 2, 2, 1, 4)
    read = page_reader(pool)
    assert b"".join(read(page) for page in range(3)) == pool.view(torch.uint8).numpy().tobytes()
    assert [location_of(torch.device(name)) for name in ("cpu", "cuda", "cuda:3")] == [HOST, "cuda:0", "cuda:3"]
