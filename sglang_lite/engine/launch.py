"""What the front tells a new engine core process: one line of JSON on its standard input."""

from __future__ import annotations

import msgspec


class LaunchMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a core needs to start.

    Attributes:
        config: the server configuration as JSON (``ServerConfig.to_json``).
        directory: private directory of the sockets; whoever ends last removes it.
        ingress: endpoint that the core binds for commands.
        egress: endpoint of every front, by front number, that the core connects to.
    """

    config: str
    directory: str
    ingress: str
    egress: tuple[str, ...]
