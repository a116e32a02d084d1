"""How fast KV pages go between servers of equal and of different tensor-parallel sizes.

``python -m benchmarks.disaggregation_ranks`` moves 1,024 tokens of the shape of Qwen3-8B (pages of 64 tokens, 144 MiB)
through whole sessions, all ranks in one process on loopback: best of five, beside the table of ``benchmarks.transfer``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time

import numpy as np

from benchmarks.report import add_json_argument, publish
from sglang_lite.disaggregation.base import FirstToken, KVArrived, PeerReady
from sglang_lite.transfer.factory import open_transport
from tests.support.session_pair import FAST
from tests.support.session_ranks import NUM_PAGES, Servers

HEADERS = ("transport", "prefill ranks", "decode ranks", "GB/s")
SIZES = ((1, 1), (2, 2), (1, 2), (2, 1))
LAYERS, PAGE_SIZE, HEADS, HEAD_BYTES, ROUNDS = 36, 64, 8, 256, 5


def measure(backend: str, prefill_size: int, decode_size: int) -> tuple[object, ...]:
    """Gigabytes in a second, of the best session."""
    page = (PAGE_SIZE, LAYERS * 2 * PAGE_SIZE, HEAD_BYTES)
    options = dataclasses.replace(FAST, verify_checksums=False)
    servers = Servers(
        prefill_size, decode_size, HEADS, lambda host: open_transport(backend, host=host), options=options, page=page
    )
    pages, seconds = list(range(NUM_PAGES)), []
    with contextlib.closing(servers):
        for key in range(1, ROUNDS + 1):
            servers.open(key, key, NUM_PAGES, pages)
            for side in servers.prefill:
                side.wait(key, (PeerReady,))
            began = time.monotonic()
            for side in servers.prefill:
                side.worker.send(key, 0, np.array(pages, dtype=np.int32), FirstToken(key))
            for side in servers.decode:
                arrived = side.wait(key, seconds=120.0)
                if not isinstance(arrived, KVArrived):
                    raise SystemExit(f"{backend}: {arrived}")
            seconds.append(time.monotonic() - began)
    rate = round(servers.whole.nbytes / min(seconds) / 1e9, 2)
    return backend, prefill_size, decode_size, rate


def main() -> None:
    """Print the table, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backends", nargs="*", default=["tcp", "mooncake_tcp", "nixl"])
    add_json_argument(parser)
    arguments = parser.parse_args()
    rows = [measure(name, *sizes) for name in arguments.backends for sizes in SIZES]
    publish("disaggregation_ranks", HEADERS, rows, json_path=arguments.json)


if __name__ == "__main__":
    main()
