"""The engine-info service: ranks tell where their weights lie, so that another instance can read them."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from sglang_lite.disaggregation.http_site import HttpSite, answer_ok, json_response, read_json

MOST_RANKS = 4096


class EngineInfo(msgspec.Struct, frozen=True):
    """What a rank tells."""

    session_id: str
    weights_info_dict: Any


class _Registration(msgspec.Struct):
    tp_rank: int
    transfer_engine_info: EngineInfo


class EngineInfoTable:
    """Rank -> what it told."""

    def __init__(self) -> None:
        self._infos: dict[int, EngineInfo] = {}

    def register(self, rank: int, info: EngineInfo) -> None:
        """Know a rank; the same rank again replaces.

        Raises:
            ValueError: it cannot be.
        """
        if not 0 <= rank < MOST_RANKS:
            raise ValueError(f"invalid rank {rank}; it is a number from 0 to {MOST_RANKS - 1}")
        if not info.session_id:
            raise ValueError("session_id is empty; it names the rank's transfer engine as host:port")
        self._infos[rank] = info

    def find(self, rank: int) -> dict[str, Any] | None:
        """The answer about a rank, or None."""
        info = self._infos.get(rank)
        if info is None:
            return None
        return {"rank": rank, "remote_instance_transfer_engine_info": [info.session_id, info.weights_info_dict]}


def build_app(table: EngineInfoTable) -> web.Application:
    """The routes over a table."""

    async def register(request: web.Request) -> web.Response:
        body = await read_json(request, _Registration)
        try:
            table.register(body.tp_rank, body.transfer_engine_info)
        except ValueError as error:
            return json_response({"detail": str(error)}, 400)
        return web.Response(text="OK")

    async def find(request: web.Request) -> web.Response:
        try:
            rank = int(request.query.get("rank", ""))
        except ValueError:
            rank = -1
        if rank < 0:
            return json_response({"detail": "the query needs rank, a number from 0"}, 400)
        found = table.find(rank)
        if found is None:
            return json_response({"detail": f"rank {rank} has not registered"}, 404)
        return json_response(found)

    app = web.Application(client_max_size=256 << 20)
    app.router.add_get("/health", answer_ok)
    app.router.add_put("/register_transfer_engine_info", register)
    app.router.add_get("/get_transfer_engine_info", find)
    return app


def engine_info_site(host: str, port: int, table: EngineInfoTable) -> HttpSite:
    """The service, not started."""
    return HttpSite(build_app(table), host, port)
