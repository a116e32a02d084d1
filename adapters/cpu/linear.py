"""Linear layers on the host: which library, on which memory layout, is fastest is measured, never assumed.

A weight is kept in exactly one layout, so choosing costs no memory. For each layout several engines compute the same
product in full precision; the fastest of each row count is looked up at call time.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Engine = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [rows, in], weight in the engine's layout, bias [out] or None) -> [rows, out]."""

ROW_BUCKETS = (1, 16, 64)
"""Row counts that are measured; a call uses the choice of the next larger one, or of the last."""

_COPIES_BYTES = 8 << 20
"""Weights measured in turn add up to about this much, so that they do not all sit in the nearest cache."""

_REPEATS = 6
_SECONDS_PER_ROW_COUNT = 0.08
"""Measuring one shape at one row count ends after this long, done or not: a start must stay quick on a busy machine."""

_CLEARLY_SLOWER = 1.4
"""An engine this much slower than the best on its first run is not run again."""

_WORTHWHILE_LAYOUT = 0.93
"""Another layout must cost at most this share of torch's own, since timings on a busy machine are uncertain."""

_WORTHWHILE_ENGINE = 0.8
"""NumPy must cost at most this share of torch: it brings threads of its own, and two pools that wait for each other's
processors lose far more than a better kernel gains once other work runs beside them."""

_MIN_WEIGHTS = 1 << 16
"""Weights smaller than this are not measured: dispatch outweighs the choice."""


def _torch_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Not ``functional.linear``, which comes to the same product through two more dispatches.
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _numpy_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = torch.from_numpy(np.matmul(x.numpy(), weight.numpy().T))
    return product if bias is None else product.add_(bias)


