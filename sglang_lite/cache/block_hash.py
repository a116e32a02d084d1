"""Hashes that name a block of tokens together with everything before it, as KV events and routers use them.

The digest of a block is SHA-256 over the digest of the block before it (nothing for the first) followed by the
block's token ids, each as four little-endian bytes. The published value is the first eight bytes of the digest as a
big-endian signed integer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from sglang_lite.types import Int32Array

DIGEST_BYTES = 32
_TOKEN_BYTES = 4
_SALT_TAG = b"sglang-cache-salt-v1\x00"


def salt_digest(salt: str) -> bytes:
    """Digest that stands before the first block of a salted cache: 32 bytes, or none for the empty salt."""
    return hashlib.sha256(_SALT_TAG + salt.encode()).digest() if salt else b""


def chain_digests(token_bytes: bytes, block_size: int, parent: bytes = b"") -> list[bytes]:
    """Digests of consecutive blocks.

    Args:
        token_bytes: token ids, four little-endian bytes each; the last block may be short.
        block_size: tokens per block.
        parent: digest of the block before the first one, or the salt's, or nothing.

    Returns:
        One digest of 32 bytes per block.
    """
    stride = block_size * _TOKEN_BYTES
    digests = []
    for start in range(0, len(token_bytes), stride):
        parent = hashlib.sha256(parent + token_bytes[start : start + stride]).digest()
        digests.append(parent)
    return digests


def published_hash(digest: bytes) -> int:
    """The signed 64-bit value under which a block is published."""
    return int.from_bytes(digest[:8], "big", signed=True)


def block_hashes(token_ids: Int32Array | Sequence[int], block_size: int, salt: str = "") -> list[int]:
    """Published hashes of a sequence's blocks, a short last block included.

    Args:
        token_ids: int32[n] or a sequence of token ids.
        block_size: tokens per block, at least 1.
        salt: cache salt; the empty one means none.

    Returns:
        ceil(n / block_size) signed 64-bit integers.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1 token")
    token_bytes = np.asarray(token_ids, dtype="<u4").tobytes()
    return [published_hash(digest) for digest in chain_digests(token_bytes, block_size, salt_digest(salt))]
