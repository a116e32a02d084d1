"""Progress of loading weights, drawn on a terminal."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_BAR_WIDTH = 30
_REDRAW_SECONDS = 0.1
_LARGE_BYTES = 1_000_000_000
_LOG_SECONDS = 5.0


class LoadProgress:
    """Counts bytes read and draws a bar on ``stream``.

    On a terminal the bar is redrawn in place. Elsewhere, loads over one gigabyte print a line every few seconds and
    shorter ones print nothing. With ``enabled=False`` it only counts.
    """

    def __init__(self, total_bytes: int, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        self._total = max(total_bytes, 1)
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._silent = not enabled or (not self._terminal and total_bytes < _LARGE_BYTES)
        self._interval = _REDRAW_SECONDS if self._terminal else _LOG_SECONDS
        self._done = 0
        self._last_drawn = time.monotonic()

    def advance(self, num_bytes: int) -> None:
        """Count bytes; draws at most every interval, and once at the end."""
        self._done += num_bytes
        now = time.monotonic()
        finished = self._done >= self._total
        if self._silent or not (finished or now - self._last_drawn >= self._interval):
            return
        self._last_drawn = now
        share = min(self._done / self._total, 1.0)
        bar = ("#" * int(share * _BAR_WIDTH)).ljust(_BAR_WIDTH)
        line = f"Loading weights [{bar}] {share:4.0%} {self._done / 1e9:.2f}/{self._total / 1e9:.2f} GB"
        self._stream.write(f"\r{line}" + ("\n" if finished else "") if self._terminal else f"{line}\n")
        self._stream.flush()
