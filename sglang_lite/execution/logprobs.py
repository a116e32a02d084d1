"""Log-probabilities of prompt positions and sampled tokens, from the raw logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sglang_lite.scheduler.plan import LogprobRequest, ScoredPositions, StepPlan
from sglang_lite.types import Float32Array, Int32Array, Int64Array

SLICE_BYTES = 64 << 20
"""Logits of prompt positions are computed this much at a time: a long prompt times the vocabulary is gigabytes."""


def score_positions(
    logits: Tensor, token_ids: Int32Array, top: int, extra_ids: tuple[int, ...], hidden: Tensor | None = None
) -> ScoredPositions:
    """Natural-log probabilities at P positions.

    Args:
        logits: float32[P, V], raw.
        token_ids: int32[P]; -1 scores as NaN.
        top: alternatives per position.
        extra_ids: further tokens scored at every position.
        hidden: [P, H], the states behind the logits where they are wanted.
    """
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    tokens = torch.from_numpy(token_ids).long().unsqueeze(1).to(logits.device)
    scores = (logits.gather(1, tokens.clamp(min=0)) - log_total).masked_fill_(tokens < 0, torch.nan)
    top_values, top_ids = logits.topk(min(top, logits.shape[1]), dim=-1)
    extra = logits[:, list(extra_ids)] - log_total if extra_ids else logits.new_empty(logits.shape[0], 0)
    return ScoredPositions(
        logprobs=scores.squeeze(1).cpu().numpy(),
        top_ids=top_ids.int().cpu().numpy(),
        top_logprobs=(top_values - log_total).cpu().numpy(),
        extra_logprobs=extra.cpu().numpy(),
        hidden=_on_host(hidden, len(token_ids)),
    )


def _on_host(hidden: Tensor | None, positions: int) -> Float32Array:
    """A copy, because the step's own memory is used again by the next one."""
    if hidden is None:
        return np.empty((positions, 0), dtype=np.float32)
    states: Float32Array = hidden.to("cpu", torch.float32, copy=True).numpy()
    return states


def concatenate(parts: list[ScoredPositions]) -> ScoredPositions:
    """Consecutive positions in one record."""
    if len(parts) == 1:
        return parts[0]
    return ScoredPositions(
        logprobs=np.concatenate([part.logprobs for part in parts]),
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
        extra_logprobs=np.concatenate([part.extra_logprobs for part in parts]),
        hidden=np.concatenate([part.hidden for part in parts]),
    )


class LogprobScorer:
    """Scores what a plan's ``logprobs`` ask for.

    Args:
        compute_logits: [P, hidden] -> float32[P, V].
        vocab_size: width of the logits.
    """

    def __init__(self, compute_logits: Callable[[Tensor], Tensor], vocab_size: int) -> None:
        self._compute_logits = compute_logits
        self._slice = max(1, SLICE_BYTES // (4 * vocab_size))

    def keep_raw(self, plan: StepPlan, logits: Tensor) -> Tensor | None:
        """A copy of the sampling rows' logits before the sampler changes them, when a plan scores sampled tokens."""
        return logits.clone() if any(request.output for request in plan.logprobs) else None

    def score(
        self, plan: StepPlan, hidden: Tensor, raw_logits: Tensor | None, tokens: Int32Array
    ) -> list[ScoredPositions]:
        """One record for each of ``plan.logprobs``.

        Args:
            hidden: [T, hidden] of the step.
            raw_logits: float32[S, V] from ``keep_raw``.
            tokens: int32[S], the sampled tokens.
        """
        if not plan.logprobs:
            return []
        ends = np.cumsum(plan.query_lens, dtype=np.int64)
        return [self._score_one(plan, request, hidden, raw_logits, tokens, ends) for request in plan.logprobs]

    def _score_one(
        self,
        plan: StepPlan,
        request: LogprobRequest,
        hidden: Tensor,
        raw_logits: Tensor | None,
        tokens: Int32Array,
        ends: Int64Array,
    ) -> ScoredPositions:
        row = request.row_index
        parts = []
        # Token i of the step holds position kv_len - (end - i); the position before scores a prompt token.
        shift = int(ends[row]) - int(plan.kv_lens[row]) - 1
        for start in range(request.prompt_start, request.prompt_stop, self._slice):
            stop = min(start + self._slice, request.prompt_stop)
            states = hidden[start + shift : stop + shift]
            logits = self._compute_logits(states)
            ids = request.prompt_token_ids[start - request.prompt_start : stop - request.prompt_start]
            kept = states if request.hidden else None
            parts.append(score_positions(logits, ids, request.top, request.token_ids, kept))
        if request.output and raw_logits is not None:
            position = int(np.flatnonzero(plan.sample_index == row)[0])
            span = slice(position, position + 1)
            end = int(ends[row])
            kept = hidden[end - 1 : end] if request.hidden else None
            parts.append(score_positions(raw_logits[span], tokens[span], request.top, request.token_ids, kept))
        if not parts:
            empty = raw_logits if raw_logits is not None else self._compute_logits(hidden[:1])
            return score_positions(empty[:0], tokens[:0], request.top, request.token_ids)
        return concatenate(parts)
