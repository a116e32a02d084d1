"""The bootstrap server of a prefill server: decode servers learn here where its ranks listen."""

from __future__ import annotations

import uuid
from typing import Annotated

import msgspec
from aiohttp import web

from sglang_lite.disaggregation.http_site import HttpSite, json_response, read_json, read_number
from sglang_lite.disaggregation.topology import MOST_ROOMS, Rank, Topology, TopologyError

INSTANCE_HEADER = "X-Instance-Id"
"""Of ``GET /health``: another value is another process behind the same address."""


class _RoomRank(msgspec.Struct):
    bootstrap_room: int
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


class _Rooms(msgspec.Struct):
    bootstrap_rooms: list[int]


def bootstrap_site(host: str, port: int, topology: Topology | None = None) -> HttpSite:
    """The service, not started."""
    return HttpSite(build_app(Topology() if topology is None else topology), host, port)


def build_app(topology: Topology) -> web.Application:
    """The routes over a topology."""
    routes = _Routes(topology)
    app = web.Application(client_max_size=4 << 20)
    app.router.add_get("/health", routes.health)
    app.router.add_put("/route", routes.put_route)
    app.router.add_get("/route", routes.get_route)
    app.router.add_post("/register_dp_rank", routes.register_dp_rank)
    app.router.add_post("/query_dp_ranks", routes.query_dp_ranks)
    return app


class _Routes:
    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._instance = uuid.uuid4().hex

    async def health(self, request: web.Request) -> web.Response:
        del request
        return web.Response(text="OK", headers={INSTANCE_HEADER: self._instance})

    async def put_route(self, request: web.Request) -> web.Response:
        rank = await read_json(request, Rank)
        try:
            self._topology.register(rank)
        except TopologyError as error:
            return web.Response(text=str(error), status=error.status)
        return web.Response(text="OK")

    async def get_route(self, request: web.Request) -> web.Response:
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        dp, cp, tp, pp = (read_number(request, name) for name in names)
        try:
            if (dp, cp, tp, pp) == (-1, -1, -1, -1):
                return json_response(self._topology.info())
            rank = self._topology.find(dp, cp, tp, pp)
        except TopologyError as error:
            return web.Response(text=str(error), status=error.status)
        return json_response({"rank_ip": rank.rank_ip, "rank_port": rank.rank_port, "instance": rank.instance})

    async def register_dp_rank(self, request: web.Request) -> web.Response:
        body = await read_json(request, _RoomRank)
        self._topology.set_room(body.bootstrap_room, body.dp_rank)
        return web.Response(text="OK")

    async def query_dp_ranks(self, request: web.Request) -> web.Response:
        body = await read_json(request, _Rooms)
        return json_response(dict(self._topology.find_rooms(body.bootstrap_rooms[:MOST_ROOMS])))
