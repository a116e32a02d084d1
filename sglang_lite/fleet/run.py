"""The life of a fleet: connect, start a router, fill all places, serve, drain, leave."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine
from contextlib import suppress

from sglang_lite.fleet.backend import Backend
from sglang_lite.fleet.local_backend import LocalBackend
from sglang_lite.fleet.options import FleetOptions, parse_options
from sglang_lite.fleet.ray_backend import RayBackend
from sglang_lite.fleet.router_client import RouterClient
from sglang_lite.fleet.router_process import OwnedRouter
from sglang_lite.fleet.spec import FleetSpec
from sglang_lite.fleet.spec_checks import check_own_variables
from sglang_lite.fleet.supervisor import FleetError, Supervisor
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)

KEY_VARIABLES = ("SGLANG_LITE_API_KEY", "SGLANG_LITE_ADMIN_API_KEY")
"""Variables of the fleet that its replicas and its router get."""


def run_fleet(options: FleetOptions) -> int:
    """Run the fleet until SIGTERM or SIGINT; a second signal ends it at once.

    Raises:
        StartupError: the cluster or the router cannot be had, or a replica can never start.
    """
    return asyncio.run(_run(options))


async def _run(options: FleetOptions) -> int:
    spec = options.spec
    stop, hangup = asyncio.Event(), asyncio.Event()
    environment = {name: os.environ[name] for name in KEY_VARIABLES if name in os.environ}
    check_own_variables(os.environ)
    if spec.backend == "local" and any(group.resources.gpus for group in spec.replicas):
        logger.warning(
            "this machine's resources are not counted: every replica sees all GPUs; "
            "give groups CUDA_VISIBLE_DEVICES in their environment, or use --backend ray"
        )
    backend = backend_of(spec)
    await backend.open()
    try:
        async with RouterClient(_router_url(spec), environment.get(KEY_VARIABLES[0])) as client:
            supervisor = Supervisor(spec, backend, client, environment)
            # After the cluster's library, which installs handlers of its own.
            _listen(stop, supervisor.at_once, hangup)
            router = None if spec.router.url else OwnedRouter(spec, environment)
            try:
                await _live(options, supervisor, router, client, stop, hangup)
            finally:
                if router is not None:
                    await router.stop(supervisor.at_once)
    finally:
        await backend.close()
    return 0


async def _live(
    options: FleetOptions,
    supervisor: Supervisor,
    router: OwnedRouter | None,
    client: RouterClient,
    stop: asyncio.Event,
    hangup: asyncio.Event,
) -> None:
    """Until ``stop``. The router ends its requests first: none finds the workers gone."""
    if router is not None and not await _until(router.start(client), stop):
        return
    replicas = asyncio.create_task(supervisor.run())
    helpers = [asyncio.create_task(_roll_on(hangup, options, supervisor)), asyncio.create_task(stop.wait())]
    if router is not None:
        helpers.append(asyncio.create_task(router.keep(client)))
    try:
        await asyncio.wait([replicas, helpers[1]], return_when=asyncio.FIRST_COMPLETED)
        for task in helpers:
            task.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        if router is not None:
            supervisor.registrar.router_has_left = True
            await router.stop(supervisor.at_once)
    finally:
        replicas.cancel()
        try:
            with suppress(asyncio.CancelledError):
                await replicas
        except FleetError as error:
            raise StartupError(f"fleet: {error}") from None


async def _until(work: Coroutine[None, None, None], stop: asyncio.Event) -> bool:
    """Do ``work``; False when ``stop`` came first, which ends it."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        await working
        return True
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


async def _roll_on(hangup: asyncio.Event, options: FleetOptions, supervisor: Supervisor) -> None:
    """Replace all replicas, by those of the specification as it is then, whenever asked to."""
    while True:
        await hangup.wait()
        hangup.clear()
        try:
            await supervisor.roll(parse_options(options.words).spec)
            logger.info("all replicas are replaced")
        except (StartupError, FleetError) as error:
            logger.error("the rolling restart stops: %s", error)


def backend_of(spec: FleetSpec) -> Backend:
    """The place that ``spec`` names."""
    return RayBackend(spec.ray) if spec.backend == "ray" else LocalBackend()


def _router_url(spec: FleetSpec) -> str:
    if spec.router.url:
        return spec.router.url
    host = spec.router.host
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{spec.router.port}" if ":" in host else f"http://{host}:{spec.router.port}"


def _listen(stop: asyncio.Event, at_once: asyncio.Event, hangup: asyncio.Event) -> None:
    def end() -> None:
        (at_once if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
