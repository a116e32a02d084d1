"""The name space of a cached sequence (cache salt, extra key, adapter), and what it does to published hashes."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from sglang_lite.cache.block_hash import published_hash, salt_digest

EventFormat = Literal["default", "dynamo"]

_TAG = b"sglang-kv-event-namespace-v1"
_FORM = re.compile(r"(?:(lora\d+)=([^:]*):)?(?:(\d+):(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Namespace:
    """The parts of a name space; all are None (``EVERYONE``) for sequences that everybody may match.

    Attributes:
        salt: the request's ``cache_salt``.
        extra_key: the request's ``extra_key``, behind the identity of the adapter when there is one.
        adapter: public name of the adapter.
    """

    salt: str | None = None
    extra_key: str | None = None
    adapter: str | None = None


EVERYONE = Namespace()


def join_namespace(salt: str, extra_key: str) -> str:
    """The name space of a request as one text; empty when it asks for none."""
    # The length keeps ("ab", "") and ("a", "b") apart, whatever they consist of.
    return f"{len(salt)}:{salt}{extra_key}" if salt or extra_key else ""


def adapter_namespace(number: int, name: str) -> str:
    """What goes before ``join_namespace`` for requests of an adapter: the ``number``-th one loaded, called ``name``."""
    return f"lora{number}={name}:"


@lru_cache(maxsize=4096)
def split_namespace(text: str) -> Namespace:
    """The inverse of both. Any other text counts as a salt."""
    form = _FORM.fullmatch(text)
    if form is None:
        return Namespace(salt=text)
    identity, adapter, length, rest = form.groups()
    size = int(length or 0)
    salt, extra = (rest or "")[:size], (rest or "")[size:]
    return Namespace(salt or None, (identity or "") + extra or None, adapter)


@dataclass(frozen=True, slots=True)
class HashScheme:
    """How the digests of one name space are made and published.

    Attributes:
        start: digest before the first page; empty without a salt.
        seed: with which published hashes are mixed; empty when they are not.
    """

    start: bytes
    seed: bytes

    def publish(self, digest: bytes) -> int:
        """The signed 64-bit value for the digest of a page."""
        value = published_hash(digest)
        if not self.seed:
            return value
        return published_hash(hashlib.sha256(self.seed + value.to_bytes(8, "big", signed=True)).digest())


@lru_cache(maxsize=4096)
def hash_scheme(namespace: str, form: EventFormat) -> HashScheme:
    """The scheme of a name space, given as text.

    A salt seeds the chain. In the form "default" an extra key is not in the hash, unless it names an adapter; in the
    form "dynamo" the extra key and the salt are mixed into each published hash.
    """
    parts = split_namespace(namespace)
    start = salt_digest(parts.salt or "")
    if form == "dynamo":
        mixed = (parts.extra_key, parts.salt)
    else:
        mixed = (parts.extra_key if parts.adapter is not None else None, None)
    return HashScheme(start, namespace_seed(*mixed) if any(mixed) else b"")


def namespace_seed(extra_key: str | None, salt: str | None) -> bytes:
    """SHA-256 over the tag and both parts: a byte 0, or a byte 1, the length (8 bytes, little-endian) and the text."""
    data = bytearray(_TAG)
    for part in (extra_key, salt):
        if part is None:
            data += b"\x00"
        else:
            encoded = part.encode()
            data += b"\x01" + len(encoded).to_bytes(8, "little") + encoded
    return hashlib.sha256(data).digest()
