"""Guesses by a second, smaller model that reads what the served one reads.

The draft model follows every step: whatever the served model writes into a slot of its pool, the draft model writes its
own keys and values of into the slot of the same number of a pool of its own. A cached prefix, a copied page, a resumed
request therefore hold both models' KV without anybody's doing, and what one request's guesses leave behind is
overwritten together with the rest.

Guesses change no output: ``verification`` draws every token as it would be drawn without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from sglang_lite.execution.executor import StepRunner
from sglang_lite.layers.parallel import SINGLE, ParallelGroup
from sglang_lite.scheduler.plan import FROM_DEVICE, SamplingColumns, StepOutput, StepPlan
from sglang_lite.types import NO_SEED, Int32Array, Int64Array

NOTHING: Int32Array = np.empty(0, dtype=np.int32)
NO_COPIES: Int32Array = np.empty((0, 2), dtype=np.int32)

Launch = Callable[[StepPlan], Callable[[], StepOutput]]
"""Runs a plan, or queues it; the result waits for its tokens."""


@dataclass(frozen=True, slots=True)
class Guessing:
    """The rows of a plan that want guesses; n of them.

    Attributes:
        index: int64[n], their positions among the plan's rows.
        lens: int64[n], guesses wanted.
        first: int64[n], where in the plan's tokens the newest token of each is.
    """

    index: Int64Array
    lens: Int64Array
    first: Int64Array


class Drafter(Protocol):
    """Who makes guesses, and looks at what became of them."""

    def fill(self, plan: StepPlan) -> StepPlan:
        """The plan with guesses instead of ``FROM_DEVICE`` behind the newest token of the rows that verify."""

    def observe(self, plan: StepPlan, hidden: torch.Tensor, newest: Int64Array) -> None:
        """Called behind the served model's pass.

        Args:
            plan: as ``fill`` returned it.
            hidden: [T, hidden], of the served model.
            newest: int64[R], for each row the last of its tokens that belongs to the sequence.
        """


class DraftModel:
    """Fills the guesses into plans that leave them open.

    Args:
        runner: of the draft model; None on a rank that takes rank 0's guesses.
        draft_vocabulary, vocabulary: tokens that the draft model and the served one know. They may differ by padding:
            what one of them does not know is replaced by some token that it does, which costs a guess.
        device: where ranks exchange guesses.
        parallel: the ranks that share the served model. The draft model is whole, on rank 0.
        launch: how a step of ``runner`` is run; the default waits for each.
    """

    def __init__(
        self,
        runner: StepRunner | None,
        *,
        draft_vocabulary: int,
        vocabulary: int,
        device: torch.device,
        parallel: ParallelGroup = SINGLE,
        launch: Launch | None = None,
    ) -> None:
        self._runner = runner
        self._launch = launch or self._run
        self._known = min(draft_vocabulary, vocabulary)
        self._draft_vocabulary = draft_vocabulary
        self._device = device
        self._parallel = parallel

    def fill(self, plan: StepPlan) -> StepPlan:
        """The plan with guesses instead of ``FROM_DEVICE`` behind the newest token of the rows that verify.

        On rank 0 the draft model has then computed all tokens of the plan, guesses included.
        """
        wanted = wanted_guesses(plan)
        guesses = self._draft(plan, wanted) if self._runner is not None else NOTHING
        total = 0 if wanted is None else int(wanted.lens.sum())
        if wanted is None or not total:
            return plan
        if self._parallel.size > 1:
            shared = torch.empty(total, dtype=torch.int64, device=self._device)
            if self._runner is not None:
                shared.copy_(torch.from_numpy(guesses.astype(np.int64)))
            guesses = self._parallel.broadcast(shared).cpu().numpy().astype(np.int32)
        return guesses_into(plan, wanted, guesses)

    def observe(self, plan: StepPlan, hidden: torch.Tensor, newest: Int64Array) -> None:
        """Nothing to see: the draft model has read the tokens itself."""

    def _run(self, plan: StepPlan) -> Callable[[], StepOutput]:
        assert self._runner is not None
        output = self._runner.run(plan)
        return lambda: output

    def _draft(self, plan: StepPlan, wanted: Guessing | None) -> Int32Array:
        """int32[G]: the guesses of one row after the other. Computes every token of the plan.

        Step 0 computes all that is known: chunks, and the newest tokens. Step j computes the j-th guesses; the last
        guess of a row is computed too, though nothing is guessed from it: when it is right, it is part of the sequence.
        """
        if wanted is None:
            self._launch(self._known_tokens(plan, None))()
            return NOTHING
        depth = int(wanted.lens.max())
        pending = [self._launch(self._known_tokens(plan, wanted))]
        pending += [self._launch(_guessed_tokens(plan, wanted, step)) for step in range(1, depth + 1)]
        grid: Int32Array = np.zeros((len(wanted.lens), depth), dtype=np.int32)
        for step in range(depth):
            grid[wanted.lens > step, step] = pending[step]().tokens
        pending[depth]()
        # A draft model whose logits are not finite answers -1.
        return grid[np.arange(depth) < wanted.lens[:, None]].clip(0, self._known - 1)

    def _known_tokens(self, plan: StepPlan, wanted: Guessing | None) -> StepPlan:
        """The plan for the draft model, without the guesses."""
        query_lens, kv_lens = plan.query_lens, plan.kv_lens
        keep: Int64Array = np.arange(len(plan.input_ids))
        sampling: Int64Array = np.empty(0, dtype=np.int64)
        if wanted is not None:
            query_lens, kv_lens = query_lens.copy(), kv_lens.copy()
            query_lens[wanted.index] -= wanted.lens.astype(np.int32)
            kv_lens[wanted.index] -= wanted.lens.astype(np.int32)
            keep = np.delete(keep, np.repeat(wanted.first + 1, wanted.lens) + _offsets(wanted.lens))
            sampling = wanted.index
        return replace(
            _drawing(plan, sampling),
            num_decode=plan.num_decode + plan.num_verify,
            num_verify=0,
            query_lens=query_lens,
            input_ids=np.minimum(plan.input_ids[keep], self._draft_vocabulary - 1),
            positions=plan.positions[keep],
            slot_mapping=plan.slot_mapping[keep],
            kv_lens=kv_lens,
        )


def wanted_guesses(plan: StepPlan) -> Guessing | None:
    """The rows with guesses; None when there are none."""
    if plan.draft_lens is None or not plan.draft_lens.any():
        return None
    guessing = np.flatnonzero(plan.draft_lens)
    index = plan.sample_index[guessing].astype(np.int64)
    lens = plan.draft_lens[guessing].astype(np.int64)
    return Guessing(index, lens, np.cumsum(plan.query_lens, dtype=np.int64)[index] - lens - 1)


def guesses_into(plan: StepPlan, wanted: Guessing, guesses: Int32Array) -> StepPlan:
    """The plan with guesses int32[G], of one row after the other."""
    input_ids = plan.input_ids.copy()
    input_ids[np.repeat(wanted.first + 1, wanted.lens) + _offsets(wanted.lens)] = guesses
    return replace(plan, input_ids=input_ids)


def without_samples(plan: StepPlan) -> StepPlan:
    """The plan with nothing to draw."""
    return _drawing(plan, np.empty(0, dtype=np.int64))


def _guessed_tokens(plan: StepPlan, wanted: Guessing, step: int) -> StepPlan:
    """A decode step of the draft model that feeds each row's guess number ``step``, counted from 1."""
    here = wanted.lens >= step
    index, tokens = wanted.index[here], wanted.first[here] + step
    return replace(
        _drawing(plan, np.flatnonzero(wanted.lens[here] > step)),
        num_decode=len(index),
        num_verify=0,
        rows=plan.rows[index],
        query_lens=np.ones(len(index), dtype=np.int32),
        input_ids=np.full(len(index), FROM_DEVICE, dtype=np.int32),
        positions=plan.positions[tokens],
        slot_mapping=plan.slot_mapping[tokens],
        kv_lens=(plan.kv_lens[index] - wanted.lens[here] + step).astype(np.int32),
        page_table=plan.page_table[index],
        page_copies=NO_COPIES,
    )


def _drawing(plan: StepPlan, sample_index: Int64Array) -> StepPlan:
    """The plan with another wish: the most likely token of these rows, and nothing else."""
    count = len(sample_index)
    zero, one = np.zeros(count, dtype=np.float32), np.ones(count, dtype=np.float32)
    return replace(
        plan,
        sample_index=sample_index.astype(np.int32),
        sampling=SamplingColumns(
            temperature=zero,
            top_p=one,
            top_k=np.full(count, -1, dtype=np.int32),
            min_p=zero,
            frequency_penalty=zero,
            presence_penalty=zero,
            repetition_penalty=one,
            seed=np.full(count, NO_SEED, dtype=np.int64),
            all_greedy=True,
            penalized=NOTHING,
        ),
        generated=np.zeros(count, dtype=np.int32),
        suppressed={},
        resumed={},
        logprobs=[],
        adapter_slots=None,
        draft_lens=None,
        matchers={},
    )


def _offsets(lens: Int64Array) -> Int64Array:
    """0, 1, .., lens[0] - 1, 0, 1, .., lens[1] - 1, ..."""
    ends = np.cumsum(lens)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lens, lens)
