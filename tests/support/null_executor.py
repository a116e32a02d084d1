"""Executors without a model: they answer plans at once, with tokens that follow from the input alone.

``NullExecutor`` looks a token up by the last one, as the chain model of the fixtures does, and costs almost nothing:
the engine runs at full speed on it. ``CheckingExecutor`` keeps the content of every pool slot, verifies that each
row's page table leads to its own sequence, and draws the next token from the whole context it finds there, so that
any mistake in paging, prefix reuse or copy-on-write changes the output or raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sglang_lite.scheduler.plan import FROM_DEVICE, LogprobRequest, ScoredPositions, StepOutput, StepPlan
from sglang_lite.types import Int32Array, Int64Array

_MULTIPLIER = 6364136223846793005


class NullExecutor:
    """Follows the ``Executor`` protocol; plans run in ``submit``, results are kept for ``collect``.

    Args:
        num_rows: rows of the request table.
        successor: int32[vocabulary], the next token by the last one; None counts up, skipping end tokens below 1,000.
        vocab_size: vocabulary where ``successor`` is None.
    """

    def __init__(self, num_rows: int, *, successor: Int32Array | None = None, vocab_size: int = 32000) -> None:
        if successor is None:
            successor = np.arange(1, vocab_size + 1, dtype=np.int32)
            successor[-1] = min(1000, vocab_size - 1)
        self._successor = successor
        self.last_token: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self._results: deque[StepOutput] = deque()
        self.num_steps = 0
        self.closed = False

    @property
    def in_flight(self) -> int:
        """Results not collected yet."""
        return len(self._results)

    def submit(self, plan: StepPlan) -> None:
        """Compute the plan's tokens."""
        if plan.draft_lens is not None:
            self._results.append(self._verify(self._with_guesses(plan), plan.draft_lens))
            self.num_steps += 1
            return
        tokens = self._tokens(plan)
        for position, forbidden in plan.suppressed.items():
            tokens[position] = allowed_token(int(tokens[position]), forbidden, len(self._successor))
        self.last_token[plan.rows[plan.sample_index]] = tokens
        self.num_steps += 1
        scored = [_score(wanted, plan, tokens) for wanted in plan.logprobs]
        self._results.append(StepOutput(plan.step, tokens, scored))

    def _with_guesses(self, plan: StepPlan) -> StepPlan:
        """The plan with tokens for the guesses that it leaves to a draft model: some right, some wrong."""
        open_guesses = plan.input_ids == FROM_DEVICE
        open_guesses[: plan.num_decode] = False
        if not open_guesses.any():
            return plan
        guesses = (3 * plan.positions + plan.step) % len(self._successor)
        return replace(plan, input_ids=np.where(open_guesses, guesses, plan.input_ids).astype(np.int32))

    def _verify(self, plan: StepPlan, draft_lens: Int32Array) -> StepOutput:
        """Each row's tokens as if they were drawn one by one, as far as its guesses are right."""
        ends = np.cumsum(plan.query_lens)
        tokens: list[int] = []
        counts: list[int] = []
        first: list[int] = []
        candidates = self._candidates(plan, draft_lens)
        for position, index in enumerate(plan.sample_index.tolist()):
            length = int(draft_lens[position])
            guesses = plan.input_ids[ends[index] - length : ends[index]].tolist()
            drawn = candidates[position]
            if position in plan.suppressed:
                assert length == 0, "a row whose draw is restricted guesses"
                drawn = [allowed_token(drawn[0], plan.suppressed[position], len(self._successor))]
            right = 0
            while right < length and drawn[right] == guesses[right]:
                right += 1
            tokens += drawn[: right + 1]
            counts.append(right + 1)
            first.append(drawn[0])
            self.last_token[plan.rows[index]] = drawn[right]
        scored = [_score(wanted, plan, np.array(first, dtype=np.int32)) for wanted in plan.logprobs]
        return StepOutput(plan.step, np.array(tokens, dtype=np.int32), scored, np.array(counts, dtype=np.int32))

    def _candidates(self, plan: StepPlan, draft_lens: Int32Array) -> list[list[int]]:
        """For each sampling row, the token that follows its newest token and each of its guesses."""
        inputs, ends = self._inputs(plan), np.cumsum(plan.query_lens)
        return [
            self._successor[inputs[ends[index] - 1 - length : ends[index]]].tolist()
            for index, length in zip(plan.sample_index.tolist(), draft_lens.tolist(), strict=True)
        ]

    def collect(self) -> StepOutput:
        """The oldest result."""
        return self._results.popleft()

    def close(self) -> None:
        """Drop what was not collected."""
        self._results.clear()
        self.closed = True

    def _inputs(self, plan: StepPlan) -> Int32Array:
        """int32[T]: the plan's input ids with the tokens of decode rows filled in."""
        inputs = plan.input_ids.copy()
        inputs[: plan.num_decode] = self.last_token[plan.rows[: plan.num_decode]]
        return inputs

    def _tokens(self, plan: StepPlan) -> Int32Array:
        if len(plan.rows) == plan.num_decode:
            return self._successor.take(self.last_token.take(plan.rows))
        last = self._inputs(plan)[np.cumsum(plan.query_lens)[plan.sample_index] - 1]
        tokens: Int32Array = self._successor[last]
        return tokens


