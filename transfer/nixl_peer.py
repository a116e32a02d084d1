"""Transfers and peers of the ``nixl`` transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_lite.transfer.base import Description, RemoteRegion
from sglang_lite.transfer.tcp_peer import TcpTransfer


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
