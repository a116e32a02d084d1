"""The services beside a prefill server's API: its bootstrap server, and who has which weights where."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from sglang_lite.config import ServerConfig
from sglang_lite.disaggregation.bootstrap_server import bootstrap_site
from sglang_lite.disaggregation.engine_info import EngineInfoTable, engine_info_site
from sglang_lite.disaggregation.http_site import HttpSite
from sglang_lite.server.silent_clients import close_silent_clients
from sglang_lite.types import StartupError


@dataclass(frozen=True, slots=True)
class TransferSites:
    """What runs.

    Attributes:
        config: with the ports that were bound, where any was asked for.
        engine_infos: what ranks have registered; None on a server without the service.
    """

    config: ServerConfig
    engine_infos: EngineInfoTable | None = None


@asynccontextmanager
async def transfer_sites(config: ServerConfig) -> AsyncIterator[TransferSites]:
    """Serve them for as long as the context lasts; nothing on a server that is no prefill server.

    Raises:
        StartupError: a port cannot be bound.
    """
    if config.disaggregation_mode != "prefill":
        yield TransferSites(config)
        return
    table = EngineInfoTable()
    bootstrap = bootstrap_site(config.host, config.disaggregation_bootstrap_port)
    infos = engine_info_site(config.host, config.engine_info_bootstrap_port, table)
    async with AsyncExitStack() as stack:
        for site, flag in ((bootstrap, "--disaggregation-bootstrap-port"), (infos, "--engine-info-bootstrap-port")):
            await _start(site, config.host, flag)
            stack.push_async_callback(site.stop)
            if site.server is not None:
                closing = asyncio.create_task(close_silent_clients(site.server))
                stack.callback(closing.cancel)
        ports = {"disaggregation_bootstrap_port": bootstrap.port, "engine_info_bootstrap_port": infos.port}
        yield TransferSites(config.resolved(**ports), table)


async def _start(site: HttpSite, host: str, flag: str) -> None:
    try:
        await site.start()
    except OSError as error:
        raise StartupError(
            f"cannot bind {host}:{site.port} ({flag}): {error.strerror or error}; choose another port"
        ) from error
