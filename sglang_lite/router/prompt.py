"""What a policy knows of a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as a policy sees it.

    Attributes:
        key: the prompt as bytes: the JSON text of the fields that make it.
        routing_key: the caller's own key for where it wants to be.
        tokens: token ids, four little-endian bytes each; None where they are not known.
        salt: of the prefix cache; empty for none.
    """

    key: bytes
    routing_key: str | None = None
    tokens: bytes | None = None
    salt: str = ""
