"""Prompts that are being computed, so that a request with the same beginning waits for their pages.

Requests that arrive together often share a long prefix. The cache has it only when the first of them is computed, so
computing them side by side would repeat the prefix for each.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sglang_lite.scheduler.request import Request
from sglang_lite.types import Int32Array

MIN_SHARED_TOKENS: Final = 128
"""Waiting costs about one step, so fewer tokens are rather computed again."""

_MAX_COMPARED: Final = 4

_Key = tuple[str, bytes]


class PrefillsInProgress:
    """Running prefills by their first ``MIN_SHARED_TOKENS`` tokens.

    Args:
        page_size: the cache shares whole pages.
        enabled: False when there is no cache to share through.
    """

    def __init__(self, page_size: int, *, enabled: bool) -> None:
        self._page_size = page_size
        self._enabled = enabled
        self._prompts: dict[_Key, dict[int, Int32Array]] = {}
        self._keys: dict[int, _Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, request: Request, tokens: Int32Array) -> None:
        """A request starts to compute ``tokens`` (int32[], unchanged until ``remove``)."""
        key = self._key(request, tokens)
        if key is not None:
            self._keys[request.order] = key
            self._prompts.setdefault(key, {})[request.order] = tokens

    def remove(self, request: Request) -> None:
        """The request's prompt is published, or never will be."""
        key = self._keys.pop(request.order, None)
        if key is not None:
            prompts = self._prompts[key]
            del prompts[request.order]
            if not prompts:
                del self._prompts[key]

    def is_worth_waiting(self, request: Request, start: int) -> bool:
        """Whether a running prefill will save this request at least half of its own.

        Args:
            request: a waiting request, not limited by ``logprob_start``.
            start: tokens it finds in the cache already.
        """
        key = self._key(request, request.tokens) if self._prompts else None
        prompts = self._prompts.get(key) if key is not None else None
        if not prompts:
            return False
        needed = len(request.tokens) - start
        for tokens in list(prompts.values())[-_MAX_COMPARED:]:
            saved = self._common_pages(request.tokens, tokens) * self._page_size - start
            if saved >= MIN_SHARED_TOKENS and 2 * saved >= needed:
                return True
        return False

    def _key(self, request: Request, tokens: Int32Array) -> _Key | None:
        if not self._enabled or len(tokens) < MIN_SHARED_TOKENS:
            return None
        return request.namespace, tokens[:MIN_SHARED_TOKENS].tobytes()

    def _common_pages(self, first: Int32Array, second: Int32Array) -> int:
        count = min(len(first), len(second))
        differs = np.flatnonzero(first[:count] != second[:count])
        return (int(differs[0]) if len(differs) else count) // self._page_size
