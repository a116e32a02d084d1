"""Linear layers on the host: which memory layout of a weight is fastest is measured, never assumed.

A weight is kept in exactly one layout, so choosing costs no memory. Each layout has one engine, and every engine
computes the product in full precision. NumPy's products are not among them: its threads are not torch's. With torch's
sleeping between operations, a step of 16 rows took a quarter to a third longer through NumPy, though a product of one
row alone was faster; with torch's spinning for a moment there was no clear difference left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PackedWeight = tuple[Tensor, Tensor]
"""A weight packed by MKL, and a tensor without memory that has the weight's shape [out, in]."""

Engine = Callable[[Tensor, Any, Tensor | None], Tensor]
"""(x [rows, in], weight in the engine's layout, bias [out] or None) -> [rows, out]."""

ROW_BUCKETS = (1, 16, 64, 256)
"""Row counts that are measured: one client, a few, many, a prompt."""

_PACKED_FOR_ROWS = 256
"""Row count that MKL's packing is asked for. The packed weight serves any row count; measured, this one is among the
fastest for all of them, and far better than packing for few rows."""

_CHECKED_ROWS = (1, 3, 16, 33, 64, 100, 300)
"""Row counts at which a packed product must equal torch's own before the layout is considered."""

_CHECKED_OUTPUTS = 1000
"""Output features of that product at most: many tiles of any kernel, and the end of one."""

_COPIES_BYTES = 32 << 20
"""Weights measured in turn add up to about this much: in a step every weight comes from memory, not from a cache."""

_MAX_COPIES = 24

_MEMORY_BOUND_ROWS = 32
"""Up to about this many rows, a product waits for its weight."""

_REPEATS = 4
_SECONDS_PER_ROW_COUNT = 0.12
"""Measuring one shape at one row count ends after this long, done or not: a start must stay quick on a busy machine."""

_CLEARLY_SLOWER = 1.4
"""A layout this much slower than the best on its first run is not run again."""

_WORTHWHILE_LAYOUT = 0.93
"""Another layout must cost at most this share of torch's own, since timings on a busy machine are uncertain."""

_MIN_WEIGHTS = 1 << 16
"""Weights smaller than this are not measured: dispatch outweighs the choice."""


