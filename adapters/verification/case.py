"""One comparison of a device with the host: inputs, the call, how far the results may lie apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sglang_lite.adapters.base import Operations
from sglang_lite.adapters.dispatch import Target
from sglang_lite.adapters.grammar import GrammarOperations
from sglang_lite.adapters.sampling import SamplingOperations
from sglang_lite.adapters.speculation import SpeculationOperations

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Subject:
    """The operations of one device.

    Attributes:
        operations: of ``adapters.base``.
        sampling: of ``adapters.sampling``, None where sampling is not theirs.
        grammar, speculation: of ``adapters.grammar`` and ``adapters.speculation``, None where there are none.
        target: what providers are chosen for, None on the host, which has everything.
    """

    operations: Operations
    sampling: SamplingOperations | None = None
    grammar: GrammarOperations | None = None
    speculation: SpeculationOperations | None = None
    target: Target | None = None


Call = Callable[[Subject, Tensors], tuple[Tensor, ...]]
"""Runs an operation on tensors of the subject's device; it may write into them."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A result may differ from the host's by ``absolute + relative * |host's|``."""

    absolute: float = 0.0
    relative: float = 0.0


EXACT = Tolerance()


@dataclass(frozen=True, slots=True)
class Case:
    """One operation on one set of inputs.

    Attributes:
        operation: protocol and method, ``Operations.rms_norm``.
        shape: the extents, for people.
        inputs: name -> tensor on the host, in the types of the device.
        call: what is run on both sides. The host gets float16 and bfloat16 inputs as float32, so that it is the more
            exact of the two.
        tolerance: how far a result may lie from the host's.
        expected: what the host's results are taken from instead of ``call``, for results that are drawn.
        also: further protocol methods that the call goes through.
        kernel: an operation of the dispatch table that the call is nothing but: a device for which no wheel has a
            kernel refuses it, and that is not a failure. None: a device must serve the call one way or another.
    """

    operation: str
    shape: str
    inputs: Tensors
    call: Call
    tolerance: Tolerance = EXACT
    expected: Call | None = None
    also: tuple[str, ...] = ()
    kernel: str | None = None


@dataclass(slots=True)
class Source:
    """Where random inputs come from: the same seed gives the same cases on every machine.

    Attributes:
        dtype: of activations and weights.
        seed: of all numbers.
    """

    dtype: torch.dtype
    seed: int
    _generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers in ``dtype``, by default the source's."""
        return (torch.randn(*shape, generator=self._generator) * scale).to(dtype or self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        """float32 in [0, 1)."""
        return torch.rand(*shape, generator=self._generator)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers from ``low`` to ``high`` - 1."""
        return torch.randint(low, high, shape, generator=self._generator, dtype=dtype)

    def permutation(self, length: int) -> Tensor:
        """int64[length], each index once."""
        return torch.randperm(length, generator=self._generator)

    def extent(self, *choices: int) -> int:
        """One of the given sizes."""
        return choices[int(self.integers(0, len(choices), 1))]

    def within(self, absolute: float, relative: float) -> Tolerance:
        """A tolerance in units of the distance between 1 and its neighbour in the source's type."""
        rounding = torch.finfo(self.dtype).eps
        return Tolerance(absolute * rounding, relative * rounding)
