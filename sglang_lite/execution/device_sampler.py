"""From logits to tokens on the device, without waiting for it."""

from __future__ import annotations

import secrets

import numpy as np
import torch
from torch import Tensor

from sglang_lite.adapters.sampling import DRAW_STRIDE, SamplingOperations
from sglang_lite.execution.device import Device
from sglang_lite.execution.device_columns import ColumnCache, DrawGroup, PenaltyColumns
from sglang_lite.execution.device_counts import DeviceCounts
from sglang_lite.execution.device_random import exponentials
from sglang_lite.execution.sampler import NO_TOKEN
from sglang_lite.scheduler.plan import SamplingColumns
from sglang_lite.types import Int32Array

RACE_ELEMENTS = 1 << 24
"""Random numbers of seeded rows made at a time (rows times vocabulary): 128 MiB of scratch a temporary."""


class DeviceSampler:
    """Samples one token per row, as ``execution.sampler.Sampler`` does on the host: a seeded row draws the same token.

    Args:
        ops: sampling operations of the device.
        vocab_size: width of the logits.
        num_rows: rows of the request table.
        seed: of requests without a seed; None for a fresh one.
    """

    def __init__(
        self, device: Device, ops: SamplingOperations, vocab_size: int, num_rows: int, seed: int | None = None
    ) -> None:
        self._device = device
        self._ops = ops
        self._vocab_size = vocab_size
        self._columns = ColumnCache(device)
        self._counts = DeviceCounts(device, vocab_size, num_rows)
        self._seed = secrets.randbits(62) if seed is None else abs(seed) % 2**62
        self._offset = 0

    def sample(
        self,
        logits: Tensor,
        columns: SamplingColumns,
        rows: Int32Array,
        device_rows: Tensor,
        generated: Int32Array,
        suppressed: dict[int, tuple[int, ...]],
        resumed: dict[int, Int32Array],
    ) -> Tensor:
        """Tokens int64[S] on the device, -1 where the logits of a row are not finite.

        Args:
            logits: float32[S, V]; rows with penalties, bias or suppressed tokens are changed in place.
            columns: parameters of the rows.
            rows, device_rows: int32[S], rows of the request table, on the host and on the device.
            generated: int32[S], output tokens of each row so far.
            suppressed: position -> tokens that may not be drawn.
            resumed: row -> output tokens so far, where the counts of a penalised row start anew.
        """
        on_device = self._columns.of(columns, self._vocab_size)
        for row, output_tokens in resumed.items():
            self._counts.restart(row, output_tokens)
        penalties = on_device.penalties
        penalized = None
        if penalties is not None:
            self._counts.announce(rows[columns.penalized])
            penalized = device_rows.index_select(0, penalties.positions).long()
            _apply_penalties(logits, penalties, self._counts.of(penalized))
        if on_device.bias is not None:
            bias = on_device.bias
            logits.index_put_((bias.positions, bias.token_ids), bias.values, accumulate=True)
        if suppressed:
            self._suppress(logits, suppressed)
        best, tokens = logits.max(dim=-1)
        for group in on_device.groups:
            drawn = self._draw(logits, group, generated)
            if group.positions is None:
                tokens = drawn
            else:
                tokens.index_copy_(0, group.positions, drawn)
        tokens = torch.where(best.isfinite(), tokens, NO_TOKEN)
        if penalized is not None and penalties is not None:
            self._counts.add(penalized, tokens.index_select(0, penalties.positions))
        return tokens

    def _suppress(self, logits: Tensor, suppressed: dict[int, tuple[int, ...]]) -> None:
        positions = np.repeat(list(suppressed), [len(ids) for ids in suppressed.values()]).astype(np.int64)
        tokens = np.array([token for ids in suppressed.values() for token in ids], dtype=np.int64)
        if len(tokens):
            lowest = torch.full((), -torch.inf, dtype=logits.dtype, device=logits.device)
            logits.index_put_((self._device.upload(positions), self._device.upload(tokens)), lowest)

    def _draw(self, logits: Tensor, group: DrawGroup, generated: Int32Array) -> Tensor:
        """int64[n] of one group."""
        chosen = logits if group.positions is None else logits.index_select(0, group.positions)
        probabilities = self._filtered(self._ops.softmax(chosen, group.temperature), group)
        if group.seed is None:
            self._offset += DRAW_STRIDE
            return self._ops.draw(probabilities, self._seed, self._offset).long()
        counter = self._device.upload(generated[group.chosen].astype(np.int64))
        return _race(probabilities, group.seed, counter)

    def _filtered(self, probabilities: Tensor, group: DrawGroup) -> Tensor:
        """Every filter looks at the whole distribution, as on the host."""
        kept = None
        if group.top_k is not None:
            kept = self._ops.keep_top_k(probabilities, group.top_k)
        if group.top_p is not None:
            nucleus = self._ops.keep_top_p(probabilities, group.top_p)
            kept = nucleus if kept is None else torch.where(kept > 0, nucleus, 0.0)
        if group.has_min_p:
            least = group.min_p.unsqueeze(1) * probabilities.amax(dim=-1, keepdim=True)
            kept = torch.where(probabilities >= least, probabilities if kept is None else kept, 0.0)
        if kept is None:
            return probabilities
        return kept / kept.sum(dim=-1, keepdim=True)


def _apply_penalties(logits: Tensor, penalties: PenaltyColumns, counts: Tensor) -> None:
    """See ``execution.penalties.apply_penalties``."""
    rows = logits.index_select(0, penalties.positions)
    scaled = torch.where(rows > 0, rows / penalties.repetition, rows * penalties.repetition)
    changed = torch.where(counts > 0, scaled - penalties.presence, rows) - counts * penalties.frequency
    logits.index_copy_(0, penalties.positions, changed)


def _race(weights: Tensor, seed: Tensor, counter: Tensor) -> Tensor:
    """The least exponential number over weight wins: a token depends on its row's seed and counter, not on the batch."""
    step = max(1, RACE_ELEMENTS // weights.shape[1])
    winners = []
    for start in range(0, len(weights), step):
        part = slice(start, start + step)
        times = exponentials(seed[part], counter[part], weights.shape[1])
        winners.append((weights[part] / times).argmax(dim=-1))
    return winners[0] if len(winners) == 1 else torch.cat(winners)
