"""Every family on the CUDA path, the kernels replaced by doubles with their signatures, equals transformers.

The doubles compute in float32 and take latent rows of any width here, so that what differs is planning, page tables
and the order of operations. Prompts stay within the length that needs no choice of keys, which no kernel makes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from sglang_lite.adapters.cuda.operations import CudaOperations
from sglang_lite.adapters.cuda.selection import Selection
from sglang_lite.adapters.dispatch import Target
from sglang_lite.models.registry import load_model
from tests.support.kernel_doubles.checks import Precision
from tests.support.kernel_doubles.everything import installed_everything
from tests.support.model_library import Library
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_checkpoints import CASES

LINES = ("sglang-kernel", "sgl-kernel")
PIECES = (0, 9, 10, 14, 15, 16)
"""A chunk, decode across a page, a chunk behind a prefix, decode."""


@dataclass(frozen=True, slots=True)
class KernelLine:
    """The operations over one kernel line's doubles, for a device of SM 90."""

    name: str
    operations: CudaOperations


@pytest.fixture(params=LINES)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelLine]:
    monkeypatch.setattr(Precision, "allow_float32", True)
    with installed_everything(request.param):
        selection = Selection(Target(90, request.param, has_flashinfer=True))
        yield KernelLine(request.param, CudaOperations(torch.device("cpu"), selection, workspace_bytes=64))


@pytest.mark.parametrize("case", list(CASES))
def test_chunks_and_decode_through_the_kernels(library: Library, kernels: KernelLine, case: str) -> None:
    example, ops = library.example(case), kernels.operations
    runner = PagedRunner(load_model(example.directory, ops=ops, progress=False)[0], ops, page_size=4)
    first, second = runner.new_sequence(), runner.new_sequence()
    runner.step([(second, example.token_ids[:7])])
    outputs, beside = [], []
    for start, stop in itertools.pairwise(PIECES):
        # The second sequence decodes beside the first, so that steps mix chunks and single tokens.
        token = example.token_ids[second.num_tokens : second.num_tokens + 1]
        given = runner.step([(first, example.token_ids[start:stop]), (second, token)])
        outputs.append(given[0])
        beside.append(given[1])
    expected, tolerance = example.logits[: PIECES[-1]], CASES[case].tolerance
    logits = torch.cat(outputs)
    assert (logits - expected).abs().max().item() <= tolerance
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert (torch.cat(beside) - example.logits[7:12]).abs().max().item() <= tolerance