def _torch_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Not ``functional.linear``, which comes to the same product through two more dispatches.
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _torch_columns(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _onednn_blocked(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _mkl_packed(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    packed, shape = weight
    # The row count given is always that of ``x``, so the operator never takes its unpacked path.
    product: Tensor = torch.ops.mkl._mkl_linear(x, packed, shape, bias, x.shape[0])
    return product


def _to_mkl_packed(weight: Tensor) -> PackedWeight:
    packed: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
    return packed, weight.new_zeros(()).expand(weight.shape)


def _to_rows(weight: Tensor) -> Tensor:
    return weight.contiguous()


def _to_columns(weight: Tensor) -> Tensor:
    return weight.t().contiguous()


def _to_blocked(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
    return packed


@dataclass(frozen=True, slots=True)
class Layout:
    """A memory layout of a weight: how it is made from [out, in], and the engine that reads it."""

    name: str
    convert: Callable[[Tensor], Any]
    engine: Engine


def available_layouts(dtype: torch.dtype, *, shared: bool) -> list[Layout]:
    """Layouts to consider; torch's own comes first.

    A shared weight stays as it is, so any other layout is a second copy: only one that wins clearly is worth it.
    """
    layouts = [Layout("rows", _to_rows, _torch_rows)]
    if not shared:
        layouts.append(Layout("columns", _to_columns, _torch_columns))
    if torch._C._has_mkldnn and dtype in (torch.float32, torch.bfloat16):
        layouts.append(Layout("blocked", _to_blocked, _onednn_blocked))
    if torch._C.has_mkl and dtype is torch.float32:
        layouts.append(Layout("packed", _to_mkl_packed, _mkl_packed))
    return layouts


def agrees_with_torch(layout: Layout, weight: Tensor) -> bool:
    """Whether a layout gives torch's results for all kinds of row counts.

    MKL documents its packing for one row count. That a packed weight serves any other as well is what every version
    was seen to do, not a promise, so it is tried out before it is relied on.
    """
    weight = weight[:_CHECKED_OUTPUTS]
    converted = layout.convert(weight)
    for rows in _CHECKED_ROWS:
        x = torch.linspace(-1.0, 1.0, rows * weight.shape[1], dtype=weight.dtype).view(rows, -1)
        expected, found = _torch_rows(x, weight, None), layout.engine(x, converted, None)
        if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())):
            return False
    return True


class CpuLinear:
    """A weight in the layout that was chosen for its shape."""

    __slots__ = ("_bias", "_engine", "_weight", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None, layout: Layout) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = layout.convert(weight)
        self._bias = bias
        self._engine = layout.engine

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if x.dim() == 2:
            return self._engine(x, self._weight, self._bias)
        product = self._engine(x.reshape(-1, self.in_features), self._weight, self._bias)
        return product.view(*x.shape[:-1], self.out_features)


class LinearCalibration:
    """Measures the layouts once for each distinct shape and remembers the choice.

    Args:
        measure: False takes torch's own path for everything (tests that compare numbers, tiny models).
    """

    def __init__(self, *, measure: bool = True) -> None:
        self._measure = measure
        self._choices: dict[tuple[int, int, torch.dtype, bool, bool], Layout] = {}

    def choice(self, weight: Tensor, *, has_bias: bool, shared: bool) -> Layout:
        """The layout for weights like this one."""
        out_features, in_features = weight.shape
        key = (out_features, in_features, weight.dtype, has_bias, shared)
        if key not in self._choices:
            self._choices[key] = self._choose(weight, has_bias=has_bias, shared=shared)
        return self._choices[key]

    def _choose(self, weight: Tensor, *, has_bias: bool, shared: bool) -> Layout:
        layouts = available_layouts(weight.dtype, shared=shared)
        if not self._measure or weight.numel() < _MIN_WEIGHTS:
            return layouts[0]
        # A larger weight (an output projection) is a taller one of the same kind: its first rows tell as much.
        weight = weight[: max(1, _COPIES_BYTES // (weight.shape[1] * weight.element_size()))]
        bias = torch.zeros(weight.shape[0], dtype=weight.dtype) if has_bias else None
        copies = max(1, min(_MAX_COPIES, _COPIES_BYTES // (weight.numel() * weight.element_size())))
        layouts = [layout for layout in layouts if layout.name != "packed" or agrees_with_torch(layout, weight)]
        weights: list[list[Any]] = [[weight] if copies == 1 else [weight.clone() for _ in range(copies)]]
        weights += [[layout.convert(weight) for _ in range(copies)] for layout in layouts[1:]]
        timings = []
        for rows in ROW_BUCKETS:
            x = torch.randn(rows, weight.shape[1]).to(weight.dtype)
            deadline = time.perf_counter() + _SECONDS_PER_ROW_COUNT
            # With many rows the arithmetic decides, wherever the weight comes from.
            used = max(1, copies * _MEMORY_BOUND_ROWS // max(rows, _MEMORY_BOUND_ROWS))
            timings.append(time_layouts(layouts, [copied[:used] for copied in weights], x, bias, deadline))
        return choose_layout(layouts, timings)


def time_layouts(
    layouts: list[Layout], weights: list[list[Any]], x: Tensor, bias: Tensor | None, deadline: float
) -> list[float]:
    """Best seconds of each layout at this row count; infinity where the time did not suffice.

    The layouts take turns, so that other load on the machine meets all of them, and the best single run counts,
    which is the one that was disturbed least.

    Args:
        weights: copies of the weight in each layout.
        x: [rows, in].
        deadline: ``time.perf_counter`` after which no further run starts; two of each layout there are in any case.
    """
    best = [float("inf")] * len(layouts)
    for repeat in range(_REPEATS):
        fastest = min(best)
        for index, layout in enumerate(layouts):
            if repeat and best[index] > fastest * _CLEARLY_SLOWER:
                continue
            started = time.perf_counter()
            if started > deadline and repeat > 1:
                return best
            for weight in weights[index]:
                layout.engine(x, weight, bias)
            best[index] = min(best[index], time.perf_counter() - started)
    return best


def choose_layout(layouts: list[Layout], timings: list[list[float]]) -> Layout:
    """The layout that loses least over all row counts; torch's own unless another is clearly better.

    Args:
        layouts: candidates, torch's own first.
        timings: bucket -> layout -> seconds.
    """
    scores = [sum(bucket[index] / min(bucket) for bucket in timings) for index in range(len(layouts))]
    best = min(range(len(layouts)), key=scores.__getitem__)
    return layouts[best if scores[best] <= scores[0] * _WORTHWHILE_LAYOUT else 0]
