"""Ends a core process whose loop has stopped turning, so that its front can answer the clients."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

EXIT_STUCK = 71
"""Exit code of a core that was ended because a step did not return in time."""

CHECKS = 4
"""Looks within one time limit: a stuck step is noticed at most a quarter of the limit late."""


def watch(turn_started: Callable[[], float | None], limit: float) -> None:
    """Start a thread that ends this process when one turn of the core's loop takes longer than ``limit`` seconds.

    Args:
        turn_started: ``time.monotonic`` of the moment the running turn began, None while the core waits for messages.
        limit: 0 or less watches nothing.
    """
    if limit > 0:
        threading.Thread(target=_watch, args=(turn_started, limit), name="watchdog", daemon=True).start()


def _watch(turn_started: Callable[[], float | None], limit: float) -> None:
    while True:
        time.sleep(limit / CHECKS)
        started = turn_started()
        if started is not None and time.monotonic() - started > limit:
            logger.critical("a step has not returned for %.0f s (--watchdog-timeout): ending the engine core", limit)
            faulthandler.dump_traceback(all_threads=True)
            os._exit(EXIT_STUCK)
