"""A server whose transfers a test can hold: ``python -m tests.support.gated_core GATE serve ...``.

While the file GATE exists, its text says what happens to batches that are submitted: ``half`` moves the first half of
the spans and the rest once the file is gone; ``done`` moves all of them and tells so once the file is gone; ``wrong``
reads the first span from another page than it should. Everything is the real transport underneath.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from sglang_lite.disaggregation import build
from sglang_lite.engine.build import build_core_parts
from sglang_lite.engine.process import main as run_core
from sglang_lite.server import run
from sglang_lite.transfer.base import KVTransport, Outcome, Peer, RegionLease, RemoteRegion, SpanBatch, Transfer
from sglang_lite.transfer.factory import open_transport


class _Held:
    """Several transfers, of which the last may be submitted late or told late."""

    def __init__(self, gate: Path, parts: list[Transfer], later: Any, num_bytes: int) -> None:
        self._gate, self._parts, self._later, self.num_bytes = gate, parts, later, num_bytes
        self._aborted = False

    def poll(self) -> Outcome:
        outcomes = [part.poll() for part in self._parts]
        if self._aborted or Outcome.FAILED in outcomes:
            return Outcome.FAILED
        if self._gate.exists() or Outcome.PENDING in outcomes:
            return Outcome.PENDING
        if self._later is not None:
            self._parts.append(self._later())
            self._later = None
            return Outcome.PENDING
        return Outcome.DONE

    @property
    def reason(self) -> str | None:
        found = next((part.reason for part in self._parts if part.reason is not None), None)
        return found or ("aborted" if self._aborted else None)

    @property
    def detail(self) -> str:
        return next((part.detail for part in self._parts if part.detail), "")

    @property
    def quiesced(self) -> bool:
        return all(part.quiesced for part in self._parts) and self.poll() is not Outcome.PENDING

    def abort(self) -> None:
        self._aborted = True
        for part in self._parts:
            part.abort()


class GatedTransport:
    """A transport whose submissions go through a gate."""

    def __init__(self, gate: Path, inner: KVTransport) -> None:
        self._gate, self._inner = gate, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(
        self, peer: Peer, src: RegionLease, dst: RemoteRegion, spans: SpanBatch, *, notify: bytes, deadline_s: float
    ) -> Transfer:
        """See ``KVTransport.submit``."""
        mode = self._gate.read_text() if self._gate.exists() else ""

        def send(low: int, high: int, offsets: Any = spans.src_offset) -> Transfer:
            part = SpanBatch(offsets[low:high], spans.dst_offset[low:high], spans.length[low:high])
            return self._inner.submit(peer, src, dst, part, notify=notify, deadline_s=deadline_s)

        if mode == "wrong":
            offsets = spans.src_offset.copy()
            offsets[0] = (offsets[0] + spans.length[0]) % (src.length // spans.length[0] * spans.length[0])
            return send(0, len(spans), np.ascontiguousarray(offsets))
        if mode == "done":
            return _Held(self._gate, [send(0, len(spans))], None, spans.num_bytes)
        if mode == "half":
            middle = (len(spans) + 1) // 2
            later = (lambda: send(middle, len(spans))) if middle < len(spans) else None
            return _Held(self._gate, [send(0, middle)], later, spans.num_bytes)
        return send(0, len(spans))


def main() -> int:
    """Serve, or be the core of a server that does."""
    gate = Path(sys.argv[1])
    if sys.argv[2:] == ["core"]:

        def open_gated(name: str, **options: Any) -> KVTransport:
            gated: Any = GatedTransport(gate, open_transport(name, **options))
            transport: KVTransport = gated
            return transport

        build.open_transport = open_gated
        return run_core(build_core_parts)
    command = (sys.executable, "-m", "tests.support.gated_core", str(gate), "core")
    serve = run.run_server
    run.run_server = lambda config: serve(config, command)  # type: ignore[assignment,misc]
    from sglang_lite import cli

    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
