"""The decode ranks that have registered with a prefill worker, and those that cannot be served."""

from __future__ import annotations

import logging

import msgspec

from sglang_lite.disaggregation.frames import Register
from sglang_lite.disaggregation.pairing import PairingError, num_decode_ranks
from sglang_lite.disaggregation.pool_memory import PageShare
from sglang_lite.disaggregation.prefill_state import DecodePeer
from sglang_lite.disaggregation.recent import Recent
from sglang_lite.disaggregation.worker import SessionWorker
from sglang_lite.transfer.base import Description, TransferError

logger = logging.getLogger(__name__)

MOST_PEERS = 1 << 12


class DecodePeers:
    """Uses the transport and the links of a worker, on its thread."""

    def __init__(self, worker: SessionWorker) -> None:
        self._worker = worker
        self._peers: dict[str, DecodePeer] = {}
        self._refused: Recent[str, str] = Recent(MOST_PEERS)

    def __contains__(self, instance: str) -> bool:
        return instance in self._peers

    def get(self, instance: str) -> DecodePeer | None:
        """The rank with that instance, with a link that is open; None where there is none."""
        peer = self._peers.get(instance)
        if peer is None:
            return None
        try:
            # The one that it registered by may have made room for others.
            peer.link = self._worker.link_to(peer.told.ip, peer.told.port, instance)
        except OSError as error:
            logger.warning("decode server %s:%d cannot be served: %s", peer.told.ip, peer.told.port, error)
            return None
        return peer

    def why_refused(self, instance: str) -> str | None:
        """Why its registration was not taken, if that is so."""
        return self._refused.get(instance)

    def register(self, told: Register) -> None:
        """A decode rank says who it is and where its pool lies."""
        worker = self._worker
        try:
            _check_owner(told)
            peer = worker.transport.connect(told.description)
            share = self._share(told)
            page_bytes = share.num_rows * share.peer_row
            fitting = [region for region in peer.regions if region.length % page_bytes == 0]
            if told.page_bytes != page_bytes or not fitting:
                raise TransferError(
                    "rejected", f"its pages have {told.page_bytes} bytes, ours {worker.memory.page_bytes}"
                )
            link = worker.link_to(told.ip, told.port, told.instance)
        except (TransferError, PairingError, OSError) as error:
            logger.warning("decode server %s:%d cannot be served: %s", told.ip, told.port, error)
            self._refused.put(told.instance, str(error))
            return
        self._refused.pop(told.instance)
        if told.instance not in self._peers and len(self._peers) >= MOST_PEERS:
            self._forget_unused()
        self._peers[told.instance] = DecodePeer(told, link, peer, fitting[0], share)

    def _share(self, told: Register) -> PageShare:
        place, memory = self._worker.place, self._worker.memory
        num_decode_ranks(place.tp_size, told.tp_size)
        if not 0 <= told.tp_rank < told.tp_size:
            raise PairingError(f"there is no rank {told.tp_rank} of {told.tp_size}")
        if not place.kv_replicated and memory.heads is None and place.tp_size != told.tp_size:
            raise PairingError(f"it has {told.tp_size} ranks, this side {place.tp_size}, and pages do not divide")
        return memory.share_with(told.tp_rank, told.tp_size)

    def remove(self, instance: str) -> bool:
        """Its process is gone; whether it was known."""
        peer = self._peers.pop(instance, None)
        if peer is None:
            return False
        self._worker.transport.disconnect(peer.peer)
        return True

    def _forget_unused(self) -> None:
        for instance, peer in self._peers.items():
            if not peer.link.users:
                self.remove(instance)
                return


def _check_owner(told: Register) -> None:
    """Raises TransferError: the description is of another rank, whose connection would be changed by it."""
    try:
        owner = msgspec.msgpack.decode(told.description, type=Description).instance
    except msgspec.MsgspecError as error:
        raise TransferError("rejected", f"its description is malformed: {error}") from error
    if owner != told.instance:
        raise TransferError("rejected", "its description is of another instance")
