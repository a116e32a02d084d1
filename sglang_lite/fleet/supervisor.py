"""Keeps every place of a fleet filled with a replica that serves, and the router informed."""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp

from sglang_lite.fleet.backend import Backend, Replica, ReplicaError
from sglang_lite.fleet.registrar import Registrar
from sglang_lite.fleet.router_client import RouterClient
from sglang_lite.fleet.server_process import Endpoint, Launch
from sglang_lite.fleet.slots import Placed, Slot
from sglang_lite.fleet.spec import FleetSpec, Group, flags_of

logger = logging.getLogger(__name__)

EXIT_WRONG_WORDS = 2
"""Exit code of ``serve`` for options that can never work."""

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
_MOST_FAILURES = 5
_STEADY_SECONDS = 60.0
"""A replica that serves for less counts as one that fails when it is lost."""
_ROLL_ATTEMPTS = 3
_FIXED = ("backend", "ray", "router", "targets_file")
"""Sections that are read at the start only."""
_HEALTH_SECONDS = 5.0
_HEALTH_PAUSE = 0.1
_LEAVE_SECONDS = 10.0
"""Beyond the drain, until a server is killed."""


class FleetError(Exception):
    """The fleet cannot be what it is meant to be."""


class Supervisor:
    """Runs the replicas of ``spec`` on ``backend`` and tells ``router`` about them.

    Args:
        environment: variables for every replica, such as keys.

    Attributes:
        at_once: set to end without waiting for requests.
        registrar: what tells the router.
    """

    def __init__(
        self, spec: FleetSpec, backend: Backend, router: RouterClient, environment: dict[str, str] | None = None
    ) -> None:
        self._spec = spec
        self._backend = backend
        self._environment = environment or {}
        self._served: set[str] = set()
        self.at_once = asyncio.Event()
        self.slots = [Slot(group, index) for group in spec.replicas for index in range(group.count)]
        self.registrar = Registrar(spec, router, self.slots)

    async def run(self) -> None:
        """Until cancelled; then every replica leaves the router, ends its requests and is gone.

        Raises:
            FleetError: a replica can never start.
        """
        timeout = aiohttp.ClientTimeout(total=_HEALTH_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as self._session:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for slot in self.slots:
                        tasks.create_task(self._keep(slot))
                    tasks.create_task(self.registrar.run())
            except* FleetError as group:
                raise group.exceptions[0] from None

    async def roll(self, spec: FleetSpec) -> None:
        """Replace all replicas by those of ``spec``, one after the other.

        Raises:
            FleetError: groups or counts differ from those that run, or a new replica does not start.
        """
        shapes = [[(group.title, group.role, group.count) for group in one.replicas] for one in (spec, self._spec)]
        if shapes[0] != shapes[1]:
            raise FleetError("names, roles and counts of the groups must stay as they are; restart the fleet")
        for name in _FIXED:
            if getattr(spec, name) != getattr(self._spec, name):
                raise FleetError(f"{name} must stay as it is; restart the fleet")
        before, self._spec = self._spec, spec
        old_groups = [slot.group for slot in self.slots]
        groups = {group.title: group for group in spec.replicas}
        try:
            for slot in self.slots:
                slot.group = groups[slot.group.title]
                async with slot.lock:
                    await self._replace(slot)
        except FleetError:
            self._spec = before
            for slot, group in zip(self.slots, old_groups, strict=True):
                slot.group = group
            raise

    async def _replace(self, slot: Slot) -> None:
        logger.info("%s is replaced", slot.title)
        if not self._spec.surge:
            await self._leave(slot)
        fresh = await self._fill(slot, _ROLL_ATTEMPTS)
        try:
            await self.registrar.until_used(fresh)
        except BaseException:
            await fresh.replica.kill()
            raise
        # Nothing waits here: from now on the slot owns the new one.
        old, slot.current = slot.current, fresh
        self.registrar.notice(slot)
        if old is not None:
            await self._retire(old)

    async def _keep(self, slot: Slot) -> None:
        losses = 0
        try:
            while True:
                async with slot.lock:
                    if slot.current is None:
                        self._take(slot, await self._fill(slot))
                began = time.monotonic()
                lost, reason = await self._watch(slot)
                async with slot.lock:
                    if lost is None or slot.current is not lost:
                        continue  # a rolling restart was faster
                    logger.warning("%s is lost: %s", lost.name, reason)
                    slot.current = None
                    self.registrar.notice(slot)
                    await self.registrar.forget(lost)
                    await lost.replica.kill()
                losses = losses + 1 if time.monotonic() - began < _STEADY_SECONDS else 0
                if losses > 1:  # the first one is replaced at once
                    pause = min(_FIRST_PAUSE * 2.0 ** min(losses - 2, 30), _LONGEST_PAUSE)
                    logger.warning("%s: %d were lost soon after they began; again in %.0f s", slot.title, losses, pause)
                    await asyncio.sleep(pause)
        finally:
            await self._leave(slot)

    def _take(self, slot: Slot, placed: Placed) -> None:
        slot.current = placed
        self._served.add(slot.group.title)
        self.registrar.notice(slot)

    async def _fill(self, slot: Slot, attempts: int | None = None) -> Placed:
        """Start replicas until one serves.

        Args:
            attempts: None is without end, unless none of the group has ever served: five, or one with wrong options.

        Raises:
            FleetError: that many failed in a row.
        """
        failures, pause = 0, _FIRST_PAUSE
        while True:
            try:
                return await self._bring_up(slot)
            except ReplicaError as error:
                failures += 1
                most = attempts
                if most is None and slot.group.title not in self._served:
                    most = 1 if error.final else _MOST_FAILURES
                if most is not None and failures >= most:
                    raise FleetError(f"{slot.title} does not start: {error}") from None
                logger.warning("%s did not start: %s; again in %.0f s", slot.title, error, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _bring_up(self, slot: Slot) -> Placed:
        """Raises ReplicaError when the replica does not come to serve; nothing of it is left then."""
        slot.starts += 1
        name = f"{slot.title}-{slot.starts}"
        replica = self._backend.place(self._launch(slot.group, name), slot.group.resources)
        try:
            endpoint = await replica.start()
            logger.info("%s starts at %s", name, endpoint.url)
            await self._until_healthy(replica, endpoint)
        except BaseException:
            await replica.kill()
            raise
        logger.info("%s serves at %s", name, endpoint.url)
        return Placed(name, slot.group.role, replica, endpoint)

    def _launch(self, group: Group, name: str) -> Launch:
        spec = self._spec
        return Launch(
            name=name,
            role=group.role,
            flags=("--drain-timeout", str(spec.drain_seconds), *flags_of(spec.flags), *flags_of(group.flags)),
            environment={**self._environment, **group.environment},
            grace_seconds=spec.drain_seconds + _LEAVE_SECONDS,
            log_directory=spec.log_directory,
        )

    async def _until_healthy(self, replica: Replica, endpoint: Endpoint) -> None:
        deadline = time.monotonic() + self._spec.start_seconds
        while not await self._is_healthy(endpoint):
            code = await replica.exit_code()
            if code is not None:
                raise ReplicaError(f"the server exited with code {code}", final=code == EXIT_WRONG_WORDS)
            if time.monotonic() > deadline:
                raise ReplicaError(f"the server is not healthy after {self._spec.start_seconds} s")
            await asyncio.sleep(_HEALTH_PAUSE)

    async def _is_healthy(self, endpoint: Endpoint) -> bool:
        try:
            async with self._session.get(endpoint.url + "/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _watch(self, slot: Slot) -> tuple[Placed | None, str]:
        """Look at the slot's replica until something is wrong with it; returns it, and what."""
        healthy_at, looked_at = time.monotonic(), slot.current
        while True:
            await asyncio.sleep(self._spec.check_seconds)
            async with slot.lock:
                placed = slot.current
                if placed is None:
                    return None, "it was taken away"
                if placed is not looked_at:
                    healthy_at, looked_at = time.monotonic(), placed
                try:
                    code = await placed.replica.exit_code()
                except ReplicaError as error:
                    return placed, str(error)
                if code is not None:
                    return placed, f"the server exited with code {code}"
                if await self._is_healthy(placed.endpoint):
                    healthy_at = time.monotonic()
                elif time.monotonic() - healthy_at > self._spec.unhealthy_seconds:
                    return placed, f"the server has not been healthy for {self._spec.unhealthy_seconds} s"

    async def _leave(self, slot: Slot) -> None:
        """Take the slot's replica away."""
        placed, slot.current = slot.current, None
        self.registrar.notice(slot)
        if placed is not None:
            await self._retire(placed)

    async def _retire(self, placed: Placed) -> None:
        """A replica gets no new request, ends those that it has, and is gone."""
        await self.registrar.forget(placed)
        try:
            await placed.replica.drain()
            deadline = time.monotonic() + self._spec.drain_seconds + _LEAVE_SECONDS
            while await placed.replica.exit_code() is None and not self.at_once.is_set():
                if time.monotonic() > deadline:
                    logger.warning("%s does not end: killing it", placed.name)
                    break
                await asyncio.sleep(_HEALTH_PAUSE)
        except ReplicaError as error:
            logger.warning("%s: %s", placed.name, error)
        finally:
            await placed.replica.kill()
        logger.info("%s has left", placed.name)
