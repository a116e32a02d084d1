"""The id of a request: as the client sees it, and as the engine knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_lite.frontend.request_ids import parse_request_id, with_prefix
from sglang_lite.server.context import ServerContext

ID_FIELDS = ("rid", "request_id")


@dataclass(slots=True, frozen=True)
class Identity:
    """The id of a request on the OpenAI routes.

    Attributes:
        shown: the ``id`` of the reply, with the prefix of its kind.
        base: the engine's id, or the start of it when there are several sequences.
    """

    shown: str
    base: str

    @classmethod
    def read(cls, context: ServerContext, body: Mapping[str, Any], headers: Mapping[str, str], prefix: str) -> Identity:
        """From ``rid`` or ``request_id``, else the header ``X-Request-Id``, else a new one.

        The header is only shown, never the engine's key: two requests may carry the same one.
        """
        for name in ID_FIELDS:
            if body.get(name) is not None:
                given = parse_request_id(body[name], name)
                return cls(with_prefix(prefix, given), given)
        header = headers.get("X-Request-Id")
        if header:
            shown = with_prefix(prefix, parse_request_id(header, "X-Request-Id"))
            return cls(shown, context.new_request_id(f"{shown}-"))
        made = context.new_request_id(prefix)
        return cls(made, made)
