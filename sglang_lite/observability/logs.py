"""The format of the log, in one place for every process."""

from __future__ import annotations

import logging

LOG_FORMAT = "[%(asctime)s] %(levelname)s %(name)s: %(message)s"


def configure_logging(level: str = "info") -> None:
    """Log to standard error. ``level`` is a name such as ``info``; a second call changes the level only."""
    logging.basicConfig(level=level.upper(), format=LOG_FORMAT)
    logging.getLogger().setLevel(level.upper())
