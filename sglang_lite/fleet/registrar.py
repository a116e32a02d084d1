"""Keeps the router informed of the replicas that there are, and Prometheus where to find them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from sglang_lite.fleet.router_client import RouterClient, RouterUnreachableError
from sglang_lite.fleet.slots import Placed, Slot
from sglang_lite.fleet.spec import FleetSpec
from sglang_lite.fleet.targets import TargetFile

logger = logging.getLogger(__name__)

READY_LINE = "the fleet is ready"
_SOON = 0.1


class Registrar:
    """Tells ``router`` about what is in ``slots``.

    Attributes:
        router_has_left: set when the router ends, with nobody to be told anything.
    """

    def __init__(self, spec: FleetSpec, router: RouterClient, slots: Sequence[Slot]) -> None:
        self._router = router
        self._slots = slots
        self._seconds = spec.check_seconds
        self._targets = TargetFile(Path(spec.targets_file)) if spec.targets_file else None
        self._changed = asyncio.Event()
        self._complete = False
        self.router_has_left = False

    def notice(self, slot: Slot) -> None:
        """What is in ``slot`` has changed."""
        slot.registered = False
        self._complete = False
        self._changed.set()

    async def run(self) -> None:
        """Tell the router about replicas that it does not know, such as new ones, or all when it has restarted."""
        unreachable = False
        while not self.router_has_left:
            self._changed.clear()
            self._tell_prometheus()
            try:
                await self._register_all()
                unreachable = False
            except RouterUnreachableError as error:
                if not unreachable and not self.router_has_left:
                    logger.warning("the router does not answer, trying on: %s", error)
                unreachable = True
            complete = all(slot.registered for slot in self._slots)
            if complete and not self._complete:
                logger.info("%s: %d replicas behind %s", READY_LINE, len(self._slots), self._router.url)
            self._complete = complete
            expects = any(slot.current is not None and not slot.registered for slot in self._slots)
            try:
                async with asyncio.timeout(_SOON if expects and not unreachable else self._seconds):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _tell_prometheus(self) -> None:
        if self._targets is None:
            return
        replicas = [
            (slot.current.endpoint.url, slot.group.title, slot.current.role)
            for slot in self._slots
            if slot.current is not None
        ]
        try:
            self._targets.update(self._router.url, replicas)
        except OSError as error:
            logger.warning("--targets-file: %s", error)

    async def _register_all(self) -> None:
        known = await self._router.workers()
        refused: RouterUnreachableError | None = None
        for slot in self._slots:
            placed = slot.current
            if placed is None:
                continue
            worker = known.get(placed.endpoint.url)
            slot.registered = worker is not None and worker.is_registered
            if worker is None:
                try:
                    await self._router.add(placed.endpoint, placed.role, placed.name)
                except RouterUnreachableError as error:  # the others are told all the same
                    refused = error
                    continue
                if slot.current is not placed:  # it was taken away meanwhile, when the router did not know it yet
                    await self._router.remove(placed.endpoint)
        if refused is not None:
            raise refused

    async def until_used(self, placed: Placed) -> None:
        """Until the router uses ``placed``, which it may have to be told."""
        while True:
            try:
                worker = (await self._router.workers()).get(placed.endpoint.url)
                if worker is not None and worker.is_registered:
                    return
                if worker is None:
                    await self._router.add(placed.endpoint, placed.role, placed.name)
            except RouterUnreachableError as error:
                logger.warning("the router does not answer, trying on: %s", error)
            await asyncio.sleep(_SOON)

    async def forget(self, placed: Placed) -> None:
        """Have the router send nothing more to ``placed``."""
        if self.router_has_left:
            return
        try:
            await self._router.remove(placed.endpoint)
        except RouterUnreachableError as error:
            logger.warning("the router still has %s: %s", placed.name, error)
