"""Guesses by a draft head: a decoder layer that reads the served model's hidden states (``models.draft_head``).

The head's KV lies in the slot of the token it belongs to, in a pool of its own: entry j is made of token j and of the
hidden state of token j - 1, and so of nothing that comes later. A cached prefix, a copied page, a resumed request hold
it together with the served model's. Behind every step the head reads all tokens of the step again with their true
hidden states, which replaces what it wrote while it guessed.

Where a sequence goes on from cached pages, the hidden state before its first token is that kept for the page's end.
One that is not known (the first token of all, and the last token of a prompt that was cached to the end) is taken as
zeros: that costs a guess, since guesses change no output (``verification``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sglang_lite.adapters.base import KVGeometry, Operations
from sglang_lite.execution.draft_model import NO_COPIES, Guessing, guesses_into, wanted_guesses, without_samples
from sglang_lite.execution.host_batch import attention_batch
from sglang_lite.execution.kv_pool import allocate_kv_pool
from sglang_lite.models.draft_head import DraftHead
from sglang_lite.scheduler.plan import StepPlan
from sglang_lite.types import Int32Array, Int64Array


class HeadPass(Protocol):
    """Runs a head on a device."""

    def upload(self, values: Int64Array) -> Tensor:
        """int64[n] on the device; the array may change as soon as this returns."""

    def copy_pages(self, copies: Int32Array) -> None:
        """Copy pages int32[n, 2] (source, target) of the head's pool."""

    def forward(self, plan: StepPlan, token_ids: Tensor, previous: Tensor) -> Tensor:
        """[T, hidden] for the tokens int64[T] of a plan and the hidden states [T, hidden] before them."""

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[S, vocab]."""


class HostHeadPass:
    """See ``HeadPass``; owns the head's pool.

    Args:
        ops: those that the head was loaded with.
        geometry: of the head's pool.
    """

    def __init__(self, head: DraftHead, ops: Operations, geometry: KVGeometry) -> None:
        self._head = head
        self._ops = ops
        self._geometry = geometry
        self._pool = allocate_kv_pool(geometry, ops.device)

    def upload(self, values: Int64Array) -> Tensor:
        """A tensor of the same memory."""
        return torch.from_numpy(values)

    def copy_pages(self, copies: Int32Array) -> None:
        """See ``HeadPass.copy_pages``."""
        pairs = torch.from_numpy(copies).long()
        self._ops.copy_pages(self._pool, pairs[:, 0], pairs[:, 1])

    def forward(self, plan: StepPlan, token_ids: Tensor, previous: Tensor) -> Tensor:
        """See ``HeadPass.forward``."""
        attention = self._ops.plan_attention(attention_batch(plan), self._geometry)
        positions = torch.from_numpy(plan.positions.astype(np.int64))
        return self._head.forward(token_ids, previous, positions, self._pool, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``HeadPass.logits``."""
        return self._head.logits(hidden)


@dataclass(frozen=True, slots=True)
class HiddenShape:
    """Of the hidden states that are kept: one a row, and one a page for its last token.

    Attributes:
        page_size: tokens of a page.
        device, dtype: where they lie and what they are.
    """

    num_rows: int
    num_pages: int
    page_size: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device


