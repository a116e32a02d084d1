"""From logits to tokens, with per-request parameters."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_lite.execution.penalties import OutputCounts, apply_penalties
from sglang_lite.execution.random_numbers import DrawSource, exponentials
from sglang_lite.scheduler.plan import SamplingColumns
from sglang_lite.types import NO_SEED, Int32Array, Int64Array

CANDIDATES = 256
"""Most likely tokens looked at first. A row whose filters keep more of them is sorted as a whole."""

RACE_ELEMENTS = 1 << 16
"""Random numbers of seeded rows made at a time (rows times vocabulary): few enough to stay in the processor's cache."""

NO_TOKEN = -1
"""Token of a row whose logits are not finite."""


class Sampler:
    """Samples one token per row.

    Every row's token depends on its own logits, parameters, seed and count of output tokens only: how a row is
    filtered is decided row by row, and its random number comes from its seed.

    Args:
        vocab_size: width of the logits.
        seed: of the generator behind requests without a seed.
    """

    def __init__(self, vocab_size: int, device: torch.device, seed: int | None = None) -> None:
        self._counts = OutputCounts(vocab_size, device)
        self._draws = DrawSource(seed)

    def sample(
        self,
        logits: Tensor,
        columns: SamplingColumns,
        rows: Int32Array,
        generated: Int32Array,
        suppressed: dict[int, tuple[int, ...]],
        resumed: dict[int, Int32Array],
    ) -> Tensor:
        """Tokens int64[S], -1 where the logits of a row are not finite.

        Args:
            logits: float32[S, V]; rows with penalties, bias or suppressed tokens are changed in place.
            columns: parameters of the rows.
            rows: int32[S], rows of the request table.
            generated: int32[S], output tokens of each row so far.
            suppressed: position -> tokens that may not be drawn.
            resumed: row -> output tokens so far, where the counts of a penalised row start anew.
        """
        for row, output_tokens in resumed.items():
            self._counts.restart(row, output_tokens)
        slots = self._counts.slots(rows[columns.penalized]) if len(columns.penalized) else None
        self._adjust(logits, columns, slots, suppressed)
        tokens = lowest_argmax(logits)
        best = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)  # not finite if anything in the row is not, or is +inf
        if not columns.all_greedy:
            self._draw_tokens(logits, tokens, columns, generated)
        tokens.masked_fill_(~best.isfinite(), NO_TOKEN)
        if slots is not None:
            self._counts.add(slots, tokens[torch.from_numpy(columns.penalized).long()])
        return tokens

    def _adjust(
        self,
        logits: Tensor,
        columns: SamplingColumns,
        slots: Tensor | None,
        suppressed: dict[int, tuple[int, ...]],
    ) -> None:
        """Penalties, bias and suppressed tokens, in place."""
        if slots is not None:
            positions = torch.from_numpy(columns.penalized).long()
            logits[positions] = apply_penalties(logits[positions], self._counts.of(slots), columns)
        for position, bias in columns.logit_bias.items():
            logits[position, list(bias)] += torch.tensor(list(bias.values()), dtype=logits.dtype)
        for position, token_ids in suppressed.items():
            logits[position, list(token_ids)] = -torch.inf

    def _draw_tokens(self, logits: Tensor, tokens: Tensor, columns: SamplingColumns, generated: Int32Array) -> None:
        """Overwrite the greedy ``tokens`` of the rows that sample."""
        draws = self._draws.draw(len(generated))
        random = (columns.temperature > 0) & (columns.top_k != 1)
        filtered = random & ((columns.top_k > 0) | (columns.top_p < 1) | (columns.min_p > 0))
        seeded = columns.seed != NO_SEED
        for group in (random & ~filtered & ~seeded, filtered & ~seeded):
            self._draw_group(logits, tokens, columns, np.flatnonzero(group), _Shares(draws))
        for group in (random & ~filtered & seeded, filtered & seeded):
            chosen = np.flatnonzero(group)
            step = max(1, RACE_ELEMENTS // logits.shape[1])
            for start in range(0, len(chosen), step):
                race = _Race(columns.seed, generated)
                self._draw_group(logits, tokens, columns, chosen[start : start + step], race)

    def _draw_group(
        self, logits: Tensor, tokens: Tensor, columns: SamplingColumns, chosen: npt.NDArray[np.int64], pick: _Pick
    ) -> None:
        """Overwrite the tokens at the positions ``chosen``, which are all filtered or all not."""
        if not len(chosen):
            return
        positions = torch.from_numpy(chosen)
        temperature = torch.from_numpy(columns.temperature[chosen]).unsqueeze(1)
        scaled = logits.index_select(0, positions).div_(temperature)
        first = chosen[0]
        if columns.top_k[first] > 0 or columns.top_p[first] < 1 or columns.min_p[first] > 0:
            drawn = _draw_filtered(scaled, columns, chosen, pick)
        else:
            drawn = pick(scaled.softmax(dim=-1), None, chosen)
        tokens.index_copy_(0, positions, drawn)


class _Pick(Protocol):
    """How a row's token is drawn from weights."""

    def __call__(self, weights: Tensor, token_ids: Tensor | None, positions: npt.NDArray[np.int64]) -> Tensor:
        """Columns int64[S] drawn in proportion to ``weights`` float32[S, K].

        Args:
            token_ids: int64[S, K]; None for the vocabulary in order.
            positions: int64[S], places of the rows among those that sample.
        """
        ...


class _Shares:
    """One random share of the total a row, for rows without a seed: one pass over the weights.

    Args:
        shares: float64[all rows] in [0, 1).
    """

    def __init__(self, shares: npt.NDArray[np.float64]) -> None:
        self._shares = shares

    def __call__(self, weights: Tensor, token_ids: Tensor | None, positions: npt.NDArray[np.int64]) -> Tensor:
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        return _invert(cumulative, torch.from_numpy(self._shares[positions]))


class _Race:
    """A random number for every token, for rows with a seed: the least exponential number over weight wins.

    In another batch the logits differ in their last bits. A share of the total would then fall on another of the many
    small weights about once in 500 tokens; here only two tokens that are equal to those bits can change places.
    """

    def __init__(self, seed: Int64Array, counter: Int32Array) -> None:
        self._seed = seed
        self._counter = counter

    def __call__(self, weights: Tensor, token_ids: Tensor | None, positions: npt.NDArray[np.int64]) -> Tensor:
        ids = np.arange(weights.shape[1])[None] if token_ids is None else token_ids.numpy()
        times = exponentials(self._seed[positions], self._counter[positions], ids)
        return torch.from_numpy((weights.numpy() / times).argmax(axis=-1))  # as in lowest_argmax, faster than torch's


def lowest_argmax(logits: Tensor) -> Tensor:
    """Index of the largest logit of each row, the lowest of equals, the first NaN if there is one: int64[S]."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))  # measured seven times as fast as torch's own
    return logits.argmax(dim=-1)


def _draw_filtered(logits: Tensor, columns: SamplingColumns, chosen: npt.NDArray[np.int64], pick: _Pick) -> Tensor:
    """Rows with top-k, top-p or min-p: look at the most likely tokens first, sort whole rows only if need be."""
    vocab_size = logits.shape[1]
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    top_k = torch.from_numpy(columns.top_k[chosen]).long().unsqueeze(1)
    top_k = torch.where(top_k > 0, top_k, vocab_size)
    top_p = torch.from_numpy(columns.top_p[chosen]).double().unsqueeze(1)
    min_p = torch.from_numpy(columns.min_p[chosen]).unsqueeze(1)
    values, ids = logits.topk(min(CANDIDATES, vocab_size), dim=-1)
    weights, settled = _filter(values, log_total, top_k, top_p, min_p)
    tokens = ids.gather(1, pick(weights, ids, chosen).unsqueeze(1)).squeeze(1)
    if values.shape[1] < vocab_size and not bool(settled.all()):
        rest = (~settled).nonzero().squeeze(1)
        values, ids = logits[rest].sort(dim=-1, descending=True, stable=True)
        weights, _ = _filter(values, log_total[rest], top_k[rest], top_p[rest], min_p[rest])
        tokens[rest] = ids.gather(1, pick(weights, ids, chosen[rest.numpy()]).unsqueeze(1)).squeeze(1)
    return tokens


def _filter(values: Tensor, log_total: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities of the tokens that the filters keep, and whether the filters end within ``values``.

    Args:
        values: float32[S, K] logits, falling. log_total: float32[S, 1]. top_k, top_p, min_p: [S, 1].

    Returns:
        float32[S, K] (0 for what is not kept), bool[S].
    """
    probabilities = (values - log_total).exp()
    before = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities
    keep = (torch.arange(values.shape[1]) < top_k) & (before < top_p) & (probabilities >= min_p * probabilities[:, :1])
    keep[:, 0] = True
    return probabilities * keep, ~keep[:, -1]


def _invert(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """First place whose cumulative weight exceeds the drawn share of the total: float64[S, K], float64[S]."""
    target = (uniform * cumulative[:, -1]).unsqueeze(1)
    places = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    # Rounding may carry the target to the very end: take the last place that has weight.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()).squeeze(1)
    return torch.minimum(places, last)
