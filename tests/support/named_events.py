"""Reading streams whose events have names."""

from __future__ import annotations

from typing import Any

import msgspec


def named_events(raw: bytes) -> list[tuple[str, Any]]:
    """(name, data) of every event of a stream."""
    events = []
    for block in raw.split(b"\n\n"):
        if block:
            name, data = block.split(b"\n")
            events.append((name.removeprefix(b"event: ").decode(), msgspec.json.decode(data.removeprefix(b"data: "))))
    return events
