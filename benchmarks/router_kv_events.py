"""The part of a choice that KV events add, without a network: ``python -m benchmarks.router_kv_events``.

8 workers hold 10,000 prompts of 4,096 token ids in pages of 16 (100 beginnings of 2,048, each with 100 ends). Requests
repeat one of them but for its last 16 tokens, so that 255 of 256 pages match. ``token ids`` reads them from the body,
``match`` hashes the prompt and looks its pages up; ``cold`` computes every hash, ``warm`` remembers those of earlier
prompts. ``store`` takes in the event of a new prompt, 256 pages.
"""

from __future__ import annotations

import argparse
import random

import msgspec

from benchmarks.report import add_json_argument, publish, time_calls
from benchmarks.router_choice import BEGINNINGS, ENDS, TOKENS, WORKERS
from sglang_lite.router.kv_follow import Follower
from sglang_lite.router.kv_index import BlockIndex, PromptHasher, token_bytes
from sglang_lite.router.kv_wire import read_batch

HEADERS = ("part", "p50 us", "p90 us", "calls")
PAGE = 16


def packed(ids: list[int]) -> bytes:
    """Token ids as hashes take them."""
    data = token_bytes(ids)
    assert data is not None
    return data


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    add_json_argument(parser)
    arguments = parser.parse_args()
    generator = random.Random(0)
    beginnings = [generator.choices(range(128_000), k=TOKENS // 2) for _ in range(BEGINNINGS)]
    ends = [generator.choices(range(128_000), k=TOKENS // 2) for _ in range(ENDS)]
    index, hasher = BlockIndex(4_000_000), PromptHasher(PAGE, chunks=250_000)
    slots = [index.open() for _ in range(WORKERS)]
    for number, beginning in enumerate(beginnings):
        for end in ends:
            index.store(slots[number % WORKERS], hasher.hashes(packed([*beginning, *end])))
    picks = [(generator.randrange(BEGINNINGS), generator.randrange(ENDS)) for _ in range(arguments.calls)]
    prompts = [[*beginnings[first], *ends[second][:-PAGE], *[7] * PAGE] for first, second in picks]
    bodies, tokens = [msgspec.json.encode(ids) for ids in prompts], [packed(ids) for ids in prompts]
    everyone = (1 << WORKERS) - 1
    decoder = msgspec.json.Decoder(list[int])
    follower = Follower(index, index.open())
    events = [
        msgspec.msgpack.encode([0.0, [["BlockStored", list(hasher.hashes(data)), None, ids, PAGE]], 0])
        for data, ids in zip(tokens, prompts, strict=True)
    ]
    depths = [index.match(PromptHasher(PAGE).hashes(data), everyone)[0] for data in tokens]
    timings = {
        "token ids": time_calls(lambda body: packed(decoder.decode(body)), bodies),
        "match, cold": time_calls(lambda data: index.match(PromptHasher(PAGE).hashes(data), everyone), tokens),
        "match, warm": time_calls(lambda data: index.match(hasher.hashes(data), everyone), tokens),
        "store": time_calls(lambda event: follower.take((follower.expected or 0), read_batch(event)), events),
    }
    rows = [(part, timing.median_us, timing.p90_us, timing.count) for part, timing in timings.items()]
    publish("router-kv-events", HEADERS, rows, json_path=arguments.json, extra={"pages": index.size})
    print(f"{min(depths)} to {max(depths)} of {TOKENS // PAGE} pages matched")


if __name__ == "__main__":
    main()
