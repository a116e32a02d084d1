"""Time of one prefix-cache operation: ``python -m benchmarks.prefix_cache``.

The tree holds ``cached`` sequences of 4,096 random tokens; every 64 of them share their first 256. Each figure is the
time of one call on one core. Operations:

  match hit         the whole sequence is cached; its page ids come back as one array (match and page gather). Ten
                    sequences take turns, so their data is equally warm whatever else is cached
  match hit, cold   the same, every call another sequence, whose data has left the processor's cache (10,000 only)
  match_length      as match hit, without page ids and without counting as a use
  match miss        the first page is not cached
  match half        the sequence parts from a cached one half way, for the first time: splits a node
  insert new        a sequence of which nothing is cached
  insert again      a sequence that is cached already
  lock + unlock     of a cached sequence
  evict             as many pages as one sequence has, least recently used first

The run needs about 2 GiB of memory at the default sizes.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.report import Timing, add_json_argument, publish, time_calls
from sglang_lite.cache import Node, PagePool, RadixCache
from sglang_lite.types import Int32Array

CACHED_LENGTH = 4096
SHARED_LENGTH = 256
SEQUENCES_PER_PREFIX = 64
WARM_PROBES = 10
VOCABULARY = 128_000

Rows = list[tuple[str, Timing]]

HEADERS = ("page", "cached", "tokens", "operation", "median us", "p90 us", "limit us")
LIMITS = {"match hit": 20.0, "match hit, cold": 20.0, "insert new": 40.0, "evict": 1000.0}
"""What the project promises for 4,096 tokens: eviction at every page size, the others at page size 16."""


def limit_of(operation: str, page_size: int, length: int) -> float | str:
    promised = length == CACHED_LENGTH and (page_size == 16 or operation == "evict")
    return LIMITS.get(operation, "") if promised else ""


def random_tokens(generator: np.random.Generator, count: int) -> Int32Array:
    return generator.integers(0, VOCABULARY, count, dtype=np.int32)


def populate(cache: RadixCache, cached: int, repeat: int, generator: np.random.Generator) -> list[Int32Array]:
    """Insert ``cached`` sequences; return the ids of up to ``repeat`` of them, evenly spread, in random order."""
    kept = set(np.linspace(0, cached - 1, min(cached, repeat), dtype=int).tolist())
    probes = []
    shared = random_tokens(generator, SHARED_LENGTH)
    for index in range(cached):
        if index % SEQUENCES_PER_PREFIX == 0:
            shared = random_tokens(generator, SHARED_LENGTH)
        tokens = np.concatenate((shared, random_tokens(generator, CACHED_LENGTH - SHARED_LENGTH)))
        insert_fresh(cache, tokens)
        if index in kept:
            probes.append(tokens)
    order = generator.permutation(len(probes))
    return [probes[index] for index in order]


def insert_fresh(cache: RadixCache, tokens: Int32Array) -> None:
    pages = cache.pool.allocate(len(tokens) // cache.pool.page_size)
    cache.pool.release(cache.insert(tokens, pages).duplicates(pages))


def cycle(items: list[Int32Array], count: int) -> list[Int32Array]:
    return [items[index % len(items)] for index in range(count)]


def time_reads(cache: RadixCache, probes: list[Int32Array], repeat: int, rng: np.random.Generator) -> Rows:
    length = len(probes[0])
    warm = cycle(probes[:WARM_PROBES], repeat)
    nodes = [cache.match(tokens).node for tokens in warm]

    def lock_and_unlock(node: Node) -> None:
        cache.lock(node)
        cache.unlock(node)

    rows: Rows = [("match hit", time_calls(cache.match, warm))]
    if len(probes) >= repeat:
        rows.append(("match hit, cold", time_calls(cache.match, probes)))
    rows.append(("match_length", time_calls(cache.match_length, warm)))
    rows.append(("match miss", time_calls(cache.match, [random_tokens(rng, length) for _ in range(repeat)])))
    rows.append(("lock + unlock", time_calls(lock_and_unlock, nodes)))
    return rows


def time_writes(cache: RadixCache, length: int, repeat: int, rng: np.random.Generator) -> Rows:
    page_size = cache.pool.page_size
    fresh = [random_tokens(rng, length) for _ in range(repeat)]
    jobs = [(tokens, cache.pool.allocate(length // page_size)) for tokens in fresh]

    def insert(job: tuple[Int32Array, Int32Array]) -> None:
        cache.insert(*job)

    rows = [("insert new", time_calls(insert, jobs)), ("insert again", time_calls(insert, jobs))]
    halves = []
    for tokens in fresh[: repeat // 2]:
        half = tokens.copy()
        half[length // 2 :] = (half[length // 2 :] + 1) % VOCABULARY
        halves.append(half)
    rows.append(("match half", time_calls(cache.match, halves)))
    evictions = [length // page_size] * repeat
    # A tree of few sequences may not have pages for every call.
    possible = cache.num_evictable_pages // evictions[0]
    rows.append(("evict", time_calls(cache.evict, evictions[:possible])))
    return rows


def measure(page_size: int, cached: int, length: int, repeat: int) -> Rows:
    """All operations on sequences of ``length`` tokens with ``cached`` sequences in the tree."""
    rng = np.random.default_rng([page_size, cached, length])
    slots = cached * CACHED_LENGTH + (2 * repeat + 1) * length
    cache = RadixCache(PagePool(slots // page_size, page_size))
    probes = populate(cache, cached, repeat, rng)
    if length != CACHED_LENGTH:
        probes = [np.concatenate((probe, random_tokens(rng, length - len(probe)))) for probe in probes]
        for tokens in probes:
            insert_fresh(cache, tokens)
    rows = time_reads(cache, probes, repeat, rng) + time_writes(cache, length, repeat, rng)
    cache.pool.audit()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--cached", type=int, nargs="+", default=[10, 10_000], help="sequences in the tree")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32_768], help="length of a probe")
    parser.add_argument("--repeat", type=int, default=200, help="calls per figure")
    add_json_argument(parser)
    arguments = parser.parse_args()
    rows: list[tuple[object, ...]] = []
    for page_size in arguments.page_sizes:
        for cached in arguments.cached:
            for length in arguments.tokens:
                for operation, timing in measure(page_size, cached, length, arguments.repeat):
                    limit = limit_of(operation, page_size, length)
                    rows.append((page_size, cached, length, operation, timing.median_us, timing.p90_us, limit))
    publish("prefix_cache", HEADERS, rows, json_path=arguments.json)


if __name__ == "__main__":
    main()
