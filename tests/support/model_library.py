"""Tiny checkpoints with their transformers results, made on first use and kept for a test run."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sglang_lite.adapters.base import Operations
from sglang_lite.adapters.cpu import CpuOperations
from sglang_lite.models.base import CausalLanguageModel
from sglang_lite.models.registry import load_model
from tests.support.reference_operations import ReferenceOperations
from tests.support.tiny_checkpoints import CASES, save_checkpoint

NUM_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Example:
    """A saved checkpoint, its model in transformers and the logits of one prompt.

    Attributes:
        directory: the checkpoint.
        oracle: the transformers model.
        token_ids: the prompt.
        logits: float32[tokens, vocab], the oracle's full pass over it.
    """

    directory: Path
    oracle: PreTrainedModel
    token_ids: list[int]
    logits: Tensor


def full_pass(oracle: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """float32[tokens, vocab] of transformers in one pass, without a cache."""
    with torch.no_grad():
        logits: Tensor = oracle(torch.tensor([token_ids])).logits[0]
    return logits


@dataclass(slots=True)
class Library:
    """Makes examples on first use and loads each into each kind of operations once."""

    root: Path
    operations: dict[str, Operations] = field(
        default_factory=lambda: {"reference": ReferenceOperations(), "cpu": CpuOperations()}
    )
    _examples: dict[str, Example] = field(default_factory=dict)
    _models: dict[tuple[str, str], CausalLanguageModel] = field(default_factory=dict)

    def example(self, case: str) -> Example:
        if case not in self._examples:
            directory = self.root / case
            oracle = save_checkpoint(CASES[case], directory)
            generator = torch.Generator().manual_seed(zlib.crc32(case.encode()))  # whatever else runs
            token_ids = torch.randint(3, 128, (NUM_TOKENS,), generator=generator).tolist()
            self._examples[case] = Example(directory, oracle, token_ids, full_pass(oracle, token_ids))
        return self._examples[case]

    def model(self, case: str, operations: str) -> CausalLanguageModel:
        key = (case, operations)
        if key not in self._models:
            self._models[key] = load_model(self.example(case).directory, ops=self.operations[operations])[0]
        return self._models[key]