class CheckingExecutor(NullExecutor):
    """Also simulates the KV pool, slot by slot.

    Args:
        num_rows: rows of the request table.
        num_slots: token slots of the pool.
        page_size: slots per page.
        vocab_size: tokens are drawn from 0 to this, exclusive.
    """

    def __init__(self, num_rows: int, *, num_slots: int, page_size: int, vocab_size: int) -> None:
        super().__init__(num_rows, successor=np.zeros(vocab_size, dtype=np.int32))
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._slot_token: Int32Array = np.full(num_slots, -1, dtype=np.int32)
        self._slot_position: Int32Array = np.full(num_slots, -1, dtype=np.int32)

    def _tokens(self, plan: StepPlan) -> Int32Array:
        contexts = self._run(plan)
        return np.array(
            [context_token(contexts[index], self._vocab_size) for index in plan.sample_index.tolist()], dtype=np.int32
        )

    def _candidates(self, plan: StepPlan, draft_lens: Int32Array) -> list[list[int]]:
        contexts = self._run(plan)
        found = []
        for index, length in zip(plan.sample_index.tolist(), draft_lens.tolist(), strict=True):
            context = contexts[index]
            stops = range(len(context) - length, len(context) + 1)
            found.append([context_token(context[:stop], self._vocab_size) for stop in stops])
        return found

    def _run(self, plan: StepPlan) -> list[Int32Array]:
        """Write the plan's tokens into the pool; the tokens every row attends to."""
        self._copy_pages(plan.page_copies)
        inputs = self._inputs(plan)
        slots = plan.slot_mapping
        assert len(np.unique(slots)) == len(slots), "a slot is written twice in one plan"
        assert len(np.unique(plan.rows)) == len(plan.rows), "a row is in the plan twice"
        self._slot_token[slots] = inputs
        self._slot_position[slots] = plan.positions
        return self._read_contexts(plan)

    def _copy_pages(self, copies: Int32Array) -> None:
        size = self._page_size
        for source, destination in copies.tolist():
            assert source != destination
            for content in (self._slot_token, self._slot_position):
                content[destination * size : (destination + 1) * size] = content[source * size : (source + 1) * size]

    def _read_contexts(self, plan: StepPlan) -> list[Int32Array]:
        """The tokens every row attends to, after checking positions and that nobody else writes there."""
        ends = np.cumsum(plan.query_lens).tolist()
        contexts: list[Int32Array] = []
        owner: dict[int, int] = {}
        for index, end in enumerate(ends):
            for slot in plan.slot_mapping[end - int(plan.query_lens[index]) : end].tolist():
                owner[slot] = index
        for index in range(len(plan.rows)):
            slots = self._slots(plan, index)
            positions = self._slot_position[slots]
            assert np.array_equal(positions, np.arange(len(slots))), f"row {plan.rows[index]} reads {positions}"
            assert all(owner.get(slot, index) == index for slot in slots.tolist()), "a shared slot is written"
            contexts.append(self._slot_token[slots])
        return contexts

    def _slots(self, plan: StepPlan, index: int) -> Int64Array:
        positions = np.arange(int(plan.kv_lens[index]))
        pages = plan.page_table[index, positions // self._page_size].astype(np.int64)
        slots: Int64Array = pages * self._page_size + positions % self._page_size
        return slots


def context_token(context: Int32Array, vocab_size: int) -> int:
    """The token that follows a context in ``CheckingExecutor``: a hash of all of it."""
    with np.errstate(over="ignore"):
        weights = np.cumprod(np.full(len(context), _MULTIPLIER, dtype=np.uint64), dtype=np.uint64)
        total = (weights * (context.astype(np.uint64) + np.uint64(1))).sum(dtype=np.uint64)
    return int(total >> np.uint64(33)) % vocab_size


def allowed_token(token: int, forbidden: tuple[int, ...], vocab_size: int) -> int:
    """The first token from ``token`` upwards, cyclically, that is not forbidden."""
    while token in forbidden:
        token = (token + 1) % vocab_size
    return token


def _score(wanted: LogprobRequest, plan: StepPlan, tokens: Int32Array) -> ScoredPositions:
    """Log-probability of a token: minus its id; alternatives: the ids from 0 upwards."""
    scored = wanted.prompt_token_ids
    if wanted.output:
        position = int(np.searchsorted(plan.sample_index, wanted.row_index))
        scored = np.append(scored, tokens[position])
    top = np.tile(np.arange(wanted.top, dtype=np.int32), (len(scored), 1))
    extra = np.tile(np.array(wanted.token_ids, dtype=np.float32), (len(scored), 1))
    return ScoredPositions(
        logprobs=-scored.astype(np.float32),
        top_ids=top,
        top_logprobs=-top.astype(np.float32),
        extra_logprobs=-extra,
        hidden=np.zeros((len(scored), 2 if wanted.hidden else 0), dtype=np.float32),
    )


class LateExecutor(CheckingExecutor):
    """Runs a plan only when its result is collected: what it writes comes after all that happens meanwhile.

    Attributes:
        meanwhile: is called between the two.
    """

    def __init__(self, num_rows: int, *, num_slots: int, page_size: int, vocab_size: int) -> None:
        super().__init__(num_rows, num_slots=num_slots, page_size=page_size, vocab_size=vocab_size)
        self._plans: deque[StepPlan] = deque()
        self.meanwhile: Callable[[], None] = lambda: None

    def submit(self, plan: StepPlan) -> None:
        """Keep it."""
        self._plans.append(plan)

    def collect(self) -> StepOutput:
        """Run the oldest."""
        self.meanwhile()
        super().submit(self._plans.popleft())
        return super().collect()
