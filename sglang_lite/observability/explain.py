"""Where the time of a sequence went, as the object that clients and operators see.

The scheduler's record (``types.RequestTimeline``) says what happened in the engine core; the front adds what only it
knows: how long the prompt took to prepare, when the first token came and when the sequence ended.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_lite.types import RequestTimeline

KEPT = 1024
"""Ended sequences that can still be asked for, the newest ones: each costs about a kilobyte."""


class ExplainedOutput(Protocol):
    """What is read of a snapshot (``frontend.request.GenerationOutput`` has it)."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def received_at(self) -> float: ...
    @property
    def first_token_at(self) -> float | None: ...
    @property
    def finished_at(self) -> float | None: ...
    @property
    def timeline(self) -> RequestTimeline | None: ...
    @property
    def preparation(self) -> Mapping[str, float]: ...
    @property
    def finish_reason(self) -> Any: ...


def explanation(output: ExplainedOutput, now: float) -> dict[str, Any]:
    """The explanation of one sequence at ``now`` (seconds since the epoch).

    ``waited_for`` says what the queue waited for, by cause; it adds up to ``queue_seconds`` and
    ``preempted_seconds``. What has not happened yet is 0.
    """
    record = output.timeline or RequestTimeline()
    ended = output.finished_at if output.finished_at is not None else now
    prepared = sum(output.preparation.values())
    return {
        "preparation_seconds": {name: _rounded(seconds) for name, seconds in output.preparation.items()},
        "queue_seconds": _rounded(record.queue_seconds),
        "waited_for": {cause: _rounded(seconds) for cause, seconds in record.waits.items()},
        "prefill_seconds": _rounded(record.prefill_seconds),
        "prefill_chunks": record.prefill_chunks,
        "prompt_tokens": output.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "computed_tokens": record.computed_tokens,
        "preemptions": record.preemptions,
        "preempted_seconds": _rounded(record.requeue_seconds),
        "decode_seconds": _rounded(decode_seconds(output, ended)),
        "completion_tokens": output.completion_tokens,
        "total_seconds": _rounded(prepared + max(0.0, ended - output.received_at)),
    }


def decode_seconds(output: ExplainedOutput, ended: float) -> float:
    """From the first token to the end, without the waits of preemptions."""
    if output.first_token_at is None:
        return 0.0
    requeued = output.timeline.requeue_seconds if output.timeline is not None else 0.0
    return max(0.0, ended - output.first_token_at - requeued)


def _rounded(seconds: float) -> float:
    return round(max(0.0, seconds), 6)


@dataclass(frozen=True, slots=True)
class _Ended:
    """What an explanation needs of the last snapshot, without its texts. Few ended sequences are ever asked for."""

    prompt_tokens: int
    completion_tokens: int
    received_at: float
    first_token_at: float | None
    finished_at: float | None
    timeline: RequestTimeline | None
    preparation: Mapping[str, float]
    finish_reason: Any
    left_at: float

    @classmethod
    def of(cls, output: ExplainedOutput, now: float) -> _Ended:
        """Of a sequence whose reader left at ``now``."""
        return cls(
            output.prompt_tokens,
            output.completion_tokens,
            output.received_at,
            output.first_token_at,
            output.finished_at,
            output.timeline,
            output.preparation,
            output.finish_reason,
            now,
        )


class _Live:
    """A sequence that runs, and the last that was seen of it."""

    __slots__ = ("output", "started_at")

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.output: ExplainedOutput | None = None

    def see(self, output: ExplainedOutput) -> None:
        """Take note of a snapshot."""
        self.output = output


class RecentSequences:
    """The sequences that run and the last that ended, by the engine's id."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._live: dict[str, _Live] = {}
        self._ended: OrderedDict[str, _Ended] = OrderedDict()

    @contextmanager
    def track(self, request_id: str) -> Iterator[Callable[[ExplainedOutput], None]]:
        """A sequence for as long as it takes; yields the function that takes its snapshots.

        One that never had a snapshot leaves nothing. A second one of an id that is live is about to be refused.
        """
        if request_id in self._live:
            yield lambda output: None
            return
        live = self._live[request_id] = _Live(time.time())
        try:
            yield live.see
        finally:
            del self._live[request_id]
            if live.output is not None:
                self._ended[request_id] = _Ended.of(live.output, time.time())
                self._ended.move_to_end(request_id)
                while len(self._ended) > self._kept:
                    self._ended.popitem(last=False)

    def find(self, request_id: str, now: float) -> list[dict[str, Any]]:
        """The sequences of a request: the id itself, or those whose ids are made from it for its choices."""
        own = (f"{request_id}_", f"{request_id}-")
        found = []
        for name, live in self._live.items():
            if name == request_id or name.startswith(own):
                waited = {"total_seconds": _rounded(now - live.started_at)}
                waiting = {"id": name, "state": "waiting", "explain": waited}
                found.append(waiting if live.output is None else _entry(name, live.output, now, running=True))
        found += [
            _entry(name, ended, ended.left_at, running=False)
            for name, ended in self._ended.items()
            if name == request_id or name.startswith(own)
        ]
        return found


def _entry(request_id: str, output: ExplainedOutput, now: float, *, running: bool) -> dict[str, Any]:
    reason = output.finish_reason
    state = "running" if running and reason is None else "finished" if reason is not None else "cancelled"
    body: dict[str, Any] = {"id": request_id, "state": state}
    if reason is not None:
        body["finish_reason"] = reason.type
    return {**body, "explain": explanation(output, now)}
