"""The role of a core under prefill/decode disaggregation: its sessions, on all its ranks, and what it asks of them."""

from __future__ import annotations

from sglang_lite.config import ServerConfig
from sglang_lite.disaggregation.build import open_worker, start_decode, start_prefill
from sglang_lite.disaggregation.prefill_sessions import PrefillWorker
from sglang_lite.engine.decode_role import DecodeRole
from sglang_lite.engine.parts import CoreParts
from sglang_lite.engine.prefill_role import PrefillRole


def make_role(config: ServerConfig, parts: CoreParts) -> PrefillRole | DecodeRole:
    """Open the transport, start the sessions and make the role; ``Role.close`` ends all of it.

    Raises:
        StartupError: the pool cannot be transferred, or the transport or a port cannot be had.
    """
    worker = open_worker(config, parts.memory)
    if isinstance(worker, PrefillWorker):
        return PrefillRole(parts.scheduler, start_prefill(worker, parts.ranks))
    fallback = config.disaggregation_fallback == "local"
    sessions = start_decode(worker, parts.ranks)
    return DecodeRole(parts.scheduler, sessions, fallback=fallback, vocab_size=parts.info.vocab_size)
