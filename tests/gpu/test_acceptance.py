"""Every operation of the device against the host's, and the report of the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from sglang_lite import environment
from sglang_lite.acceptance import DTYPES, SEEDS
from sglang_lite.adapters.verification import FAMILIES, Case, Source, Status, Subject, host_subject, verify

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def subject(request: pytest.FixtureRequest) -> tuple[Subject, torch.dtype]:
    """The first device, with everything that is installed."""
    from sglang_lite.adapters.cuda.subject import cuda_subject

    here = environment.Environment()
    return cuda_subject(here.driver().devices[0], here.kernels(), request.param), request.param


@pytest.mark.timeout(1800)  # kernels that are compiled on first use take minutes
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_operations(subject: tuple[Subject, torch.dtype], family: Callable[[Source], Iterator[Case]]) -> None:
    device, dtype = subject
    outcomes = list(verify(device, host_subject(), [family], dtypes=[dtype], seeds=SEEDS))
    assert [outcome for outcome in outcomes if outcome.status in (Status.FAIL, Status.ERROR)] == []
    assert any(outcome.status is Status.PASS for outcome in outcomes)


def test_the_report_finds_the_machine_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert environment.report() == 0, capsys.readouterr().out
