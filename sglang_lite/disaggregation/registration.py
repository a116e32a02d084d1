"""What a prefill rank tells its bootstrap server: that it is there, and which rooms it has."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sglang_lite.disaggregation.bootstrap_client import BootstrapClient, HandshakeError
from sglang_lite.disaggregation.topology import Rank
from sglang_lite.disaggregation.worker import SessionWorker

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Where and how a prefill rank registers.

    Attributes:
        host, port: of the bootstrap server.
        http_port: of this server, for peers.
        load_balance_method: how requests find their replica.
    """

    host: str
    port: int
    http_port: int | None = None
    load_balance_method: str = "follow_bootstrap_room"


class Registration:
    """Calls on the loop of a worker; made there.

    Attributes:
        is_done: the bootstrap server knows this rank.
    """

    def __init__(self, worker: SessionWorker, bootstrap: Bootstrap) -> None:
        self._worker, self._bootstrap = worker, bootstrap
        self._client = BootstrapClient()
        self.is_done = False

    async def register(self) -> None:
        """Say where this rank listens."""
        try:
            await self._client.register(self._bootstrap.host, self._bootstrap.port, self._rank())
            self.is_done = True
        except HandshakeError as error:
            logger.error("decode servers will not find this prefill server: %s", error)

    async def tell_room(self, room: int) -> None:
        """Say that this replica has a room."""
        place = self._worker.place
        try:
            await self._client.tell_room(self._bootstrap.host, self._bootstrap.port, room, place.dp_rank)
        except HandshakeError as error:
            logger.warning("room %d is not known to the bootstrap server: %s", room, error)

    async def close(self) -> None:
        """Close connections."""
        await self._client.close()

    def _rank(self) -> Rank:
        place, memory = self._worker.place, self._worker.memory
        return Rank(
            attn_tp_size=place.tp_size,
            attn_tp_rank=place.tp_rank,
            attn_cp_size=1,
            attn_cp_rank=0,
            attn_dp_size=1,
            attn_dp_rank=0,
            pp_size=1,
            pp_rank=0,
            system_dp_size=place.dp_size,
            system_dp_rank=place.dp_rank,
            rank_ip=place.host,
            rank_port=self._worker.port,
            page_size=memory.page_size,
            kv_cache_dtype=memory.dtype,
            kv_layout=memory.layout,
            load_balance_method=self._bootstrap.load_balance_method,
            prefill_http_port=self._bootstrap.http_port,
            instance=self._worker.instance,
        )
