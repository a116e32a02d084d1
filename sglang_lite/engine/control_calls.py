"""The calls that a front makes to an engine core, each of which the core answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from sglang_lite.engine.frames import Frame, encode_control, encode_keys
from sglang_lite.engine.info import LoadSnapshot
from sglang_lite.engine.messages import (
    Abort,
    AbortAll,
    Flush,
    Load,
    LoadAdapter,
    LoadGrammar,
    MemoryTag,
    Pause,
    PauseMode,
    Ping,
    QueryLoad,
    ReleaseMemory,
    Reply,
    Resume,
    ResumeMemory,
    StartProfile,
    StopProfile,
    UnloadAdapter,
    UpdateWeights,
)
from sglang_lite.types import ProfileOptions, RequestError

CALL_TIMEOUT = 30.0
"""Seconds a control call waits for the core; a step on a slow machine may take several."""

PAUSE_TIMEOUT = 600.0
"""Seconds a pause may take: it is answered when the steps in flight are done, or the watchdog has ended the core."""

ADAPTER_TIMEOUT = 600.0
"""Seconds that loading an adapter may take: its file may lie on a slow disk."""

WEIGHTS_TIMEOUT = 3600.0
"""Seconds that loading weights may take."""

FRONT = 0
"""Number of the front that starts the core."""


class EngineDeadError(RequestError):
    """The engine core is gone or does not answer; the message says why. Status 503."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=503)


class ControlCalls(ABC):
    """The calls, over whatever carries them.

    Args:
        front: number of this front; the core sends it the answers.
    """

    def __init__(self, front: int) -> None:
        self._front = front

    @abstractmethod
    async def _exchange(self, encode: Callable[[int], Frame], timeout: float) -> Reply | Load:
        """Send the frame made for the number of a new call; returns its answer.

        Raises:
            EngineDeadError: the core is gone, or did not answer within ``timeout`` seconds.
        """

    async def abort(self, keys: Sequence[int]) -> int:
        """Abort requests; returns how many were live in the core."""
        return (await self._call(lambda call: encode_keys(Abort(self._front, call), keys))).count

    async def abort_all(self) -> int:
        """Abort every request of the core, those of other fronts too; returns their number."""
        return (await self._call(lambda call: encode_control(AbortAll(self._front, call)))).count

    async def flush(self, timeout: float) -> bool:
        """Empty the prefix cache; False when the engine stayed busy for ``timeout`` seconds."""
        reply = await self._call(lambda call: encode_control(Flush(self._front, call, timeout)), timeout + CALL_TIMEOUT)
        return reply.ok

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; returns when nothing is in flight any more."""
        await self._call(lambda call: encode_control(Pause(self._front, call, mode)), PAUSE_TIMEOUT)

    async def resume(self) -> None:
        """Continue generating."""
        await self._call(lambda call: encode_control(Resume(self._front, call)))

    async def ping(self, timeout: float = CALL_TIMEOUT) -> None:
        """Return once the core's loop has answered."""
        await self._call(lambda call: encode_control(Ping(self._front, call)), timeout)

    async def load_adapter(self, slot: int, path: str) -> None:
        """Put an adapter into a slot.

        Raises:
            RequestError: the engine cannot read or use it; the message says why.
        """
        reply = await self._call(
            lambda call: encode_control(LoadAdapter(self._front, call, slot, path)), ADAPTER_TIMEOUT
        )
        if not reply.ok:
            raise RequestError(reply.message, field="lora_path")

    async def unload_adapter(self, slot: int) -> None:
        """Empty a slot that no request uses.

        Raises:
            RequestError: the engine could not.
        """
        reply = await self._call(lambda call: encode_control(UnloadAdapter(self._front, call, slot)), ADAPTER_TIMEOUT)
        if not reply.ok:
            raise RequestError(reply.message, status=500)

    async def load_grammar(self, identity: str, compiled: bytes) -> None:
        """Send a compiled grammar.

        Raises:
            RequestError: 503, the engine cannot load it.
        """
        reply = await self._call(
            lambda call: encode_control(LoadGrammar(self._front, call, identity, compiled)), ADAPTER_TIMEOUT
        )
        if not reply.ok:
            raise RequestError(f"the engine cannot load the grammar: {reply.message}", status=503)

    async def update_weights(self, path: str) -> None:
        """Replace the weights by those of a directory.

        Raises:
            RequestError: the engine is busy, or cannot use them; the message says why.
        """
        reply = await self._call(lambda call: encode_control(UpdateWeights(self._front, call, path)), WEIGHTS_TIMEOUT)
        if not reply.ok:
            raise RequestError(reply.message, field="model_path")

    async def release_memory(self, tags: tuple[MemoryTag, ...]) -> None:
        """Give these kinds of memory back.

        Raises:
            RequestError: the engine is busy, or cannot; the message says why.
        """
        reply = await self._call(lambda call: encode_control(ReleaseMemory(self._front, call, tags)), WEIGHTS_TIMEOUT)
        if not reply.ok:
            raise RequestError(reply.message, field="tags")

    async def resume_memory(self, tags: tuple[MemoryTag, ...]) -> None:
        """Take these kinds of memory again.

        Raises:
            RequestError: 503, the memory or the weights cannot be had; what was released stays so.
        """
        reply = await self._call(lambda call: encode_control(ResumeMemory(self._front, call, tags)), WEIGHTS_TIMEOUT)
        if not reply.ok:
            raise RequestError(reply.message, status=503, field="tags")

    async def start_profile(self, options: ProfileOptions) -> None:
        """Record the steps from now on.

        Raises:
            RequestError: it records already (409), or cannot; the message says why.
        """
        reply = await self._call(lambda call: encode_control(StartProfile(self._front, call, options)))
        if not reply.ok:
            raise RequestError(reply.message, status=409 if reply.count else 400)

    async def stop_profile(self) -> str:
        """End the recording; returns the file of the trace.

        Raises:
            RequestError: nothing is recorded (412), or the trace cannot be written.
        """
        reply = await self._call(lambda call: encode_control(StopProfile(self._front, call)), PAUSE_TIMEOUT)
        if not reply.ok:
            raise RequestError(reply.message, status=412 if reply.count else 500)
        return reply.message

    async def load(self) -> LoadSnapshot:
        """The core's load now."""
        answer = await self._exchange(lambda call: encode_control(QueryLoad(self._front, call)), CALL_TIMEOUT)
        if not isinstance(answer, Load):
            raise EngineDeadError(f"the engine core answered a load query with {type(answer).__name__}")
        return answer.snapshot

    async def loads(self) -> list[tuple[int, LoadSnapshot]]:
        """(0, the core's load now)."""
        return [(0, await self.load())]

    async def _call(self, encode: Callable[[int], Frame], timeout: float = CALL_TIMEOUT) -> Reply:
        answer = await self._exchange(encode, timeout)
        if not isinstance(answer, Reply):
            raise EngineDeadError(f"the engine core answered a control call with {type(answer).__name__}")
        return answer
