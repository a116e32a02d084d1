"""What a prefill or decode server tells about its transfers, and about the weights that ranks have registered."""

from __future__ import annotations

from aiohttp import web

from sglang_lite.server.context import ServerContext, context_of
from sglang_lite.server.errors import json_response
from sglang_lite.types import RequestError

ENGINE_INFO_PATHS = ("/remote_instance_transfer_engine_info", "/get_remote_instance_transfer_engine_info")


def require_role(context: ServerContext, path: str) -> None:
    """Raises RequestError: the server has no transfers."""
    if not context.config.is_disaggregated:
        raise RequestError(f"{path} needs a server started with --disaggregation-mode prefill or decode", status=501)


async def poll_transfers(request: web.Request) -> web.Response:
    """Batches that were moved and that are under way; every replica counts."""
    context = context_of(request)
    require_role(context, request.path)
    found = [load.transfers for _, load in await context.engine.replica_loads()]
    stats = [entry for entry in found if entry is not None]
    return json_response(
        {
            "completed_batches": sum(entry.completed for entry in stats),
            "pending_batches": sum(entry.pending for entry in stats),
            "completed_descriptor_checksums": [text for entry in stats for text in entry.completed_checksums if text],
            "pending_descriptor_checksums": [text for entry in stats for text in entry.pending_checksums if text],
        }
    )


async def engine_info(request: web.Request) -> web.Response:
    """What a rank has registered at this server's engine-info service."""
    table, text = context_of(request).engine_infos, request.query.get("rank", "")
    if not text.isascii() or not text.isdecimal():
        raise RequestError("Missing or invalid rank parameter", field="rank")
    found = None if table is None else table.find(int(text[:9]))
    if found is None:
        reason = "this server has no engine-info service" if table is None else f"rank {text[:9]} has not registered"
        raise RequestError(f"Failed to get transfer engine info: {reason}", field="rank")
    return json_response(found)


def add_transfer_routes(app: web.Application) -> None:
    """Register the routes of this module."""
    app.router.add_get("/poll_transfers", poll_transfers)
    app.router.add_post("/poll_transfers", poll_transfers)
    for path in ENGINE_INFO_PATHS:
        app.router.add_get(path, engine_info)
