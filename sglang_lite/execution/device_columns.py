"""Sampling parameters on the device, uploaded once for as long as the set of sampling rows does not change."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sglang_lite.execution.device import Device
from sglang_lite.scheduler.plan import SamplingColumns
from sglang_lite.types import NO_SEED


@dataclass(frozen=True, slots=True)
class DrawGroup:
    """Rows that are sampled the same way, and their parameters on the device.

    Attributes:
        positions: int64[n] among the rows that sample; None when it is all of them, in order.
        chosen: the same on the host.
        temperature, min_p: float32[n]. top_p: float32[n] or None. top_k: int32[n] or None. seed: int64[n] or None.
            None: no row of the group has the filter, or a seed.
        has_min_p: whether any row has that filter.
    """

    positions: Tensor | None
    chosen: npt.NDArray[np.int64]
    temperature: Tensor
    min_p: Tensor
    top_p: Tensor | None
    top_k: Tensor | None
    seed: Tensor | None
    has_min_p: bool


@dataclass(frozen=True, slots=True)
class Bias:
    """Logits to change: row, token and addend of each, on the device."""

    positions: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class PenaltyColumns:
    """Penalties of the P penalised rows, each float32[P, 1], and their int64[P] positions."""

    positions: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True, slots=True)
class DeviceColumns:
    """What one ``SamplingColumns`` needs on the device.

    Attributes:
        groups: of rows that are not greedy.
        bias, penalties: None when no row has them.
    """

    groups: list[DrawGroup]
    bias: Bias | None
    penalties: PenaltyColumns | None


class ColumnCache:
    """The device copy of the columns last seen; the planner hands out one object while its rows stay the same."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._columns: SamplingColumns | None = None
        self._copy: DeviceColumns | None = None

    def of(self, columns: SamplingColumns, vocab_size: int) -> DeviceColumns:
        """The device copy of ``columns``."""
        if self._copy is None or self._columns is not columns:
            self._columns = columns
            self._copy = _upload(self._device, columns, vocab_size)
        return self._copy


def _upload(device: Device, columns: SamplingColumns, vocab_size: int) -> DeviceColumns:
    random = (columns.temperature > 0) & (columns.top_k != 1)
    seeded = columns.seed != NO_SEED
    groups = [
        _group(device, columns, np.flatnonzero(members), vocab_size, has_seed=has_seed)
        for members, has_seed in ((random & ~seeded, False), (random & seeded, True))
        if members.any()
    ]
    return DeviceColumns(groups, _bias(device, columns), _penalties(device, columns))


def _group(
    device: Device, columns: SamplingColumns, chosen: npt.NDArray[np.int64], vocab_size: int, *, has_seed: bool
) -> DrawGroup:
    top_k, top_p, min_p = columns.top_k[chosen], columns.top_p[chosen], columns.min_p[chosen]
    # A filter that a row does not have is set to what lets everything through.
    top_k = np.where(top_k > 0, np.minimum(top_k, vocab_size), vocab_size).astype(np.int32)
    return DrawGroup(
        positions=None if len(chosen) == len(columns.temperature) else device.upload(chosen),
        chosen=chosen,
        temperature=device.upload(columns.temperature[chosen]),
        min_p=device.upload(min_p),
        top_p=device.upload(top_p) if bool((top_p < 1).any()) else None,
        top_k=device.upload(top_k) if bool((top_k < vocab_size).any()) else None,
        seed=device.upload(columns.seed[chosen]) if has_seed else None,
        has_min_p=bool((min_p > 0).any()),
    )


def _bias(device: Device, columns: SamplingColumns) -> Bias | None:
    entries = [
        (position, token, value) for position, bias in columns.logit_bias.items() for token, value in bias.items()
    ]
    if not entries:
        return None
    positions, tokens, values = (np.array(column) for column in zip(*entries, strict=True))
    return Bias(
        device.upload(positions.astype(np.int64)),
        device.upload(tokens.astype(np.int64)),
        device.upload(values.astype(np.float32)),
    )


def _penalties(device: Device, columns: SamplingColumns) -> PenaltyColumns | None:
    rows = columns.penalized
    if not len(rows):
        return None
    return PenaltyColumns(
        positions=device.upload(rows.astype(np.int64)),
        repetition=device.upload(columns.repetition_penalty[rows, None]),
        presence=device.upload(columns.presence_penalty[rows, None]),
        frequency=device.upload(columns.frequency_penalty[rows, None]),
    )
