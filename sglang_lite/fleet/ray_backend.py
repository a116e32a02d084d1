"""Replicas as Ray actors: Ray finds a machine with room, the actor on it owns the server process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import Any

from sglang_lite.fleet.backend import ReplicaError
from sglang_lite.fleet.server_process import Endpoint, Launch, ServerProcess
from sglang_lite.fleet.spec import RaySettings, Resources
from sglang_lite.types import StartupError

logger = logging.getLogger(__name__)

_WAITING_SECONDS = 30.0
_KILL_SECONDS = 5.0
_CONNECT_SECONDS = 5.0
_HOW_TO_START = "start one with `ray start --head`, and `ray start --address HOST:6379` on the other machines"


class ActorServer(ServerProcess):
    """The server process of an actor, on the address of its node."""

    def __init__(self, launch: Launch) -> None:
        import ray

        super().__init__(launch, ray.util.get_node_ip_address())


class RayReplica:
    """A replica that an actor owns. The actor is never restarted by Ray: its server would be gone from the router."""

    def __init__(self, ray: Any, launch: Launch, resources: Resources) -> None:
        self._ray = ray
        self._name = launch.name
        self._started = False
        options: dict[str, Any] = {
            "num_cpus": resources.cpus,
            "num_gpus": resources.gpus,
            "resources": dict(resources.custom),
            "max_restarts": 0,
            "scheduling_strategy": "SPREAD",
        }
        if resources.memory:
            options["memory"] = resources.memory
        try:
            self._actor = ray.remote(ActorServer).options(**options).remote(launch)
        except (TypeError, ValueError) as error:
            raise ReplicaError(f"Ray does not take its resources: {_first_line(error)}", final=True) from None

    async def start(self) -> Endpoint:
        """See ``Replica``."""
        call = asyncio.ensure_future(self._call(self._actor.start.remote()))
        try:
            while True:
                done, _ = await asyncio.wait([call], timeout=_WAITING_SECONDS)
                if done:
                    endpoint: Endpoint = call.result()
                    self._started = True
                    return endpoint
                logger.warning("%s waits for room in the Ray cluster", self._name)
        finally:
            call.cancel()

    async def exit_code(self) -> int | None:
        """See ``Replica``."""
        code: int | None = await self._call(self._actor.exit_code.remote())
        return code

    async def drain(self) -> None:
        """See ``Replica``."""
        await self._call(self._actor.drain.remote())

    async def kill(self) -> None:
        """See ``Replica``."""
        with contextlib.suppress(ReplicaError, TimeoutError):
            async with asyncio.timeout(_KILL_SECONDS):
                await self._call(self._actor.kill.remote())
                while self._started and await self.exit_code() is None:
                    await asyncio.sleep(0.02)
        # The actor's end closes the input of the server's keeper, should it still be there.
        await asyncio.to_thread(self._ray.kill, self._actor)

    async def _call(self, reference: Awaitable[Any]) -> Any:
        try:
            return await reference
        except self._ray.exceptions.RayActorError as error:
            raise ReplicaError(f"its actor is gone: {_first_line(error)}") from None
        except self._ray.exceptions.RayError as error:
            raise ReplicaError(f"its actor failed: {_first_line(error)}") from None


class RayBackend:
    """A Ray cluster that runs already."""

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        self._ray: Any = None

    async def open(self) -> None:
        """See ``Backend``."""
        try:
            import ray
        except ImportError as error:
            raise StartupError(
                f"--backend ray needs Ray ({error}); install it with: pip install 'sglang-lite[ray]'"
            ) from None
        settings = self._settings
        try:
            ray.runtime_env.RuntimeEnv(**settings.runtime_env)
        except (TypeError, ValueError) as error:
            raise StartupError(f"fleet: ray.runtime_env: {_first_line(error)}") from None
        await _check_address(settings.address)
        try:
            await asyncio.to_thread(
                ray.init,
                address=settings.address,
                namespace=settings.namespace,
                runtime_env=settings.runtime_env or None,
                log_to_driver=True,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise StartupError(
                f"--ray-address {settings.address}: cannot reach a Ray cluster: {_first_line(error)}; {_HOW_TO_START}"
            ) from None
        self._ray = ray
        nodes = [node for node in ray.nodes() if node["Alive"]]
        logger.info("Ray cluster of %d nodes: %s", len(nodes), ray.cluster_resources())

    def place(self, launch: Launch, resources: Resources) -> RayReplica:
        """See ``Backend``."""
        return RayReplica(self._ray, launch, resources)

    async def close(self) -> None:
        """See ``Backend``."""
        if self._ray is not None:
            await asyncio.to_thread(self._ray.shutdown)


async def _check_address(address: str) -> None:
    """Whether somebody listens at HOST:PORT: Ray itself would try for minutes. Its words, such as auto, are its own.

    Raises:
        StartupError: nobody does, or the address is one of Ray Client.
    """
    if "://" in address:
        raise StartupError(f"--ray-address {address}: run the fleet on a machine of the cluster and give HOST:PORT")
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        return
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError as error:  # a TimeoutError is one
        reason = error.strerror or "no answer"
        raise StartupError(f"--ray-address {address}: cannot reach a Ray cluster: {reason}; {_HOW_TO_START}") from None
    writer.close()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
