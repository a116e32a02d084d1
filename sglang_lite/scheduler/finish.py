"""Which of the tokens just drawn end their requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_lite.scheduler.outputs import NO_TOKEN
from sglang_lite.scheduler.sampling import SampleSet
from sglang_lite.scheduler.state import SchedulerState
from sglang_lite.types import FinishCode, Int32Array, UInt8Array


def finish_codes(
    state: SchedulerState, sample: SampleSet, generated: Int32Array, tokens: Int32Array
) -> tuple[UInt8Array, Int32Array]:
    """``FinishCode`` (uint8[S]) and matched stop token (int32[S]) of every row.

    An end token that is also the last token allowed counts as a stop, as in SGLang.
    """
    codes: UInt8Array = np.zeros(len(tokens), dtype=np.uint8)
    matched: Int32Array = np.full(len(tokens), NO_TOKEN, dtype=np.int32)
    codes[generated >= sample.max_new_tokens - np.int32(1)] = FinishCode.LENGTH
    stops = _stop_hits(state, sample, tokens)
    if stops is not None:
        codes[stops] = FinishCode.STOP_TOKEN
        matched[stops] = tokens[stops]
    bad = tokens < 0
    if bad.any():
        codes[bad] = FinishCode.ERROR
        matched[bad] = NO_TOKEN
    return codes, matched


def _stop_hits(state: SchedulerState, sample: SampleSet, tokens: Int32Array) -> npt.NDArray[np.bool_] | None:
    """bool[S]: the token is an end token of the model or of the request; None when there is none."""
    hits: npt.NDArray[np.bool_] | None = None
    for end_token in state.config.eos_token_ids:
        equal = tokens == end_token
        hits = equal if hits is None else hits | equal
    if hits is not None:
        hits = hits & sample.checks_eos if hits.any() else None
    positions = sample.stop_positions
    if len(positions):
        own = (sample.stop_matrix == tokens[positions][:, None]).any(axis=1)
        for position, ids in sample.many_stops.items():
            own[np.searchsorted(positions, position)] = int(tokens[position]) in ids
        if own.any():
            hits = np.zeros(len(tokens), dtype=np.bool_) if hits is None else hits
            hits[positions[own]] = True
    return hits
