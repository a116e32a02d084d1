"""Several engine cores behind one front: requests are spread over them, control calls go to all of them.

Every replica has a whole model, a cache and requests of its own. One that dies takes its requests with it, each of
which ends with the reason; the others go on, and the front serves as long as one of them lives.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import msgspec

from sglang_lite.config import ServerConfig
from sglang_lite.configuration.kv_events import KVEventsConfig
from sglang_lite.disaggregation.base import merge_stats
from sglang_lite.engine.client import EngineClient, Listener
from sglang_lite.engine.control_calls import FRONT, EngineDeadError
from sglang_lite.engine.info import EngineInfo, LoadSnapshot
from sglang_lite.engine.launcher import CORE_COMMAND
from sglang_lite.engine.messages import MemoryTag, PauseMode
from sglang_lite.engine.pulse import Patience
from sglang_lite.engine.routing import ReplicaLoads, chooser, select_requests
from sglang_lite.frontend.request import GenerateRequest
from sglang_lite.types import Int64Array, OutputColumns, ProfileOptions, RequestColumns, RequestError

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
Progress = Callable[[str, float], None]


class ReplicaListener(Listener, Protocol):
    """Who hears the replicas."""

    def lose_requests(self, keys: Sequence[int], reason: str, status: int) -> None:
        """These requests were on a replica that is gone (500), or says nothing (503)."""


def _replica_config(base: ServerConfig, index: int, step: int) -> ServerConfig:
    """What differs between replicas: their first device, and where they publish KV events."""
    events = KVEventsConfig.parse(base.kv_events_config)
    return base.resolved(
        replica=index,
        base_gpu_id=base.base_gpu_id + index * step,
        kv_events_config=None if events is None else msgspec.to_builtins(events.for_replica(index)),
    )


class ReplicaClient:
    """The interface of ``EngineClient`` over several cores.

    Args:
        config: prepared for serving.
        on_progress: called with (message, fraction or a negative number) while the first core starts.
        front: number of this front; the one that starts the cores is 0.
    """

    def __init__(self, config: ServerConfig, on_progress: Progress | None = None, *, front: int = FRONT) -> None:
        count = config.dp_size
        self._config = config
        self._clients = [EngineClient(on_progress if index == 0 else None, front=front) for index in range(count)]
        self._loads = ReplicaLoads(count, first=front)
        self._choose = chooser(config.load_balance_method, self._loads)
        self._follows_rooms = config.load_balance_method == "follow_bootstrap_room"
        self._replica_of: dict[int, int] = {}
        self._snapshots = [LoadSnapshot() for _ in range(count)]
        self._gone: set[int] = set()
        self._patience = Patience.of(config.watchdog_timeout)
        self._listener: ReplicaListener | None = None
        self.failure: str | None = None

    async def start(
        self, config: str, *, timeout: float | None, command: Sequence[str] = CORE_COMMAND, fronts: int = 1
    ) -> EngineInfo:
        """Start all cores and wait until they serve. Each takes the devices behind those of the one before.

        Args:
            fronts: fronts that the cores answer; the others ``attach`` to them.

        Raises:
            StartupError: one of them did not start; none is left behind.
        """
        base = ServerConfig.from_json(config)
        step = base.tp_size * base.gpu_id_step
        starts = [
            client.start(_replica_config(base, index, step).to_json(), timeout=timeout, command=command, fronts=fronts)
            for index, client in enumerate(self._clients)
        ]
        infos = await asyncio.gather(*starts, return_exceptions=True)
        errors = [info for info in infos if isinstance(info, BaseException)]
        if errors:
            await self.close(grace=1.0)
            raise errors[0]
        ready = [info for info in infos if isinstance(info, EngineInfo)]
        return min(ready, key=lambda info: info.max_total_tokens)

    def attach(self, directories: Sequence[str]) -> None:
        """Talk to cores that another front has started, over the sockets in ``directories``."""
        for client, directory in zip(self._clients, directories, strict=True):
            client.attach(directory)

    @property
    def directories(self) -> list[str]:
        """Private directories of the cores' sockets, by replica."""
        return [directory for client in self._clients for directory in client.directories]

    @property
    def lost(self) -> dict[int, str]:
        """Replicas that are gone, and why."""
        return {index: self._clients[index].failure or "it is gone" for index in sorted(self._gone)}

    def lose_replica(self, replica: int, reason: str) -> None:
        """The front that has a core's process says that it is gone."""
        self._clients[replica].lose_core(reason)

    def listen(self, listener: ReplicaListener) -> None:
        """From now on ``listener`` hears the cores."""
        self._listener = listener
        for index, client in enumerate(self._clients):
            client.listen(_ReplicaEar(self, index))

    @property
    def process_ids(self) -> list[int | None]:
        """Of the cores, by replica."""
        return [client.process_id for client in self._clients]

    def wanted_replica(self, request: GenerateRequest) -> int | None:
        """The replica that the request names, or the one of its pair or affinity among those that live.

        The other side of a pair finds the replica by the same rule, where rooms are followed.
        """
        if request.replica is None and request.transfer is not None and self._follows_rooms:
            return request.transfer.room % len(self._clients)
        if request.replica is not None or not request.affinity or not self._loads.alive:
            return request.replica
        return self._loads.alive[zlib.crc32(request.affinity.encode()) % len(self._loads.alive)]

    def submit(self, columns: RequestColumns, wanted: Sequence[int | None] = ()) -> None:
        """Send new requests, each to the replica it wants or to the one that the method chooses.

        Args:
            wanted: a replica or None for each request; empty when none of them names one.
        """
        groups: dict[int, list[int]] = {}
        lengths = columns.num_tokens.tolist()
        for index, key in enumerate(columns.key.tolist()):
            replica = wanted[index] if index < len(wanted) else None
            if replica is not None and replica not in self._loads.alive:
                failure = self._clients[replica].failure
                if failure is None:
                    self._refuse([key], f"data parallel replica {replica} does not answer; try again later", 503)
                else:
                    self._refuse([key], f"data parallel replica {replica} is gone: {failure}", 500)
                continue
            if not self._loads.alive:
                return  # the listener has ended everything
            chosen = self._choose() if replica is None else replica
            self._replica_of[key] = chosen
            self._loads.sent(chosen, lengths[index])
            groups.setdefault(chosen, []).append(index)
        for replica, indices in groups.items():
            part = columns if len(indices) == len(columns) else select_requests(columns, indices)
            self._clients[replica].submit(part)

    def finish(self, keys: Sequence[int] | Int64Array) -> None:
        """Tell the cores that the front ended these requests."""
        for replica, part in self._by_replica(keys).items():
            self._clients[replica].finish(part)
        self._forget(keys)

    def abort_nowait(self, keys: Sequence[int]) -> None:
        """Abort without waiting for the answer (a client went away)."""
        for replica, part in self._by_replica(keys).items():
            self._clients[replica].abort_nowait(part)

    async def abort_all(self) -> int:
        """Abort every request of every core; returns their number."""
        return sum(await self._all(lambda client: client.abort_all()))

    async def flush(self, timeout: float) -> bool:
        """Empty every prefix cache; False when one of the cores stayed busy for ``timeout`` seconds."""
        return all(await self._all(lambda client: client.flush(timeout)))

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; returns when nothing is in flight any more."""
        await self._all(lambda client: client.pause(mode))

    async def resume(self) -> None:
        """Continue generating."""
        await self._all(lambda client: client.resume())

    def look(self) -> int:
        """Ask every core for a sign of life; looks in a row at which even the liveliest had said nothing.

        One that is silent while others speak gets no requests until it speaks again, and those that it has end in the
        end: they and their pages are given up, whenever it goes on.
        """
        missed = {index: self._clients[index].look() for index in range(len(self._clients)) if index not in self._gone}
        awake = [index for index, count in missed.items() if not self._patience.is_quiet(count)]
        # Where all are silent, whoever asked for this refuses requests.
        self._serve_with(awake or list(missed))
        for replica in missed.keys() - set(awake) if awake else ():
            if self._patience.is_over(missed[replica]):
                self._give_up(replica, f"data parallel replica {replica}: {self._patience.describe(missed[replica])}")
        return min(missed.values(), default=0)

    def _give_up(self, replica: int, reason: str) -> None:
        keys = self._keys_of(replica)
        if keys:
            self._clients[replica].abort_nowait(keys)
            self._forget(keys)
            self._refuse(keys, reason, 503)

    def _serve_with(self, replicas: list[int]) -> None:
        for replica in set(self._loads.alive) - set(replicas):
            logger.error("replica %d does not answer and gets no requests; %d go on", replica, len(replicas))
        for replica in set(replicas) - set(self._loads.alive):
            logger.info("replica %d answers again", replica)
        self._loads.alive = replicas

    async def load_adapter(self, slot: int, path: str) -> None:
        """Put an adapter into the same slot of every core."""
        await self._all(lambda client: client.load_adapter(slot, path))

    async def unload_adapter(self, slot: int) -> None:
        """Empty a slot of every core."""
        await self._all(lambda client: client.unload_adapter(slot))

    async def load_grammar(self, identity: str, compiled: bytes) -> None:
        """Send a compiled grammar to every core."""
        await self._all(lambda client: client.load_grammar(identity, compiled))

    async def update_weights(self, path: str) -> None:
        """Replace the weights of every core; see ``EngineClient.update_weights``. None begins while one is busy."""
        busy = sum(load.num_running + load.num_waiting for _, load in await self.loads())
        if busy:
            raise RequestError(f"the replicas are busy with {busy} requests; abort them or wait", field="model_path")
        await self._all(lambda client: client.update_weights(path))

    async def release_memory(self, tags: tuple[MemoryTag, ...]) -> None:
        """Give memory of every core back; see ``EngineClient.release_memory``. None begins while one is busy."""
        running = sum(load.num_running for _, load in await self.loads())
        if running:
            raise RequestError(f"the replicas are busy with {running} requests; abort them or wait", field="tags")
        try:
            await self._all(lambda client: client.release_memory(tags))
        except RequestError:
            with suppress(RequestError):  # all of them serve, or none: what the others gave back they take again
                await self._all(lambda client: client.resume_memory(tags))
            raise

    async def resume_memory(self, tags: tuple[MemoryTag, ...]) -> None:
        """Take memory of every core again."""
        await self._all(lambda client: client.resume_memory(tags))

    async def start_profile(self, options: ProfileOptions) -> None:
        """Record the steps of every core."""
        await self._all(lambda client: client.start_profile(options))

    async def stop_profile(self) -> str:
        """End the recordings; returns the files, a comma between them."""
        return ", ".join(await self._all(lambda client: client.stop_profile()))

    async def load(self) -> LoadSnapshot:
        """The load of all cores together, now."""
        return merge_loads([load for _, load in await self.loads()])

    async def loads(self) -> list[tuple[int, LoadSnapshot]]:
        """(replica, its load now) of those that live."""
        found = await self._ask_all(lambda client: client.load(), self._loads.alive)
        for replica, load in found:
            self._take_load(replica, load)
        return found

    async def close(self, grace: float = 5.0) -> None:
        """End all cores."""
        await asyncio.gather(*(client.close(grace) for client in self._clients))

    async def _all(self, call: Callable[[EngineClient], Awaitable[_Answer]]) -> list[_Answer]:
        """What the replicas that live answered, in order; one that is lost meanwhile has nothing to say.

        The others are always waited for: who hears of an error knows that nothing happens behind it any more.
        """
        # Those that are silent too: a call that passes one by would have it disagree with the others when it goes on.
        living = [index for index in range(len(self._clients)) if index not in self._gone]
        return [answer for _, answer in await self._ask_all(call, living)]

    async def _ask_all(
        self, call: Callable[[EngineClient], Awaitable[_Answer]], asked: Sequence[int]
    ) -> list[tuple[int, _Answer]]:
        found = await asyncio.gather(*(call(self._clients[replica]) for replica in asked), return_exceptions=True)
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        answers: list[tuple[int, _Answer]] = []
        for replica, answer in zip(asked, found, strict=True):
            if not isinstance(answer, BaseException):
                answers.append((replica, answer))
            elif replica not in self._gone:
                raise answer
        return answers

    def _by_replica(self, keys: Sequence[int] | Int64Array) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for key in keys:
            replica = self._replica_of.get(int(key))
            if replica is not None:
                groups.setdefault(replica, []).append(int(key))
        return groups

    def _forget(self, keys: Iterable[int]) -> None:
        for key in keys:
            replica = self._replica_of.pop(int(key), None)
            if replica is not None:
                self._loads.requests[replica] -= 1

    def _take_output(self, columns: OutputColumns) -> None:
        ended = columns.finish != 0
        if ended.any():
            self._forget(columns.key[ended].tolist())
        if self._listener is not None:
            self._listener.take_output(columns)

    def _take_load(self, replica: int, load: LoadSnapshot) -> None:
        self._snapshots[replica] = load
        self._loads.report(replica, load)

    def _hear_load(self, replica: int, load: LoadSnapshot) -> None:
        self._take_load(replica, load)
        if self._listener is not None:
            self._listener.take_load(merge_loads([self._snapshots[index] for index in self._loads.alive]))

    def _lose(self, replica: int, reason: str) -> None:
        """A replica is gone: end its requests, or everything when it was the last."""
        if replica in self._gone:
            return
        self._gone.add(replica)
        living = [index for index in range(len(self._clients)) if index not in self._gone]
        self._loads.alive = [index for index in self._loads.alive if index in living] or living
        if not living:
            self.failure = reason
            if self._listener is not None:
                self._listener.lose_core(reason)
            return
        keys = self._keys_of(replica)
        self._forget(keys)
        logger.error("replica %d is gone, %d go on: %s", replica, len(self._loads.alive), reason)
        self._refuse(keys, f"data parallel replica {replica} is gone: {reason}", 500)

    def _keys_of(self, replica: int) -> list[int]:
        return [key for key, owner in self._replica_of.items() if owner == replica]

    def _refuse(self, keys: Sequence[int], reason: str, status: int) -> None:
        if self._listener is not None:
            self._listener.lose_requests(keys, reason, status)


class _ReplicaEar:
    """Hears one core for the client of all."""

    def __init__(self, client: ReplicaClient, replica: int) -> None:
        self._client = client
        self._replica = replica

    def take_output(self, columns: OutputColumns) -> None:
        """See ``Listener``."""
        self._client._take_output(columns)

    def take_load(self, snapshot: LoadSnapshot) -> None:
        """See ``Listener``."""
        self._client._hear_load(self._replica, snapshot)

    def lose_core(self, reason: str) -> None:
        """See ``Listener``."""
        self._client._lose(self._replica, reason)


_NOT_ADDED = ("timestamp", "page_size", "paused", "cache_hit_rate", "transfers")


def merge_loads(loads: Sequence[LoadSnapshot]) -> LoadSnapshot:
    """One snapshot of several: counts add up, the hit rate is the mean."""
    if not loads:
        return LoadSnapshot()
    if len(loads) == 1:
        return loads[0]
    added = {
        name: sum(getattr(load, name) for load in loads)
        for name in LoadSnapshot.__struct_fields__
        if name not in _NOT_ADDED
    }
    return msgspec.structs.replace(
        loads[0],
        timestamp=max(load.timestamp for load in loads),
        paused=any(load.paused for load in loads),
        cache_hit_rate=sum(load.cache_hit_rate for load in loads) / len(loads),
        transfers=merge_stats([load.transfers for load in loads if load.transfers is not None]),
        **added,
    )
