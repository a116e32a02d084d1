"""What the front processes of one server know together: request ids in flight, and how many requests they serve.

A table in a file of the engine core's private directory, mapped by every front and changed under a lock on that file.
An operation takes some microseconds. A front that dies takes the server with it, and the table with that.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from sglang_lite.types import RequestError

MAX_CLAIMS = 1 << 17
"""Ids in flight at once; twice as many places keep the searches short."""

_PLACES = 2 * MAX_CLAIMS
_DIGEST = 16
_HEADER = struct.Struct("<qq16s")
"""Requests that are served, ids that are claimed, the key of the digests."""
_FREE = bytes(_DIGEST)


class SharedClaims:
    """Made by the first front with ``create``, used by the others with ``attach``.

    Ids are kept as keyed digests in a table with linear probing, so that nobody can choose ids that meet in one place.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._table = mmap.mmap(descriptor, _HEADER.size + _PLACES * _DIGEST)
        self._key = _HEADER.unpack_from(self._table)[2]
        self._closed = False

    @classmethod
    def create(cls, directory: str) -> Self:
        """A new table in the directory."""
        descriptor = os.open(_path(directory), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(descriptor, _HEADER.size + _PLACES * _DIGEST)
        os.pwrite(descriptor, _HEADER.pack(0, 0, secrets.token_bytes(16)), 0)
        return cls(descriptor)

    @classmethod
    def attach(cls, directory: str) -> Self:
        """The table that another front has made there."""
        return cls(os.open(_path(directory), os.O_RDWR))

    def claim(self, name: str) -> bool:
        """Take an id; False when it is taken.

        Raises:
            RequestError: 503, there is no room for another one.
        """
        digest = self._digest(name)
        with self._locked():
            served, claimed, _ = _HEADER.unpack_from(self._table)
            place = self._find(digest)
            if self._at(place) == digest:
                return False
            if claimed >= MAX_CLAIMS:
                raise RequestError(f"{claimed} sequences are in flight, the most that several fronts serve", status=503)
            self._put(place, digest)
            self._write(served, claimed + 1)
        return True

    def release(self, name: str) -> None:
        """Give an id back; one that nobody has is left alone. Nothing happens after ``close``."""
        if self._closed:
            return
        digest = self._digest(name)
        with self._locked():
            served, claimed, _ = _HEADER.unpack_from(self._table)
            place = self._find(digest)
            if self._at(place) == digest:
                self._remove(place)
                self._write(served, claimed - 1)

    def enter(self, limit: int | None) -> bool:
        """Count a request; False, and nothing is counted, when ``limit`` of them are being served already."""
        with self._locked():
            served, claimed, _ = _HEADER.unpack_from(self._table)
            if limit is not None and served >= limit:
                return False
            self._write(served + 1, claimed)
        return True

    def leave(self) -> None:
        """A request that was counted has ended. Nothing happens after ``close``."""
        if self._closed:
            return
        with self._locked():
            served, claimed, _ = _HEADER.unpack_from(self._table)
            self._write(served - 1, claimed)

    def close(self) -> None:
        """Let go of the file."""
        self._closed = True
        self._table.close()
        os.close(self._descriptor)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _digest(self, name: str) -> bytes:
        digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=_DIGEST, key=self._key).digest()
        return digest if digest != _FREE else b"\1" * _DIGEST

    def _find(self, digest: bytes) -> int:
        """The place of a digest, or the free one where it belongs."""
        place = _home(digest)
        while (found := self._at(place)) != digest and found != _FREE:
            place = (place + 1) % _PLACES
        return place

    def _remove(self, place: int) -> None:
        """Free a place and move up what lies behind it only because of it."""
        self._put(place, _FREE)
        follower = place
        while True:
            follower = (follower + 1) % _PLACES
            digest = self._at(follower)
            if digest == _FREE:
                return
            if (follower - _home(digest)) % _PLACES >= (follower - place) % _PLACES:
                self._put(place, digest)
                self._put(follower, _FREE)
                place = follower

    def _at(self, place: int) -> bytes:
        start = _HEADER.size + place * _DIGEST
        return self._table[start : start + _DIGEST]

    def _put(self, place: int, digest: bytes) -> None:
        start = _HEADER.size + place * _DIGEST
        self._table[start : start + _DIGEST] = digest

    def _write(self, served: int, claimed: int) -> None:
        _HEADER.pack_into(self._table, 0, served, claimed, self._key)


def _home(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") % _PLACES


def _path(directory: str) -> str:
    return f"{directory}/claims"
