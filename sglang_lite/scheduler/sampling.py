"""Everything the planner and the commit need to know about the rows that sample, gathered once per set of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sglang_lite.scheduler.plan import SamplingColumns
from sglang_lite.scheduler.request import ParameterArray, Request, Special
from sglang_lite.scheduler.table import STOP_COLUMNS, RequestTable
from sglang_lite.types import Int32Array, Int64Array, RequestFlags, UInt8Array

if TYPE_CHECKING:
    from sglang_lite.grammar.base import TokenMatcher


@dataclass(frozen=True, slots=True)
class SampleSet:
    """Rows that sample in a plan, in plan order, and their gathered columns. Shared by plans with the same rows.

    Attributes:
        rows: int32[S]; base: int64[S], start of each row in ``RequestTable.flat_token_ids``.
        columns: what the executor samples with.
        serials: int64[S], which assignment of each row this is.
        keys: int64[S]; max_new_tokens: int32[S]; cached_tokens: int32[S]; retractions: uint8[S].
        checks_eos: bool[S], False where IGNORE_EOS is set.
        stop_positions, stop_matrix: int32[K], int32[K, STOP_COLUMNS]: rows with stop tokens of their own.
        many_stops: position -> stop tokens, for rows with more than fit the matrix.
        suppressions: (position, min_new_tokens, ids) of the rows that may not end yet.
        scored: (position, request) of the rows that want log-probabilities.
        matchers: position -> matcher of the rows with a grammar.
    """

    rows: Int32Array
    base: Int64Array
    columns: SamplingColumns
    serials: Int64Array
    keys: Int64Array
    max_new_tokens: Int32Array
    cached_tokens: Int32Array
    retractions: UInt8Array
    checks_eos: npt.NDArray[np.bool_]
    stop_positions: Int64Array
    stop_matrix: Int32Array
    many_stops: dict[int, tuple[int, ...]]
    suppressions: list[tuple[int, int, tuple[int, ...]]]
    scored: list[tuple[int, Request]]
    matchers: dict[int, TokenMatcher]


def gather_sample_set(table: RequestTable, rows: Int32Array, eos_token_ids: tuple[int, ...]) -> SampleSet:
    """Gather the columns of ``rows`` (int32[S], running rows)."""
    params = table.params.take(rows)
    special = table.special.take(rows)
    stop_positions = np.flatnonzero(special & Special.STOP_TOKENS)
    many_stops: dict[int, tuple[int, ...]] = {}
    bias: dict[int, dict[int, float]] = {}
    suppressions: list[tuple[int, int, tuple[int, ...]]] = []
    scored: list[tuple[int, Request]] = []
    matchers: dict[int, TokenMatcher] = {}
    # Only rows that are out of the ordinary are looked at one by one.
    for position in np.flatnonzero(special & ~np.uint8(Special.PENALTIES)).tolist():
        request = table.requests[rows[position]]
        assert request is not None
        if len(request.stop_token_ids) > STOP_COLUMNS:
            many_stops[position] = request.stop_token_ids
        if request.extras.logit_bias:
            bias[position] = request.extras.logit_bias
        if request.special & Special.MIN_TOKENS:
            ids = eos_token_ids + request.stop_token_ids
            suppressions.append((position, int(params["min_new_tokens"][position]), ids))
        if params["flags"][position] & RequestFlags.RETURN_LOGPROB:
            scored.append((position, request))
        if request.matcher is not None:
            matchers[position] = request.matcher
    return SampleSet(
        rows=rows,
        base=rows.astype(np.int64) * table.context_length,
        columns=_sampling_columns(params, np.flatnonzero(special & Special.PENALTIES).astype(np.int32), bias),
        serials=table.serial.take(rows),
        keys=params["key"].copy(),
        max_new_tokens=params["max_new_tokens"].copy(),
        cached_tokens=table.cached_tokens.take(rows),
        retractions=table.retractions.take(rows),
        checks_eos=(params["flags"] & np.uint32(RequestFlags.IGNORE_EOS)) == 0,
        stop_positions=stop_positions,
        stop_matrix=table.stop_ids[rows[stop_positions]],
        many_stops=many_stops,
        suppressions=suppressions,
        scored=scored,
        matchers=matchers,
    )


def _sampling_columns(
    params: ParameterArray, penalized: Int32Array, bias: dict[int, dict[int, float]]
) -> SamplingColumns:
    temperature, top_k = params["temperature"].copy(), params["top_k"].copy()
    return SamplingColumns(
        temperature=temperature,
        top_p=params["top_p"].copy(),
        top_k=top_k,
        min_p=params["min_p"].copy(),
        frequency_penalty=params["frequency_penalty"].copy(),
        presence_penalty=params["presence_penalty"].copy(),
        repetition_penalty=params["repetition_penalty"].copy(),
        seed=params["seed"].copy(),
        all_greedy=not bias and not len(penalized) and bool(((temperature == 0) | (top_k == 1)).all()),
        penalized=penalized,
        logit_bias=bias,
    )
