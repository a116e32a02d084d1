"""What a decode worker knows of prefill servers: their topology, and where their ranks listen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from sglang_lite.disaggregation.bootstrap_client import BootstrapClient, HandshakeError, RankAddress, TopologyInfo
from sglang_lite.disaggregation.pairing import PairingError, PrefillRank, num_decode_ranks, prefill_ranks
from sglang_lite.disaggregation.pool_memory import PoolMemory
from sglang_lite.types import TransferParams

MOST_SERVERS = 4096
FRESH_SECONDS = 1.0
"""Older knowledge is checked again before it is used, since another process may be behind the address by now."""

_NOBODY = frozenset(("",))
"""Instances where nobody was."""
_QUICK_ATTEMPTS = 3
_BETWEEN_SECONDS = 0.2


@dataclass(slots=True)
class PrefillServer:
    """One bootstrap server. ``checked`` is when it was last known to be the one we know."""

    host: str
    port: int
    info: TopologyInfo
    checked: float
    ranks: dict[tuple[int, int], RankAddress] = field(default_factory=dict)
    health_failures: int = 0
    health_instance: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A rank of a prefill server.

    Attributes:
        tp_size: of the prefill server.
        num_decode_ranks: that the rank waits for.
    """

    rank: PrefillRank
    address: RankAddress
    tp_size: int
    num_decode_ranks: int


class _Life:
    """Of the process behind an address: its ranks' instances, and when it was last heard or known not to be there."""

    __slots__ = ("instances", "until")

    def __init__(self, instances: frozenset[str], until: float) -> None:
        self.instances, self.until = instances, until