def _torch_columns(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def _numpy_columns(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = torch.from_numpy(np.matmul(x.numpy(), weight.numpy()))
    return product if bias is None else product.add_(bias)


def _onednn_blocked(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _to_rows(weight: Tensor) -> Tensor:
    return weight.contiguous()


def _to_columns(weight: Tensor) -> Tensor:
    return weight.t().contiguous()


def _to_blocked(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)
    return packed


@dataclass(frozen=True, slots=True)
class Layout:
    """A memory layout of a weight: how it is made from [out, in], and the engines that read it."""

    name: str
    convert: Callable[[Tensor], Tensor]
    engines: tuple[Engine, ...]


@dataclass(frozen=True, slots=True)
class LinearChoice:
    """A layout and the engine for each of ``ROW_BUCKETS``."""

    layout: Layout
    engines: tuple[Engine, ...]


def available_layouts(dtype: torch.dtype, *, shared: bool) -> list[Layout]:
    """Layouts to consider; torch's own comes first. A shared weight stays as it is."""
    has_numpy = dtype == torch.float32
    layouts = [Layout("rows", _to_rows, (_torch_rows, _numpy_rows) if has_numpy else (_torch_rows,))]
    if not shared:
        engines = (_torch_columns, _numpy_columns) if has_numpy else (_torch_columns,)
        layouts.append(Layout("columns", _to_columns, engines))
        if torch._C._has_mkldnn and dtype in (torch.float32, torch.bfloat16):
            layouts.append(Layout("blocked", _to_blocked, (_onednn_blocked,)))
    return layouts


class CpuLinear:
    """A weight in the layout that was chosen for its shape."""

    __slots__ = ("_bias", "_engines", "_weight", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None, choice: LinearChoice) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = choice.layout.convert(weight)
        self._bias = bias
        self._engines = choice.engines

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        engine = self._engines[min(bisect_left(ROW_BUCKETS, rows.shape[0]), len(ROW_BUCKETS) - 1)]
        product = engine(rows, self._weight, self._bias)
        return product if x.dim() == 2 else product.view(*x.shape[:-1], self.out_features)


class LinearCalibration:
    """Measures the layouts and engines once for each distinct shape and remembers the choice.

    Args:
        measure: False takes torch's own path for everything (tests that compare numbers, tiny models).
    """

    def __init__(self, *, measure: bool = True) -> None:
        self._measure = measure
        self._choices: dict[tuple[int, int, torch.dtype, bool, bool], LinearChoice] = {}

    def choice(self, weight: Tensor, *, has_bias: bool, shared: bool) -> LinearChoice:
        """The layout and engines for weights like this one."""
        out_features, in_features = weight.shape
        key = (out_features, in_features, weight.dtype, has_bias, shared)
        if key not in self._choices:
            self._choices[key] = self._choose(weight, has_bias=has_bias, shared=shared)
        return self._choices[key]

    def _choose(self, weight: Tensor, *, has_bias: bool, shared: bool) -> LinearChoice:
        layouts = available_layouts(weight.dtype, shared=shared)
        if not self._measure or weight.numel() < _MIN_WEIGHTS:
            plain = layouts[0]
            return LinearChoice(plain, (plain.engines[0],) * len(ROW_BUCKETS))
        bias = torch.zeros(weight.shape[0], dtype=weight.dtype) if has_bias else None
        copies = max(1, min(4, _COPIES_BYTES // (weight.numel() * weight.element_size())))
        weights = [[weight] if copies == 1 else [weight.clone() for _ in range(copies)]]
        weights += [[layout.convert(weight) for _ in range(copies)] for layout in layouts[1:]]
        timings = []
        for rows in ROW_BUCKETS:
            x = torch.randn(rows, weight.shape[1]).to(weight.dtype)
            deadline = time.perf_counter() + _SECONDS_PER_ROW_COUNT
            timings.append(time_engines(layouts, weights, x, bias, deadline))
        return choose_layout(layouts, timings)


def time_engines(
    layouts: list[Layout], weights: list[list[Tensor]], x: Tensor, bias: Tensor | None, deadline: float
) -> list[list[float]]:
    """Best seconds of each engine of each layout at this row count; infinity where the time did not suffice.

    The engines take turns, so that other load on the machine meets all of them, and the best single run counts,
    which is the one that was disturbed least. Each product is followed by an elementwise operation on torch's
    own threads, as in a model: a library whose threads get in the way of those shows its real price.

    Args:
        weights: copies of the weight in each layout.
        x: [rows, in].
        deadline: ``time.perf_counter`` after which no further run starts; torch's own engine has one in any case.
    """
    between = torch.zeros(1 << 16)
    best = [[float("inf")] * len(layout.engines) for layout in layouts]
    for repeat in range(_REPEATS):
        fastest = min(min(row) for row in best)
        for i, layout in enumerate(layouts):
            for j, engine in enumerate(layout.engines):
                if repeat and best[i][j] > fastest * _CLEARLY_SLOWER:
                    continue
                for weight in weights[i]:
                    started = time.perf_counter()
                    if started > deadline and best[0][0] < float("inf"):
                        return best
                    engine(x, weight, bias)
                    between.neg_()
                    best[i][j] = min(best[i][j], time.perf_counter() - started)
    return best


def choose_layout(layouts: list[Layout], timings: list[list[list[float]]]) -> LinearChoice:
    """The layout whose best engines lose least over all row counts, and those engines.

    Args:
        layouts: candidates, torch's own first; in each, the torch engine comes first.
        timings: bucket -> layout -> engine -> seconds.
    """
    costs = [[_cheapest(bucket[i], _WORTHWHILE_ENGINE) for bucket in timings] for i in range(len(layouts))]
    fastest = [min(layout[b][1] for layout in costs) for b in range(len(timings))]
    scores = [sum(cost / best for (_, cost), best in zip(layout, fastest, strict=True)) for layout in costs]
    chosen, _ = _cheapest(scores, _WORTHWHILE_LAYOUT)
    return LinearChoice(layouts[chosen], tuple(layouts[chosen].engines[index] for index, _ in costs[chosen]))


def _cheapest(costs: list[float], worthwhile: float) -> tuple[int, float]:
    """Index and cost of the cheapest; of the first unless that costs at most ``worthwhile`` of it."""
    best = min(range(len(costs)), key=costs.__getitem__)
    index = best if costs[best] <= costs[0] * worthwhile else 0
    return index, costs[index]
