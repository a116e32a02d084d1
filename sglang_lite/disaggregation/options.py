"""How long sessions wait, from the environment variables that this field knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "SGLANG_DISAGGREGATION_"


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Times are seconds.

    Attributes:
        bootstrap_timeout: prefill: until a decode server has sent its pages; decode: until it could.
        waiting_timeout: decode: without progress until the KV is here; also of one batch of spans.
        metadata_wait: prefill: for the peer's pages after the prompt was computed.
        heartbeat_interval, heartbeat_max_failure: of ``GET /health`` of a bootstrap server, and of a peer's frames.
        max_sockets: connections to peers.
        alive_interval: between signs of life to peers with sessions.
        silence: of a peer after which its process is looked for.
        gone_grace: from a peer's death until its last bytes have surely been delivered by the network or dropped.
        quarantine_timeout: without a word of a peer whose host has vanished until pages that it may still touch are
            used again. Only for transports whose receiver cannot shut it out; above the time that TCP tries again.
        resend: of a message that nobody confirmed.
        verify_checksums: pages carry checksums; both sides need it.
    """

    bootstrap_timeout: float = 300.0
    waiting_timeout: float = 300.0
    metadata_wait: float = 5.0
    heartbeat_interval: float = 5.0
    heartbeat_max_failure: int = 2
    max_sockets: int = 16384
    alive_interval: float = 0.2
    silence: float = 0.5
    gone_grace: float = 1.0
    quarantine_timeout: float = 1200.0
    resend: float = 0.5
    verify_checksums: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], *, verify_checksums: bool = False) -> SessionOptions:
        """Read the ``SGLANG_DISAGGREGATION_`` variables.

        Raises:
            ValueError: names the variable and what it may be.
        """
        return cls(
            bootstrap_timeout=_positive(environ, "BOOTSTRAP_TIMEOUT", 300.0),
            waiting_timeout=_positive(environ, "WAITING_TIMEOUT", 300.0),
            heartbeat_interval=_positive(environ, "HEARTBEAT_INTERVAL", 5.0),
            heartbeat_max_failure=max(1, int(_positive(environ, "HEARTBEAT_MAX_FAILURE", 2.0))),
            quarantine_timeout=_positive(environ, "QUARANTINE_TIMEOUT", 1200.0),
            max_sockets=int(_positive(environ, "ZMQ_MAX_SOCKETS", 16384.0)),
            verify_checksums=verify_checksums,
        )


def _positive(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(PREFIX + name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1e9:
        raise ValueError(f"{PREFIX}{name} is {text!r}; it must be a number above 0")
    return value
