"""StepPlan: the columns of one forward pass, and what the executor answers.

A plan is made from host state only. Decode rows take their input token from the executor's ``last_token[row]``,
so a plan never waits for the tokens of the step before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_lite.types import Float32Array, Int32Array, Int64Array

if TYPE_CHECKING:
    from sglang_lite.grammar.base import TokenMatcher

FROM_DEVICE = -1
"""Input id of a decode row: the executor substitutes ``last_token[row]``, and for a guess that of its draft model."""


@dataclass(slots=True, frozen=True)
class SamplingColumns:
    """Sampling parameters of the rows of a plan that sample, in plan order (``sample_index``).

    The planner hands out the same object for as long as the set of sampling rows does not change, so the executor
    may cache device copies by identity.

    Attributes:
        temperature, top_p, min_p, frequency_penalty, presence_penalty, repetition_penalty: float32[S].
        top_k: int32[S], -1 for the whole vocabulary.
        seed: int64[S], ``NO_SEED`` where none was given.
        all_greedy: every row has temperature 0 or top_k 1, no penalty and no bias: argmax is enough.
        penalized: int32[], positions in 0..S-1 with a penalty.
        logit_bias: position -> {token id: bias}.
    """

    temperature: Float32Array
    top_p: Float32Array
    top_k: Int32Array
    min_p: Float32Array
    frequency_penalty: Float32Array
    presence_penalty: Float32Array
    repetition_penalty: Float32Array
    seed: Int64Array
    all_greedy: bool
    penalized: Int32Array
    logit_bias: dict[int, dict[int, float]] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class LogprobRequest:
    """Log-probabilities wanted from one row of this step.

    Attributes:
        row_index: position of the row in the plan.
        key: the request.
        prompt_start, prompt_stop: prompt positions [start, stop) scored by this chunk. The log-probability of prompt
            position p comes from the hidden state at p - 1; a chunk whose first scored position is its own first
            token needs the hidden state of the chunk before, so the scheduler aligns chunks such that every
            position p in [start, stop) has p - 1 inside the chunk.
        prompt_token_ids: int32[stop - start], the tokens scored.
        output: whether the sampled token is scored too.
        top: how many alternatives.
        token_ids: further ids to score at every position.
        hidden: whether the hidden states behind the scores are wanted as well.
    """

    row_index: int
    key: int
    prompt_start: int
    prompt_stop: int
    prompt_token_ids: Int32Array
    output: bool
    top: int
    token_ids: tuple[int, ...] = ()
    hidden: bool = False


@dataclass(slots=True, frozen=True)
class EmbeddedTokens:
    """Tokens of a plan whose embedding is given, because the prompt was sent as vectors.

    Attributes:
        first: position of the first one among the plan's tokens.
        values: float32[n, hidden], of it and those behind it.
    """

    first: int
    values: Float32Array


@dataclass(slots=True, frozen=True)
class StepPlan:
    """One forward pass over B rows and T tokens: decode rows first, then prefill chunks.

    Attributes:
        step: running number of the plan, from 0.
        num_decode: the first ``num_decode`` rows feed one token each; the rest are prefill chunks, behind the rows
            that verify guesses, if there are any: like chunks these feed several tokens of a sequence with a past.
        rows: int32[B], row of the request table (stable while the request is running); index into ``last_token``.
        query_lens: int32[B], tokens fed by each row.
        input_ids: int32[T]; ``FROM_DEVICE`` for decode rows, and for guesses that are the executor's draft model's.
        positions: int32[T], position of each token in its sequence.
        slot_mapping: int64[T], pool slot that receives the token's KV: page * page_size + offset.
        kv_lens: int32[B], length of each sequence after this step (what attention sees).
        page_table: int32[B, W], W = ceil(max(kv_lens) / page_size). Only the entries within a row's length mean
            anything; those beyond are 0 or any page of the pool, and may change while the plan is in flight, because
            successive plans share the array. The rows may be strided.
        sample_index: int32[S], positions in 0..B-1 of the rows that sample (all decode rows, and each chunk that
            completes its prompt).
        sampling: parameters of those rows.
        generated: int32[S], output tokens each sampling row has before this step (index of the token drawn; with the
            seed it determines the random number, whatever the batch).
        suppressed: sampling position -> token ids that may not be drawn now (end tokens before ``min_new_tokens``).
        resumed: row -> int32[], output tokens so far, for a row with penalties whose counts must be (re)built,
            on its first step and after a preemption (empty array for a fresh one).
        page_copies: int32[C, 2], (source page, destination page): copy before the pass (copy-on-write).
        logprobs: what to score; usually empty.
        num_verify: rows that verify guesses, behind the decode rows.
        draft_lens: int32[S], guessed tokens that each sampling row feeds behind its newest one (the last entries of
            its input ids); None when nobody guesses. Such a row draws a token for each token fed, as long as the
            draws confirm the guesses.
        adapter_slots: int32[B], slot of each row's low-rank adapter or ``NO_ADAPTER``; None when no row has one.
        matchers: sampling position -> matcher of a row with a grammar. Only the executor that draws the tokens moves
            them, plan after plan: it masks what a matcher forbids and tells it what was drawn. So the scheduler plans
            ahead as ever, and a grammar costs the other rows nothing but the time of its mask. Where plans are not
            made ahead, the scheduler asks a matcher between two of them for the text that it forces.
        embedded: prompts that were sent as vectors; the ids of these tokens mean nothing.
    """

    step: int
    num_decode: int
    rows: Int32Array
    query_lens: Int32Array
    input_ids: Int32Array
    positions: Int32Array
    slot_mapping: Int64Array
    kv_lens: Int32Array
    page_table: Int32Array
    sample_index: Int32Array
    sampling: SamplingColumns
    generated: Int32Array
    suppressed: dict[int, tuple[int, ...]]
    resumed: dict[int, Int32Array]
    page_copies: Int32Array
    logprobs: list[LogprobRequest]
    adapter_slots: Int32Array | None = None
    draft_lens: Int32Array | None = None
    num_verify: int = 0
    matchers: dict[int, TokenMatcher] = field(default_factory=dict)
    embedded: tuple[EmbeddedTokens, ...] = ()


@dataclass(slots=True, frozen=True)
class ScoredPositions:
    """Log-probabilities of one ``LogprobRequest``: P positions, prompt ones first, then the sampled token if asked.

    Attributes:
        logprobs: float32[P].
        top_ids, top_logprobs: int32[P, K], float32[P, K].
        extra_logprobs: float32[P, M].
        hidden: float32[P, H], the states that were scored; H is 0 unless they were asked for.
    """

    logprobs: Float32Array
    top_ids: Int32Array
    top_logprobs: Float32Array
    extra_logprobs: Float32Array
    hidden: Float32Array


@dataclass(slots=True, frozen=True)
class StepOutput:
    """Result of a plan.

    Attributes:
        step: the plan's number.
        tokens: int32[S], one per ``sample_index`` entry; -1 marks a row whose logits were not finite. With ``counts``,
            int32[sum(counts)], the tokens of one entry after the other.
        counts: int32[S], tokens drawn for each entry, None for one each.
        scored: one entry per ``plan.logprobs`` entry.
    """

    step: int
    tokens: Int32Array
    scored: list[ScoredPositions]
    counts: Int32Array | None = None