class HeadDrafter:
    """Fills guesses into plans, and follows what the served model made of them (``execution.draft_model.Drafter``).

    Args:
        head: on the device of the served model.
        shape: of the hidden states to keep.
    """

    def __init__(self, head: HeadPass, shape: HiddenShape) -> None:
        self._head = head
        self._page_size = shape.page_size
        self._row_hidden = torch.zeros(shape.num_rows, shape.hidden_size, dtype=shape.dtype, device=shape.device)
        self._page_hidden = torch.zeros(shape.num_pages, shape.hidden_size, dtype=shape.dtype, device=shape.device)
        self._row_position: Int64Array = np.full(shape.num_rows, -1, dtype=np.int64)

    @torch.inference_mode()
    def fill(self, plan: StepPlan) -> StepPlan:
        """The plan with the head's guesses behind the newest token of the rows that verify."""
        if len(plan.page_copies):
            self._head.copy_pages(plan.page_copies)
        wanted = wanted_guesses(plan)
        return plan if wanted is None else guesses_into(plan, wanted, self._guess(plan, wanted))

    @torch.inference_mode()
    def observe(self, plan: StepPlan, hidden: Tensor, newest: Int64Array) -> None:
        """Read the tokens of a step with their hidden states.

        Args:
            plan: as ``fill`` returned it.
            hidden: [T, hidden], of the served model.
            newest: int64[R], for each row the last of its tokens that belongs to the sequence.
        """
        upload = self._head.upload
        hidden = hidden[: len(plan.input_ids)]  # what a captured batch pads is left out
        starts = np.cumsum(plan.query_lens, dtype=np.int64) - plan.query_lens
        previous = hidden.roll(1, 0)
        before = self._before(plan.rows, plan.positions[starts], plan.page_table)
        previous.index_copy_(0, upload(starts), before)
        token_ids = upload(np.maximum(plan.input_ids, 0).astype(np.int64))
        self._head.forward(replace(without_samples(plan), page_copies=NO_COPIES), token_ids, previous)
        ends = np.flatnonzero((plan.positions + 1) % self._page_size == 0)
        if len(ends):
            pages = upload(plan.slot_mapping[ends] // self._page_size)
            self._page_hidden.index_copy_(0, pages, hidden.index_select(0, upload(ends)))
        self._row_hidden.index_copy_(0, upload(plan.rows.astype(np.int64)), hidden.index_select(0, upload(newest)))
        self._row_position[plan.rows] = plan.positions[newest]

    def _guess(self, plan: StepPlan, wanted: Guessing) -> Int32Array:
        """int32[G]: the guesses of one row after the other."""
        upload = self._head.upload
        count, depth = len(wanted.lens), int(wanted.lens.max())
        token_ids = upload(plan.input_ids[wanted.first].astype(np.int64))
        previous = self._before(plan.rows[wanted.index], plan.positions[wanted.first], plan.page_table[wanted.index])
        drawn: list[Tensor] = []
        there: Int64Array = np.arange(count)  # rows of ``wanted`` that token_ids and previous are of
        for step in range(depth):
            here = np.flatnonzero(wanted.lens > step)
            if len(here) < len(there):
                kept = upload(np.searchsorted(there, here))
                token_ids, previous, there = token_ids.index_select(0, kept), previous.index_select(0, kept), here
            previous = self._head.forward(_guessed_token(plan, wanted, here, step), token_ids, previous)
            token_ids = self._head.logits(previous).argmax(dim=-1)
            drawn.append(token_ids)
        # Drawn step by step, wanted row by row.
        lens = wanted.lens
        order = np.argsort(np.concatenate([np.flatnonzero(lens > step) for step in range(depth)]), kind="stable")
        guesses: Int32Array = torch.cat(drawn).int().cpu().numpy()
        return guesses[order]

    def _before(self, rows: Int32Array, positions: Int32Array, page_table: Int32Array) -> Tensor:
        """[n, hidden]: the hidden states before the tokens at ``positions`` of these rows."""
        upload = self._head.upload
        at_page = (positions > 0) & (positions % self._page_size == 0)
        in_row = ~at_page & (self._row_position[rows] == positions - 1) & (positions > 0)
        found = self._row_hidden.index_select(0, upload(rows.astype(np.int64)))
        if not in_row.all():
            found = found * upload(in_row.astype(np.int64)).unsqueeze(1).to(found.dtype)
        if at_page.any():
            places = np.flatnonzero(at_page)
            pages = page_table[places, positions[places] // self._page_size - 1].astype(np.int64)
            found = found.index_copy(0, upload(places), self._page_hidden.index_select(0, upload(pages)))
        return found


def _guessed_token(plan: StepPlan, wanted: Guessing, here: Int64Array, step: int) -> StepPlan:
    """A decode step of the head over the rows ``here`` that feeds each one's token number ``step``: 0 is the newest."""
    index, tokens = wanted.index[here], wanted.first[here] + step
    return replace(
        without_samples(plan),
        num_decode=len(index),
        num_verify=0,
        rows=plan.rows[index],
        query_lens=np.ones(len(index), dtype=np.int32),
        input_ids=np.zeros(len(index), dtype=np.int32),
        positions=plan.positions[tokens],
        slot_mapping=plan.slot_mapping[tokens],
        kv_lens=(plan.kv_lens[index] - wanted.lens[here] + step).astype(np.int32),
        page_table=plan.page_table[index],
        page_copies=NO_COPIES,
    )
