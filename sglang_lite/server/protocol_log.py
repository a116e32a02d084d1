"""A client that breaks the protocol gets one line, without a traceback and its bytes; one that leaves gets none."""

from __future__ import annotations

import logging

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web import RequestPayloadError


class _Shorten(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ConnectionError):
            return False  # it hung up in the middle of its reply, as clients may
        if isinstance(error, HttpProcessingError | RequestPayloadError):
            record.exc_info = None
            record.msg, record.args = f"{record.getMessage()}: {type(error).__name__}", None
        return True


_SHORTEN = _Shorten()


def shorten_protocol_errors() -> None:
    """Shorten what aiohttp logs of clients' faults: they could fill the log with them. Again is no harm."""
    logging.getLogger("aiohttp.server").addFilter(_SHORTEN)
