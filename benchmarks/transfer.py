"""Pages from one process to another over loopback: a transport against its bare engine, in the same run.

Both write the same scattered pages into the same region of the same receiving process, turn by turn. The bare engine
is called as its own examples do: Mooncake by blocking batches of 512 spans, NIXL by one transfer that is asked for
its state without pause. ``tcp`` has no engine below it; its row has no ratio.

    python -m benchmarks.transfer
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from benchmarks.report import add_json_argument, publish
from sglang_lite.transfer.base import Description, KVTransport, Outcome, SpanBatch
from sglang_lite.transfer.factory import open_transport
from sglang_lite.transfer.mooncake_peer import MAX_IN_FLIGHT, Session
from sglang_lite.transfer.nixl_engine import load_module, rows_of
from tests.support.transfer_peer import PeerProcess

HEADERS = (
    "transport",
    "protocol",
    "page KiB",
    "pages",
    "GB/s",
    "bare GB/s",
    "ratio",
    "ratio p25",
    "ratio p75",
    "CPU ms",
)
TOKENS, TOKEN_BYTES = 1024, 36 * 2 * 8 * 128 * 2
"""A prompt of Qwen3-8B in bfloat16, page-major."""

PAGE_SIZES = (16, 64)
TARGET = 0.9
"""Least of the bare engine's throughput."""

Write = Callable[[SpanBatch], None]


def batch_of(page_size: int) -> SpanBatch:
    """The prompt's pages, scattered at both ends."""
    random = np.random.default_rng(page_size)
    length = page_size * TOKEN_BYTES
    count = TOKENS // page_size
    source, target = (random.permutation(count).astype(np.int64) * length for _ in range(2))
    return SpanBatch(source, target, np.full(count, length))


def ours(transport: KVTransport, memory: np.ndarray[Any, Any], description: bytes) -> Write:
    """Through the adapter, polled as the session worker does, once a millisecond."""
    lease = transport.register(memory.ctypes.data, memory.nbytes)
    peer = transport.connect(description)

    def write(spans: SpanBatch) -> None:
        transfer = transport.submit(peer, lease, peer.regions[0], spans, notify=b"", deadline_s=60.0)
        while transfer.poll() is Outcome.PENDING:
            time.sleep(0.001)
        if transfer.poll() is not Outcome.DONE:
            raise RuntimeError(f"{transfer.reason}: {transfer.detail}")

    return write


def bare_mooncake(memory: np.ndarray[Any, Any], told: Description) -> Write:
    """Blocking batches."""
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") or engine.register_memory(
        memory.ctypes.data, memory.nbytes
    ):
        raise RuntimeError("the bare engine does not start")
    session = msgspec.msgpack.decode(told.session, type=Session).session

    def write(spans: SpanBatch) -> None:
        source = (spans.src_offset + memory.ctypes.data).tolist()
        target = (spans.dst_offset + told.regions[0].addr).tolist()
        for start in range(0, len(spans), MAX_IN_FLIGHT):
            part = slice(start, start + MAX_IN_FLIGHT)
            if engine.batch_transfer_sync_write(session, source[part], target[part], spans.length[part].tolist()):
                raise RuntimeError("the bare engine failed")

    return write


def bare_nixl(memory: np.ndarray[Any, Any], told: Description) -> Write:
    """One transfer, asked for without pause."""
    module = load_module()
    agent = module.nixl_agent(uuid.uuid4().hex, module.nixl_agent_config(enable_prog_thread=False))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    name = agent.add_remote_agent(told.session).decode()

    def write(spans: SpanBatch) -> None:
        source = agent.get_xfer_descs(rows_of(memory.ctypes.data, spans.src_offset, spans.length, "cpu:0"), "DRAM")
        target = agent.get_xfer_descs(rows_of(told.regions[0].addr, spans.dst_offset, spans.length, "cpu:0"), "DRAM")
        handle = agent.initialize_xfer("WRITE", source, target, name)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"the bare agent reports {state}")
        agent.release_xfer_handle(handle)

    return write


BARE = {"mooncake": bare_mooncake, "nixl": bare_nixl}


def _timed(write: Write, spans: SpanBatch) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    write(spans)
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(name: str, rounds: int) -> list[tuple[object, ...]]:
    """Rows of one transport."""
    memory = np.random.default_rng(0).integers(0, 256, TOKENS * TOKEN_BYTES, dtype=np.uint8)
    transport = open_transport(name, host="127.0.0.1")
    rows: list[tuple[object, ...]] = []
    try:
        with PeerProcess(name, memory.nbytes) as there:
            description = there.describe()
            adapter = ours(transport, memory, description)
            bare = BARE[name](memory, msgspec.msgpack.decode(description, type=Description)) if name in BARE else None
            for page_size in PAGE_SIZES:
                spans = batch_of(page_size)
                rows.append((name, transport.capabilities().protocol, *_compare(adapter, bare, spans, rounds)))
            transport.close(5.0)
    finally:
        transport.close(0.0)
    return rows


def _compare(adapter: Write, bare: Write | None, spans: SpanBatch, rounds: int) -> tuple[object, ...]:
    here: list[tuple[float, float]] = []
    there: list[float] = []
    for turn in range(rounds + 1):
        order = (True, False) if turn % 2 else (False, True)
        for is_ours in order:
            write = adapter if is_ours else bare
            if write is None:
                continue
            seconds = _timed(write, spans)
            if turn and is_ours:  # the first turn sets up connections
                here.append(seconds)
            elif turn:
                there.append(seconds[0])
    size = spans.num_bytes / 1e9
    rate = size / statistics.median(seconds for seconds, _ in here)
    cpu = statistics.median(cpu for _, cpu in here) * 1e3
    page = int(spans.length[0]) // 1024
    if not there:
        return page, len(spans), round(rate, 2), "-", "-", "-", "-", round(cpu, 1)
    ratios = sorted(other / mine for (mine, _), other in zip(here, there, strict=True))
    low, middle, high = (round(float(np.quantile(ratios, part)), 2) for part in (0.25, 0.5, 0.75))
    bare_rate = round(size / statistics.median(there), 2)
    return page, len(spans), round(rate, 2), bare_rate, middle, low, high, round(cpu, 1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--transports", nargs="+", default=["tcp", "mooncake", "nixl"])
    parser.add_argument("--rounds", type=int, default=9)
    add_json_argument(parser)
    arguments = parser.parse_args()
    rows = [row for name in arguments.transports for row in measure(name, arguments.rounds)]
    publish("transfer", HEADERS, rows, json_path=arguments.json)


if __name__ == "__main__":
    main()
