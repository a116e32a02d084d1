"""Verifying guesses: every token of a row is drawn as it would be without them, and a wrong guess ends the row.

A guess is a certainty of the one who made it, so drawing from the model's own distribution and going on while the draw
is the guess is exact rejection sampling: accepted with the guess's probability, else a draw from what is left. With a
seed the draws depend on the count of tokens alone, so the output is the same as without guesses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_lite.grammar.base import TokenMatcher
from sglang_lite.scheduler.plan import SamplingColumns, StepPlan
from sglang_lite.types import Int32Array, Int64Array


@dataclass(frozen=True, slots=True)
class Verification:
    """The draws of a plan with guesses: N of them for S sampling rows.

    Attributes:
        counts: int64[S], draws of each row: its guesses and one more.
        starts: int64[S], where they begin among the draws.
        tokens: int64[N], the token of the step whose hidden state each draw comes from.
        columns, rows, generated, suppressed: as the sampler takes them, for every draw.
        matchers: first draw of a row -> matcher.
        guesses: first draw of a row with a matcher -> the tokens that its draws are to confirm.
    """

    counts: Int64Array
    starts: Int64Array
    tokens: Int64Array
    columns: SamplingColumns
    rows: Int32Array
    generated: Int32Array
    suppressed: dict[int, tuple[int, ...]]
    matchers: dict[int, TokenMatcher]
    guesses: dict[int, list[int]]

    def accept(self, plan: StepPlan, drawn: Int32Array) -> tuple[Int32Array, Int32Array]:
        """What is left of the draws int32[N]: the tokens of one row after the other, and int32[S], how many each has.

        A row keeps the draws up to the first one that is not the guess it was to confirm.
        """
        guesses = plan.input_ids[np.minimum(self.tokens + 1, len(plan.input_ids) - 1)]
        is_last = np.zeros(len(drawn), dtype=np.bool_)
        is_last[self.starts + self.counts - 1] = True
        stops = is_last | (drawn != guesses)
        before = np.cumsum(stops) - stops
        kept: npt.NDArray[np.bool_] = before == np.repeat(before[self.starts], self.counts)
        return drawn[kept], np.add.reduceat(kept, self.starts).astype(np.int32)

    def newest(self, plan: StepPlan, counts: Int32Array) -> Int64Array:
        """int64[R]: the last token of each row of the plan that belongs to its sequence.

        Args:
            counts: as ``accept`` gave them.
        """
        newest = np.cumsum(plan.query_lens, dtype=np.int64) - 1
        newest[plan.sample_index] = self.tokens[self.starts] + counts - 1
        return newest


def verification_of(plan: StepPlan, draft_lens: Int32Array) -> Verification:
    """The draws of a plan.

    Args:
        draft_lens: ``plan.draft_lens``.
    """
    counts = draft_lens.astype(np.int64) + 1
    ends = np.cumsum(counts)
    starts = ends - counts
    offsets = np.arange(int(ends[-1])) - np.repeat(starts, counts)
    last = np.cumsum(plan.query_lens, dtype=np.int64)[plan.sample_index]
    tokens = np.repeat(last - counts, counts) + offsets
    guesses = {
        int(starts[position]): plan.input_ids[last[position] - counts[position] + 1 : last[position]].tolist()
        for position in plan.matchers
    }
    return Verification(
        counts=counts,
        starts=starts,
        tokens=tokens,
        columns=_repeat_columns(plan.sampling, counts, starts),
        rows=np.repeat(plan.rows[plan.sample_index], counts),
        generated=np.repeat(plan.generated, counts) + offsets.astype(np.int32),
        suppressed={int(starts[position]): ids for position, ids in plan.suppressed.items()},
        matchers={int(starts[position]): matcher for position, matcher in plan.matchers.items()},
        guesses=guesses,
    )


def _repeat_columns(columns: SamplingColumns, counts: Int64Array, starts: Int64Array) -> SamplingColumns:
    """The parameters of each draw. Rows with penalties or suppressed tokens have one draw (the planner sees to it)."""
    if not len(columns.temperature):
        return columns  # of a rank that draws nothing
    return SamplingColumns(
        temperature=np.repeat(columns.temperature, counts),
        top_p=np.repeat(columns.top_p, counts),
        top_k=np.repeat(columns.top_k, counts),
        min_p=np.repeat(columns.min_p, counts),
        frequency_penalty=np.repeat(columns.frequency_penalty, counts),
        presence_penalty=np.repeat(columns.presence_penalty, counts),
        repetition_penalty=np.repeat(columns.repetition_penalty, counts),
        seed=np.repeat(columns.seed, counts),
        all_greedy=columns.all_greedy,
        penalized=starts[columns.penalized].astype(np.int32),
        logit_bias={
            draw: bias
            for position, bias in columns.logit_bias.items()
            for draw in range(int(starts[position]), int(starts[position] + counts[position]))
        },
    )
