"""Who has registered with a bootstrap server, and which rooms belong to which replica. Pure data, no sockets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import msgspec

ROOM_SECONDS = 120.0
MOST_ROOMS = 1 << 17
MOST_RANKS = 1 << 14


_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Rank(msgspec.Struct, frozen=True):
    """The body of ``PUT /route``. ``instance`` and ``kv_layout`` let peers tell a restart and a misfit."""

    attn_tp_size: _Count
    attn_tp_rank: _Count
    attn_cp_size: _Count
    attn_cp_rank: _Count
    attn_dp_size: _Count
    attn_dp_rank: _Count
    pp_size: _Count
    pp_rank: _Count
    system_dp_size: _Count
    system_dp_rank: _Count
    rank_ip: str
    rank_port: _Port
    page_size: _Count | None = None
    kv_cache_dtype: str | None = None
    kv_layout: str | None = None
    load_balance_method: str | None = None
    prefill_http_port: _Port | None = None
    decode_allocation_policy: str | None = None
    enable_dsa_cache_layer_split: bool | None = None
    enable_kv_cache_sharding: bool | None = None
    instance: str | None = None

    @property
    def dp_size(self) -> int:
        """Replicas."""
        return self.attn_dp_size if self.system_dp_size == 1 else self.system_dp_size

    @property
    def dp_rank(self) -> int:
        """Of this replica."""
        return self.attn_dp_rank if self.system_dp_size == 1 else self.system_dp_rank

    @property
    def place(self) -> tuple[int, int, int, int]:
        """(replica, context-parallel, tensor-parallel, pipeline rank)."""
        return self.dp_rank, self.attn_cp_rank, self.attn_tp_rank, self.pp_rank

    @property
    def expected(self) -> int:
        """Ranks of the whole server."""
        return self.dp_size * self.attn_cp_size * self.attn_tp_size * self.pp_size


class TopologyError(Exception):
    """What is asked or said does not fit; ``status`` is the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Topology:
    """Registered ranks and rooms.

    Args:
        clock: seconds; rooms are forgotten after ``ROOM_SECONDS``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ranks: dict[tuple[int, int, int, int], Rank] = {}
        self._rooms: dict[int, tuple[int, float]] = {}

    def register(self, rank: Rank) -> None:
        """Know a rank; the same place again replaces.

        Raises:
            TopologyError: it does not fit to those that are known.
        """
        sizes = (rank.attn_tp_size, rank.attn_cp_size, rank.dp_size, rank.pp_size)
        places = (rank.attn_tp_rank, rank.attn_cp_rank, rank.dp_rank, rank.pp_rank)
        if any(not 0 <= place < size for place, size in zip(places, sizes, strict=True)):
            raise TopologyError(400, f"ranks {places} (tp, cp, dp, pp) are not within the sizes {sizes}")
        if rank.place not in self._ranks and len(self._ranks) >= MOST_RANKS:
            raise TopologyError(400, f"{MOST_RANKS} ranks are registered already")
        for place, other in self._ranks.items():
            if place == rank.place:
                continue
            for name in ("decode_allocation_policy", "kv_layout"):
                if getattr(other, name) != getattr(rank, name):
                    raise TopologyError(
                        400, f"{name} {getattr(rank, name)!r} differs from {getattr(other, name)!r} of rank {place}"
                    )
        self._ranks[rank.place] = rank

    def info(self) -> dict[str, object]:
        """What all ranks have in common.

        Raises:
            TopologyError: 503 while ranks are missing.
        """
        any_rank = self._ready()
        info: dict[str, object] = {
            "attn_tp_size": any_rank.attn_tp_size,
            "attn_cp_size": any_rank.attn_cp_size,
            "dp_size": any_rank.dp_size,
            "pp_size": any_rank.pp_size,
            "page_size": any_rank.page_size,
            "kv_cache_dtype": any_rank.kv_cache_dtype,
            "follow_bootstrap_room": any_rank.load_balance_method in (None, "auto", "follow_bootstrap_room"),
            "enable_dsa_cache_layer_split": bool(any_rank.enable_dsa_cache_layer_split),
            "decode_allocation_policy": any_rank.decode_allocation_policy,
            "enable_kv_cache_sharding": bool(any_rank.enable_kv_cache_sharding),
            "prefill_http_port": any_rank.prefill_http_port,
            "instances": sorted({rank.instance for rank in self._ranks.values() if rank.instance}),
        }
        if any_rank.kv_layout is not None:
            info["kv_layout"] = any_rank.kv_layout
        return info

    def find(self, dp: int, cp: int, tp: int, pp: int) -> Rank:
        """One rank.

        Raises:
            TopologyError: 503 while ranks are missing, 400 for a negative number, 404 for one that is not there.
        """
        self._ready()
        if min(dp, cp, tp, pp) < 0:
            raise TopologyError(400, "ranks are numbers from 0; all four -1 ask for the topology")
        rank = self._ranks.get((dp, cp, tp, pp))
        if rank is None:
            raise TopologyError(404, f"no rank dp {dp}, cp {cp}, tp {tp}, pp {pp} has registered")
        return rank

    def set_room(self, room: int, dp_rank: int) -> None:
        """Remember which replica has a room."""
        now = self._clock()
        self._rooms.pop(room, None)
        while self._rooms:
            oldest = next(iter(self._rooms))
            if len(self._rooms) < MOST_ROOMS and now - self._rooms[oldest][1] <= ROOM_SECONDS:
                break
            del self._rooms[oldest]
        self._rooms[room] = (dp_rank, now)

    def find_rooms(self, rooms: list[int]) -> dict[str, int]:
        """Room as text -> replica, of those that are known and not too old."""
        oldest = self._clock() - ROOM_SECONDS
        found = {room: self._rooms[room] for room in rooms if room in self._rooms}
        return {str(room): rank for room, (rank, at) in found.items() if at >= oldest}

    def _ready(self) -> Rank:
        any_rank = next(iter(self._ranks.values()), None)
        if any_rank is None or len(self._ranks) < any_rank.expected:
            wanted = "an unknown number" if any_rank is None else str(any_rank.expected)
            raise TopologyError(503, f"{len(self._ranks)} of {wanted} of prefill ranks have registered; try again")
        return any_rank
