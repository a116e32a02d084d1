"""A progress line for the few things that take seconds before a server is ready."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import Self, TextIO

_WIDTH = 30
_INTERVAL = 0.1


class ProgressLine:
    """``Title [#####.....]  50 %`` redrawn in place on a terminal; elsewhere one line at the start and one at the end.

    Nothing is drawn before the first update, so that work that turns out to be done already stays silent.
    """

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._started = 0.0
        self._drawn = 0.0

    def update(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` units are finished."""
        now = time.monotonic()
        if not self._started:
            self._started = now
            if not self._terminal:
                self._write(f"{self._title} ...\n")
        if self._terminal and (done >= total or now - self._drawn >= _INTERVAL):
            self._drawn = now
            share = done / max(total, 1)
            bar = ("#" * int(share * _WIDTH)).ljust(_WIDTH, ".")
            self._write(f"\r{self._title} [{bar}] {share:4.0%}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the line and say how long it took."""
        if self._started:
            outcome = "done" if error is None else "failed"
            lead = "\n" if self._terminal else ""
            self._write(f"{lead}{self._title}: {outcome} in {time.monotonic() - self._started:.1f} s\n")

    def _write(self, text: str) -> None:
        """A line that cannot be written, as on a disk that is full, does not end what it tells of."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()
