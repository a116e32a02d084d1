"""Which worker holds which blocks of KV pages, exactly as the workers say. No I/O.

A source is one publisher: a worker, or one data-parallel rank of it. Sets of sources are bits of an integer.
"""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator, Sequence

from sglang_lite.cache.block_hash import chain_digests
from sglang_lite.cache.namespace import EventFormat, hash_scheme, join_namespace

_TOKEN_BYTES = 4
CHUNK = 16
"""Blocks whose hashes are remembered together."""


class BlockIndex:
    """Hashes of blocks -> bits of the sources that hold them.

    Args:
        capacity: (block, source) pairs at most, about 200 bytes each; more are not taken.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._holders: dict[int, int] = {}
        self._blocks: dict[int, set[int]] = {}
        self.size = 0

    def open(self) -> int:
        """The number of a new source."""
        slot = next(number for number in range(len(self._blocks) + 1) if number not in self._blocks)
        self._blocks[slot] = set()
        return slot

    def close(self, slot: int) -> None:
        """A source is no more."""
        self.clear(slot)
        del self._blocks[slot]

    def store(self, slot: int, hashes: Iterable[int]) -> bool:
        """The source holds these blocks now; False when there was no room for all."""
        bit, own = 1 << slot, self._blocks[slot]
        for value in hashes:
            if value in own:
                continue
            if self.size >= self._capacity:
                return False
            own.add(value)
            self.size += 1
            self._holders[value] = self._holders.get(value, 0) | bit
        return True

    def remove(self, slot: int, hashes: Iterable[int]) -> None:
        """The source does not hold these blocks any more."""
        own = self._blocks[slot]
        for value in hashes:
            if value in own:
                own.remove(value)
                self._release(slot, value)

    def clear(self, slot: int) -> None:
        """The source holds nothing."""
        own = self._blocks[slot]
        for value in own:
            self._release(slot, value)
        own.clear()

    def blocks(self, slot: int) -> int:
        """How many blocks the source holds."""
        return len(self._blocks[slot])

    def match(self, hashes: Iterable[int], sources: int) -> tuple[int, int]:
        """The longest beginning of a chain that one of ``sources`` (bits) holds.

        Returns:
            Its length in blocks, and the bits of the sources that hold it; (0, 0) when none holds any.
        """
        holders, depth, alive = self._holders, 0, sources
        for value in hashes:
            left = alive & holders.get(value, 0)
            if not left:
                break
            alive = left
            depth += 1
        return (depth, alive) if depth else (0, 0)

    def _release(self, slot: int, value: int) -> None:
        self.size -= 1
        left = self._holders[value] & ~(1 << slot)
        if left:
            self._holders[value] = left
        else:
            del self._holders[value]


class PromptHasher:
    """Hashes of a prompt's whole blocks, lazily: a chain that is known to nobody is not computed to its end.

    Hashing is what a look-up costs most, and prompts share their beginnings: what is computed is remembered, in chunks
    of 16 blocks, the ones used last.

    Args:
        block_size: tokens of a block.
        form: how name spaces enter the hashes.
        chunks: remembered at most; one has some 900 bytes beside its tokens.
    """

    def __init__(self, block_size: int, form: EventFormat = "default", chunks: int = 4096) -> None:
        self._chunks = chunks
        self._stride = block_size * _TOKEN_BYTES
        self._form: EventFormat = form
        self._memory: dict[tuple[bytes, bytes], tuple[bytes, tuple[int, ...]]] = {}

    def hashes(self, tokens: bytes, salt: str = "") -> Iterator[int]:
        """Published hashes, first block first; an incomplete last block has none.

        Args:
            tokens: four little-endian bytes each.
            salt: the request's ``cache_salt``.
        """
        scheme = hash_scheme(join_namespace(salt, ""), self._form)
        step = self._stride * CHUNK
        end = len(tokens) - len(tokens) % self._stride
        parent = scheme.start
        for start in range(0, end, step):
            chunk = tokens[start : min(start + step, end)]
            # Without a salt the parent says it all; the seed is of the salt, too.
            key = (parent + scheme.seed, chunk)
            known = self._memory.pop(key, None)
            if known is None:
                digests = chain_digests(chunk, self._stride // _TOKEN_BYTES, parent)
                known = (digests[-1], tuple(map(scheme.publish, digests)))
                if len(self._memory) >= self._chunks:
                    del self._memory[next(iter(self._memory))]
            self._memory[key] = known  # the one used last is last
            parent, values = known
            yield from values


def token_bytes(ids: Sequence[int]) -> bytes | None:
    """Token ids as hashes take them; None when one is no token id."""
    try:
        packed = array.array("I", ids)
    except (OverflowError, TypeError):
        return None
    return packed.tobytes()
