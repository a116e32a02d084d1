"""The stand-in for captured graphs refuses what a device refuses, and replays what a device replays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.kernel_doubles.capture import CaptureError, Recording, host_only, kernel


def test_replay_reads_memory_and_not_python() -> None:
    x, factor = torch.tensor([1.0, 2.0]), 3.0
    with Recording() as recording:
        result = (x * factor).view(2, 1) + 1
    factor = 100.0
    x.copy_(torch.tensor([10.0, 20.0]))
    recording.replay()
    assert result.flatten().tolist() == [31.0, 61.0]


def test_kernels_are_one_launch() -> None:
    out = torch.zeros(2)

    @kernel
    def launch(x: Tensor) -> None:
        out.copy_(torch.tensor(x.tolist()) * 2)

    x = torch.tensor([1.0, 2.0])
    with Recording() as recording:
        launch(x)
    x.fill_(5.0)
    recording.replay()
    assert out.tolist() == [10.0, 10.0]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: host_only("plan"),
    ],
)
def test_host_reads_are_refused(read: Callable[[Tensor], object]) -> None:
    x = torch.ones(2)
    with pytest.raises(CaptureError), Recording():
        read(x)
    assert x.tolist() == [1.0, 1.0]
