"""Drives a model step by step over a paged pool, with pages chosen by the test."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionBatch, KVGeometry, Operations
from sglang_lite.adapters.recurrent import RecurrentBatch
from sglang_lite.layers.recurrent_step import RecurrentStep
from sglang_lite.models.base import CausalLanguageModel, RecurrentLanguageModel
from sglang_lite.models.model_description import KVDescription


@dataclass(slots=True)
class PagedSequence:
    """A sequence and where its KV is.

    Attributes:
        pages: pages in order; grows with the sequence.
        num_tokens: tokens whose KV is in the pool.
        row: where its recurrent state is, for models that have one.
    """

    pages: list[int]
    num_tokens: int = 0
    row: int = 0


class PagedRunner:
    """Feeds tokens of several sequences in one step and returns the logits of every token fed."""

    def __init__(
        self,
        model: CausalLanguageModel,
        ops: Operations,
        page_size: int,
        num_pages: int = 64,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._model, self._ops = model, ops
        self._geometry = _geometry(model, num_pages, page_size, dtype)
        # Slots that no token was written to hold what would be seen at once if attention looked at them.
        self.pool = torch.full(self._geometry.pool_shape, float("nan"), dtype=dtype)
        # Handed out in an order that is neither rising nor falling, so that a page index taken for a position shows.
        self._free = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).tolist()
        self._free_rows = [4, 5, 0, 7, 6, 1, 3, 2]
        self._states = _states(model, len(self._free_rows), dtype)

    def new_sequence(self) -> PagedSequence:
        return PagedSequence([], row=self._free_rows.pop(0) if self._states is not None else 0)

    def fork(self, sequence: PagedSequence, num_tokens: int) -> PagedSequence:
        """A sequence that shares the whole pages of the first ``num_tokens`` tokens of another."""
        num_pages = num_tokens // self._geometry.page_size
        return PagedSequence(sequence.pages[:num_pages], num_pages * self._geometry.page_size)

    def step(self, work: list[tuple[PagedSequence, list[int]]]) -> list[Tensor]:
        """Feed tokens to sequences; rows of one token that have a past come first, as decode rows.

        Returns:
            for each entry of ``work``, float32[tokens, vocab].
        """
        is_decode = [sequence.num_tokens > 0 and len(tokens) == 1 for sequence, tokens in work]
        order = sorted(range(len(work)), key=lambda index: not is_decode[index])
        size = self._geometry.page_size
        positions: list[int] = []
        slots: list[int] = []
        for index in order:
            sequence, tokens = work[index]
            stop = sequence.num_tokens + len(tokens)
            while len(sequence.pages) * size < stop:
                sequence.pages.append(self._free.pop())
            span = range(sequence.num_tokens, stop)
            positions += span
            slots += [sequence.pages[position // size] * size + position % size for position in span]
            sequence.num_tokens = stop
        hidden = self._forward([work[index] for index in order], sum(is_decode), positions, slots)
        logits = self._model.logits(hidden).split_with_sizes([len(work[index][1]) for index in order])
        return [logits[order.index(index)] for index in range(len(work))]

    def _forward(
        self, work: list[tuple[PagedSequence, list[int]]], num_decode: int, positions: list[int], slots: list[int]
    ) -> Tensor:
        size = self._geometry.page_size
        kv_lens = [sequence.num_tokens for sequence, _ in work]
        page_table = torch.zeros(len(work), -(-max(kv_lens) // size), dtype=torch.int64)
        for row, (sequence, _) in enumerate(work):
            num_pages = -(-sequence.num_tokens // size)
            page_table[row, :num_pages] = torch.tensor(sequence.pages[:num_pages])
        batch = AttentionBatch(
            num_decode=num_decode,
            query_lens=[len(tokens) for _, tokens in work],
            kv_lens=kv_lens,
            slot_mapping=torch.tensor(slots),
            page_table=page_table,
        )
        token_ids = torch.tensor([token for _, tokens in work for token in tokens])
        plan = self._ops.plan_attention(batch, self._geometry)
        if self._states is None:
            return self._model.forward(token_ids, torch.tensor(positions), self.pool, plan)
        assert isinstance(self._model, RecurrentLanguageModel)
        fresh = [sequence.num_tokens == len(tokens) for sequence, tokens in work]
        rows = [sequence.row for sequence, _ in work]
        recurrent = self._ops.recurrent.plan(RecurrentBatch(num_decode, batch.query_lens, rows, fresh))
        step = RecurrentStep(recurrent, *self._states)
        return self._model.forward(token_ids, torch.tensor(positions), self.pool, plan, step)


def _states(model: CausalLanguageModel, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Tails and states of a model with recurrent layers, full of what would be seen if a fresh row looked at it."""
    if not isinstance(model, RecurrentLanguageModel):
        return None
    shape = model.recurrent
    tails = (shape.num_layers, num_rows, shape.conv_channels, shape.conv_kernel - 1)
    states = (shape.num_layers, num_rows, shape.num_heads, shape.key_dim, shape.value_dim)
    return torch.full(tails, float("nan"), dtype=dtype), torch.full(states, float("nan"))


def _geometry(model: CausalLanguageModel, num_pages: int, page_size: int, dtype: torch.dtype) -> KVGeometry:
    """The pool for what the model leaves in it; a model that does not say leaves keys and values in every layer."""
    kv = getattr(model, "kv", None)
    if not isinstance(kv, KVDescription):
        return KVGeometry(num_pages, page_size, model.num_layers, model.num_kv_heads, model.head_dim, dtype)
    latent_width = kv.value_width if kv.num_tensors == 1 else 0
    extents = kv.num_layers, kv.num_kv_heads, kv.key_width
    return KVGeometry(num_pages, page_size, *extents, dtype, kv.num_tensors, latent_width)
