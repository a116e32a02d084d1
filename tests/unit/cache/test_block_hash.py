"""Block hashes against the published vectors."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from sglang_lite.cache.block_hash import block_hashes, chain_digests, published_hash, salt_digest

GOLDEN = [
    ([1, 2, 3, 4], 4, [-3488128144981237669]),
    ([1, 2, 3, 4, 5], 4, [-3488128144981237669, -3787494577174227566]),
    (
        [10, 20, 30, 40, 50, 60, 70, 80],
        2,
        [978178666101069530, -895308556211281782, -8033692805846017938, 835415944263129316],
    ),
    ([], 4, []),
]


@pytest.mark.parametrize(("token_ids", "block_size", "expected"), GOLDEN)
def test_golden(token_ids: list[int], block_size: int, expected: list[int]) -> None:
    assert block_hashes(token_ids, block_size) == expected
    assert block_hashes(np.array(token_ids, dtype=np.int32), block_size) == expected


def test_a_chain_can_be_continued() -> None:
    ids = np.arange(12, dtype=np.int32)
    first = chain_digests(ids[:8].tobytes(), 4)
    rest = chain_digests(ids[8:].tobytes(), 4, first[-1])
    assert [published_hash(digest) for digest in first + rest] == block_hashes(ids, 4)


def test_salt_seeds_the_chain() -> None:
    seed = hashlib.sha256(b"sglang-cache-salt-v1\0" + "größe".encode()).digest()
    assert salt_digest("größe") == seed
    assert salt_digest("") == b""
    expected = hashlib.sha256(seed + np.array([7, 8], dtype="<u4").tobytes()).digest()
    assert block_hashes([7, 8], 2, "größe") == [int.from_bytes(expected[:8], "big", signed=True)]


def test_block_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        block_hashes([1], 0)
