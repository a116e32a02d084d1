"""Transfers and peers of the ``nixl`` transport."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from sglang_lite.transfer.base import Description, RemoteRegion, TransferError
from sglang_lite.transfer.tcp_peer import TcpTransfer


class Session(msgspec.Struct, frozen=True, array_like=True):
    """``Description.session``: what an agent says of itself. UCX ends the process over addresses that are damaged."""

    metadata: bytes
    digest: bytes

    @classmethod
    def of(cls, metadata: bytes) -> bytes:
        """Encoded."""
        return msgspec.msgpack.encode(cls(metadata, _digest(metadata)))

    @classmethod
    def metadata_of(cls, session: bytes) -> bytes:
        """Raises TransferError: it is malformed or damaged."""
        try:
            told = msgspec.msgpack.decode(session, type=cls)
        except msgspec.MsgspecError as error:
            raise TransferError("rejected", f"a peer's metadata is malformed: {error}") from error
        if _digest(told.metadata) != told.digest:
            raise TransferError("rejected", "a peer's metadata is damaged")
        return told.metadata


def _digest(metadata: bytes) -> bytes:
    return hashlib.blake2b(metadata, digest_size=16).digest()


class NixlTransfer(TcpTransfer):
    """See ``base.Transfer``; the pump of its transport moves it on."""

    handle: Any = None


class NixlPeer:
    """See ``base.Peer``."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.alive = True
        self.transfers: dict[int, NixlTransfer] = {}
        """Those whose handles are not settled."""

    @property
    def instance(self) -> str:
        """See ``base.Peer.instance``."""
        return self.description.instance

    @property
    def regions(self) -> Sequence[RemoteRegion]:
        """See ``base.Peer.regions``."""
        return self.description.regions
