"""Steps on a device that is not the host: no tensor of the wrong device, and no wait for the device.

Torch's meta tensors have shapes and types but no numbers: a look at a value from Python raises. ``OneDevice`` adds what
a device checks and they do not, that the tensors of an operation are all its own. Kernels are stand-ins.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.execution.device_runner import DeviceRunner
from sglang_lite.execution.streams import PendingStep
from sglang_lite.models.registry import load_model
from tests.support.kernel_doubles.null import NullDevice, NullOperations
from tests.support.step_plans import PlanMaker, PlannedSequence, sampling_columns
from tests.support.tiny_checkpoints import CASES, save_checkpoint

PAGE_SIZE, NUM_PAGES, NUM_ROWS = 4, 64, 8


class OneDevice(TorchDispatchMode):
    """Raises when an operation mixes host and device, and when a copy to the host is not one that runs later.

    Tensors of no dimensions are numbers to torch and may come from the host.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is torch.ops.aten.copy_.default:
            destination, source = args[:2]
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            if destination.device.type == "cpu" and source.is_meta:
                if not non_blocking:
                    raise RuntimeError("a copy to the host that waits for the device")
                return destination
        elif func is not torch.ops.aten._to_copy.default:
            devices = {tensor.device.type for tensor in tensors if tensor.dim()}
            if len(devices) > 1:
                raise RuntimeError(f"{func} mixes tensors of {', '.join(sorted(devices))}: not on the same device")
        return func(*args, **kwargs)


class MetaDevice(NullDevice):
    """Memory that nobody can read. Host buffers are real, as page-locked memory is."""

    def __init__(self) -> None:
        super().__init__("meta")

    def upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.empty(array.shape, dtype=getattr(torch, str(array.dtype)), device="meta")


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_checkpoint(CASES[request.param], directory)
    return directory


@pytest.fixture
def runner(checkpoint: Path) -> Iterator[DeviceRunner]:
    ops = NullOperations(torch.device("meta"))
    model, description = load_model(checkpoint, ops=ops, dtype=torch.bfloat16, progress=False)
    geometry = KVGeometry(NUM_PAGES, PAGE_SIZE, description.num_layers, 2, description.head_dim, torch.bfloat16)
    made = DeviceRunner(
        model,
        ops,
        MetaDevice(),
        geometry,
        num_rows=NUM_ROWS,
        context_length=64,
        batch_sizes=(1, 2),
        side_by_side=True,
    )
    with OneDevice():
        yield made


def steps(runner: DeviceRunner, **columns: Any) -> list[PendingStep]:
    """A prefill step, a decode step, both at once, and captured decode steps."""
    maker = PlanMaker(PAGE_SIZE, NUM_PAGES)
    sequences = [PlannedSequence(row) for row in range(3)]

    def parameters(count: int) -> Any:
        return sampling_columns(count, **columns)

    launched = [
        runner.launch(maker.plan([], [(sequences[0], [1] * 5), (sequences[1], [2])], sampling=parameters(2))),
        runner.launch(maker.plan(sequences[:2], sampling=parameters(2))),
        runner.launch(maker.plan(sequences[:2], [(sequences[2], [3] * 6)], sampling=parameters(3))),
    ]
    if not runner.captured_batch_sizes:
        runner.capture()
    launched += [runner.launch(maker.plan(sequences[:count], sampling=parameters(count))) for count in (1, 2, 3)]
    assert all(isinstance(step, PendingStep) for step in launched)
    return launched  # type: ignore[return-value]


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 0.7, "seed": 3},
        {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1},
        {"logit_bias": {0: {3: 1.5, 4: -2.0}}},
    ],
    ids=["greedy", "filtered", "seeded", "penalized", "biased"],
)
def test_nothing_waits_and_nothing_is_misplaced(runner: DeviceRunner, columns: dict[str, Any]) -> None:
    assert [step.num_tokens for step in steps(runner, **columns)] == [2, 2, 3, 1, 2, 3]


def test_the_check_notices_a_wait(runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(runner)._sample

    def looking(self: DeviceRunner, plan: Any, logits: Tensor, rows: Tensor) -> Tensor:
        bool(logits.isfinite().all())
        return real(self, plan, logits, rows)

    monkeypatch.setattr(type(runner), "_sample", looking)
    with pytest.raises(RuntimeError, match=r"(?i)meta tensor"):
        steps(runner)


def test_the_check_notices_a_host_tensor(runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(runner)._sample

    def misplaced(self: DeviceRunner, plan: Any, logits: Tensor, rows: Tensor) -> Tensor:
        return real(self, plan, logits.index_select(0, torch.zeros(len(rows), dtype=torch.int64)), rows)

    monkeypatch.setattr(type(runner), "_sample", misplaced)
    with pytest.raises(RuntimeError, match="not on the same device"):
        steps(runner)