class PrefillDirectory:
    """Asks bootstrap servers, and remembers.

    Args:
        tp_rank, tp_size: of this worker.
        kv_replicated: every rank of the prefill server has everything.
        on_replaced: called with host, port and ``PrefillLost.until`` when another process is found behind an address.
    """

    def __init__(
        self,
        client: BootstrapClient,
        memory: PoolMemory,
        tp_rank: int,
        tp_size: int,
        kv_replicated: bool,
        on_replaced: Callable[[str, int, float], None] = lambda host, port, until: None,
    ) -> None:
        self._on_replaced = on_replaced
        self._lives: dict[tuple[str, int], _Life] = {}
        self._client, self._memory = client, memory
        self._tp_rank, self._tp_size, self._replicated = tp_rank, tp_size, kv_replicated
        self._servers: dict[tuple[str, int], PrefillServer] = {}
        self._busy: dict[tuple[str, int], asyncio.Lock] = {}

    def servers(self) -> list[PrefillServer]:
        """Those that are known."""
        return list(self._servers.values())

    def forget(self, host: str, port: int) -> None:
        """Ask again next time."""
        self._servers.pop((host, port), None)
        self._busy.pop((host, port), None)

    def confirm(self, host: str, port: int, now: float) -> None:
        """It has just been heard."""
        server = self._servers.get((host, port))
        if server is not None:
            server.checked = max(server.checked, now)
        self.note_alive(host, port)

    def note_alive(self, host: str, port: int) -> None:
        """The process that we know is there."""
        life = self._lives.get((host, port))
        if life is not None:
            life.until = time.monotonic()

    def note_gone(self, host: str, port: int) -> None:
        """Nobody answers there, so whoever will has not begun."""
        life = self._lives.get((host, port))
        if life is not None:
            life.until = time.monotonic()
        else:
            self._keep((host, port), _Life(_NOBODY, time.monotonic()))

    def last_life(self, host: str, port: int) -> float:
        """When the process that we know was last heard, or nobody was there; 0.0 when we know none."""
        life = self._lives.get((host, port))
        return 0.0 if life is None else life.until

    def _note(self, key: tuple[str, int], instances: frozenset[str]) -> None:
        """These are there now."""
        life = self._lives.get(key)
        if life is not None and instances and life.instances and not instances & life.instances:
            self._on_replaced(*key, life.until)
        self._keep(key, _Life(instances, time.monotonic()))

    def _keep(self, key: tuple[str, int], life: _Life) -> None:
        self._lives.pop(key, None)
        while len(self._lives) >= MOST_SERVERS:
            del self._lives[next(iter(self._lives))]
        self._lives[key] = life

    async def find(self, params: TransferParams, patience: float, *, must_fit: bool = True) -> list[Found]:
        """The ranks that have, or will have, a request's KV, or have to know of it.

        Args:
            patience: seconds to wait for ranks that have not registered.
            must_fit: their pages have to be of use here.

        Raises:
            HandshakeError: nobody answers, or what is answered does not fit to this server.
        """
        try:
            server = await self._server(params.host, params.port, patience)
            if must_fit:
                self.check(server.info)
            dp_rank = await self._dp_rank(server, params)
            counted, ranks = self._pair(server.info, must_fit)
            found = []
            for rank in ranks:
                address = server.ranks.get((dp_rank, rank.rank))
                if address is None:
                    address = await self._client.rank(params.host, params.port, dp_rank, rank.rank)
                    server.ranks[dp_rank, rank.rank] = address
                found.append(Found(rank, address, server.info.attn_tp_size, counted))
        except msgspec.MsgspecError as error:
            raise HandshakeError(
                f"bootstrap server {params.host}:{params.port} answers in another form: {error}"
            ) from error
        return found

    def _pair(self, info: TopologyInfo, must_fit: bool) -> tuple[int, list[PrefillRank]]:
        heads = 0 if self._replicated or self._memory.heads is None else self._memory.heads.total
        try:
            ranks = prefill_ranks(info.attn_tp_size, self._tp_size, self._tp_rank, heads)
            return num_decode_ranks(info.attn_tp_size, self._tp_size), ranks
        except PairingError as error:
            if must_fit:
                raise HandshakeError(str(error)) from error
            return 1, [PrefillRank(0, False)]  # any of them can be told that nothing will come

    def check(self, info: TopologyInfo) -> None:
        """Whether a prefill server's pages can be used here.

        Raises:
            HandshakeError: they cannot.
        """
        memory = self._memory
        if info.page_size is not None and info.page_size != memory.page_size:
            raise HandshakeError(
                f"Page size mismatch: prefill server has page_size={info.page_size}, but decode server has "
                f"page_size={memory.page_size}; start both with one --page-size"
            )
        if info.kv_cache_dtype not in (None, memory.dtype):
            raise HandshakeError(
                f"KV cache dtype mismatch: prefill server has {info.kv_cache_dtype}, but decode server has "
                f"{memory.dtype}; start both with one --kv-cache-dtype"
            )
        if info.attn_tp_size != self._tp_size and not self._replicated and memory.heads is None:
            raise HandshakeError(
                f"tensor-parallel size mismatch: prefill server has {info.attn_tp_size}, decode server {self._tp_size}"
            )
        if info.kv_layout not in (None, memory.layout):
            raise HandshakeError(
                f"KV layout mismatch: prefill server has {info.kv_layout}, but decode server has {memory.layout}; "
                f"both must serve the same model"
            )

    async def _server(self, host: str, port: int, patience: float) -> PrefillServer:
        loop = asyncio.get_running_loop()
        key = (host, port)
        async with self._busy.setdefault(key, asyncio.Lock()):
            server = self._servers.get(key)
            if server is not None and loop.time() - server.checked < FRESH_SECONDS:
                return server
            info = await self._ask(host, port, loop.time() + patience)
            self._note(key, frozenset(info.instances))
            if server is None or server.info != info:
                while len(self._servers) >= MOST_SERVERS:
                    self.forget(*next(iter(self._servers)))
                server = self._servers[key] = PrefillServer(host, port, info, loop.time())
            server.checked = loop.time()
            return server

    async def _ask(self, host: str, port: int, until: float) -> TopologyInfo:
        loop = asyncio.get_running_loop()
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._client.topology(host, port)
            except HandshakeError as error:
                # Ranks that have not registered are worth waiting for; a server that is not there is not, for long.
                is_starting = " answers 503" in str(error)
                life = self._lives.get((host, port))
                if not is_starting or (life is not None and life.instances != _NOBODY):
                    self.note_gone(host, port)
                if loop.time() > until or (attempt >= _QUICK_ATTEMPTS and not is_starting):
                    raise
            await asyncio.sleep(_BETWEEN_SECONDS)

    async def _dp_rank(self, server: PrefillServer, params: TransferParams) -> int:
        if params.prefill_dp_rank is not None:
            return params.prefill_dp_rank
        if server.info.dp_size == 1:
            return 0
        if server.info.follow_bootstrap_room:
            return params.room % server.info.dp_size
        for _ in range(20):
            found = await self._client.dp_rank_of(server.host, server.port, params.room)
            if found is not None:
                return found
            await asyncio.sleep(_BETWEEN_SECONDS)
        raise HandshakeError(f"no replica of the prefill server {server.host}:{server.port} has room {params.room}")
