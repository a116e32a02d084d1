"""Sessions between a prefill and a decode worker in one process, over loopback.

Two questions: how much CPU the decode worker's thread spends on a session, and how fast pages go through the session
layer compared with the bare transport in the same run.

    python -m benchmarks.disaggregation --transport tcp
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np

from benchmarks.report import add_json_argument, publish
from sglang_lite.disaggregation.base import FirstToken, PeerReady
from sglang_lite.transfer.base import KVTransport, Outcome
from sglang_lite.transfer.factory import open_transport
from tests.support.session_pair import FAST, PAGE_SIZE, Pair, Side

HEADERS = ("transport", "page KiB", "pages", "session GB/s", "bare GB/s", "ratio", "decode CPU us", "sessions")
CASES = ((2304, 64), (9216, 16))
"""KiB of a page and pages of a prompt: Qwen3-8B in bfloat16 with pages of 16 and of 64 tokens, 1,024 tokens."""

QUIET = replace(FAST, verify_checksums=False, alive_interval=0.2, silence=2.0)


def _thread_seconds(side: Side) -> float:
    thread = side.worker.thread_id
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _session_seconds(pair: Pair, room: int, pages: int) -> float:
    where = list(range(pages))
    pair.open_prefill(room, room, pages * PAGE_SIZE)
    pair.open_decode(room, room, where, pages * PAGE_SIZE)
    pair.prefill.wait(room, (PeerReady,))
    start = time.perf_counter()
    pair.prefill.worker.send(room, 0, np.arange(pages, dtype=np.int32), FirstToken(1))
    pair.decode.wait(room)
    seconds = time.perf_counter() - start
    pair.prefill.wait(room)
    return seconds


def _bare_seconds(pair: Pair, source: KVTransport, target: KVTransport, pages: int) -> float:
    peer = source.connect(target.describe())
    where = np.arange(pages, dtype=np.int32)
    spans = pair.prefill.worker.memory.spans(where, where, pair.prefill.worker.memory.share_with(0, 1))
    lease = pair.prefill.worker.lease
    start = time.perf_counter()
    transfer = source.submit(peer, lease, peer.regions[0], spans, notify=b"", deadline_s=60.0)
    while transfer.poll() is Outcome.PENDING:
        time.sleep(0.0005)
    if transfer.poll() is not Outcome.DONE:
        raise RuntimeError(f"the bare transfer failed: {transfer.detail}")
    return time.perf_counter() - start


def measure(name: str, page_kib: int, pages: int, repeats: int) -> list[object]:
    """One row: medians of interleaved runs, then CPU over small sessions."""
    pair = Pair(QUIET, lambda host: open_transport(name, host=host), num_pages=pages, page_bytes=page_kib << 10)
    try:
        _session_seconds(pair, 0, pages)
        through, bare = [], []
        for turn in range(1, repeats + 1):
            # No session is open, so the transport of the worker is not used by its thread.
            through.append(_session_seconds(pair, turn, pages))
            pair.prefill.wait_idle()
            bare.append(_bare_seconds(pair, pair.prefill.worker.transport, pair.decode.worker.transport, pages))
        count = 200
        before = _thread_seconds(pair.decode)
        for room in range(1000, 1000 + count):
            _session_seconds(pair, room, 1)
        cpu = (_thread_seconds(pair.decode) - before) / count
    finally:
        pair.close()
    size = page_kib * 1024 * pages / 1e9
    rates = size / statistics.median(through), size / statistics.median(bare)
    return [name, page_kib, pages, *(round(rate, 2) for rate in rates), round(rates[0] / rates[1], 2), cpu * 1e6, count]


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--transport", action="append", help="may be given several times (default: tcp)")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved pairs of transfers")
    add_json_argument(parser)
    arguments = parser.parse_args()
    rows = [
        measure(name, page_kib, pages, arguments.repeats)
        for name in arguments.transport or ["tcp"]
        for page_kib, pages in CASES
    ]
    publish("disaggregation", HEADERS, rows, json_path=arguments.json)


if __name__ == "__main__":
    main()
