"""Whether a core still says something: one that is stopped, or hangs in native code, is there and silent.

Looks are counted, not seconds: a front that was itself stopped, or got no processor, must not hold that against the
core. A look costs one small message a second; what the core sends of its own accord counts as an answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LOOK_SECONDS = 1.0
"""Seconds between two looks."""

QUIET_SECONDS = 20.0
"""Seconds of silence after which a core counts as stuck. A long step delays the answer; it is no fault."""


@dataclass(frozen=True)
class Patience:
    """How many looks in a row may find nothing.

    Attributes:
        quiet: then the core gets no more requests until it speaks again.
        end: then the requests that it has are ended; 0 is never.
    """

    quiet: int
    end: int

    @classmethod
    def of(cls, watchdog_timeout: float) -> Patience:
        """That of ``--watchdog-timeout``."""
        end = math.ceil(watchdog_timeout / LOOK_SECONDS) if watchdog_timeout > 0 else 0
        quiet = math.ceil(QUIET_SECONDS / LOOK_SECONDS)
        return cls(min(quiet, end) if end else quiet, end)

    def is_quiet(self, missed: int) -> bool:
        """Whether a core that said nothing at ``missed`` looks gets no more requests."""
        return missed >= self.quiet

    def is_over(self, missed: int) -> bool:
        """Whether its requests are ended."""
        return 0 < self.end <= missed

    def describe(self, missed: int) -> str:
        """What clients are told."""
        return f"the engine core is there but has said nothing for {missed * LOOK_SECONDS:.0f} s; try again later"


class Pulse:
    """Of one core.

    Attributes:
        heard: set whenever the core has said something.
        asked: the core was asked for a sign of life and has said nothing since.
    """

    __slots__ = ("_missed", "asked", "heard")

    def __init__(self) -> None:
        self.heard = True
        self.asked = False
        self._missed = 0

    def look(self, *, excused: bool) -> int:
        """Looks in a row without a word from the core.

        Args:
            excused: the core does something that takes long and was asked for.
        """
        if self.heard:
            self.heard = self.asked = False
            self._missed = 0
        elif not excused:
            self._missed += 1
        return self._missed
