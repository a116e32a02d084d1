"""Streams that another server can go on with: what a router needs to know of them, and the stream that goes on.

A router that asks with the header ``x-sgl-resumable`` gets it back where the stream can move, and behind the events of
every snapshot a mark, which it takes out of what the client sees: an SSE comment ``:sgl {"sent": [[token ids]]}`` with
the tokens that these events show, in the portions in which they were looked at. Events without their mark count as not
sent. The first mark also holds the id and the time that the reply shows. After a fault of the server the mark is
``:sgl {"failed": true}``: the event before it is for clients of routers that know nobody else.

The stream goes on with the same request and ``resume_from``: all marks together. The engine computes the tokens again
as if it had preempted the request itself, so seeds, penalties, limits, stops and grammars stand where they stood; text
and parsers read the portions again, and what they show of them is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from sglang_lite.engine.limits import RESUMED_FIELD
from sglang_lite.frontend.request import GenerateRequest, GenerationOutput
from sglang_lite.server.context import Phase, ServerContext, context_of
from sglang_lite.server.errors import encode_json
from sglang_lite.server.identity import Identity
from sglang_lite.server.sse import EventStream
from sglang_lite.types import RequestError

if TYPE_CHECKING:
    from sglang_lite.server.event_replies import EventWriter
    from sglang_lite.server.generation import MergedStream

HEADER = "x-sgl-resumable"
_DONE = b"data: [DONE]\n\n"


class ResumeFrom(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field ``resume_from``.

    Attributes:
        sent: the tokens that the client has, in portions.
        id, created: what the reply shows.
    """

    sent: tuple[tuple[int, ...], ...]
    id: str
    created: int


@dataclass(slots=True)
class Marks:
    """The marks of one stream."""

    id: str
    created: int
    _first: bool = True
    _marked: int = 0
    _portions: list[list[int]] = field(default_factory=list)

    def note(self, output: GenerationOutput) -> None:
        """A snapshot was looked at."""
        if output.completion_tokens > self._marked:
            self._portions.append(output.output_ids[self._marked : output.completion_tokens])
            self._marked = output.completion_tokens

    def skip(self, output: GenerationOutput) -> None:
        """A snapshot that was marked elsewhere."""
        self._marked = output.completion_tokens

    def mark(self) -> bytes:
        """The mark of what was noted since the last one."""
        fields: dict[str, Any] = {"sent": self._portions}
        if self._first:
            fields |= {"id": self.id, "created": self.created}
            self._first = False
        self._portions = []
        return b":sgl %b\n\n" % encode_json(fields)


MARKS = web.RequestKey("resumable-marks", Marks)


def take_over(
    request: web.Request,
    body: Mapping[str, Any],
    sequences: Sequence[GenerateRequest],
    identity: Identity,
    created: int,
) -> tuple[Identity, int]:
    """Make a stream resumable where a router asks for it, and go on with the one that ``resume_from`` tells of.

    Returns:
        The identity and the time of the reply.

    Raises:
        RequestError: ``resume_from`` is wrong, or this stream cannot go on anywhere else than where it began.
    """
    given = body.get(RESUMED_FIELD)
    if HEADER not in request.headers:
        if given is not None:
            raise RequestError(f"{RESUMED_FIELD} needs the header {HEADER}: it is for routers", field=RESUMED_FIELD)
        return identity, created
    reason = _bound_here(context_of(request), body, sequences)
    if reason is not None:
        if given is not None:
            raise RequestError(f"{RESUMED_FIELD} cannot be served with {reason}", field=RESUMED_FIELD)
        return identity, created
    if given is not None:
        try:
            resume = msgspec.convert(given, ResumeFrom)
        except msgspec.ValidationError as error:
            raise RequestError(f"{RESUMED_FIELD}: {error}", field=RESUMED_FIELD) from None
        sequences[0].resumed = tuple(portion for portion in resume.sent if portion)
        identity, created = Identity(resume.id, identity.base), resume.created
    request[MARKS] = Marks(identity.shown, created)
    return identity, created


def _bound_here(context: ServerContext, body: Mapping[str, Any], sequences: Sequence[GenerateRequest]) -> str | None:
    """What binds a stream to the server where it began; None when nothing does."""
    if len(sequences) != 1:
        return "several sequences"
    one = sequences[0]
    if not one.stream:
        return "stream false"
    if one.return_logprob or one.return_hidden_states:
        return "log-probabilities or hidden states: those of the tokens before are not computed again"
    if body.get("session_params") is not None:
        return "a session, which only its server has"
    if context.config.disaggregation_mode != "null":
        return "prefill and decode apart"
    return None


async def reply_resumable(
    request: web.Request, merged: MergedStream, writer: EventWriter, failure_event: Callable[[str, Exception], Any]
) -> web.StreamResponse:
    """``event_replies.reply_with_events`` with marks. Events and their mark are written at once.

    The last events, the closing ones and ``[DONE]`` have one mark together: they are all there or none is.

    Raises:
        RequestError: the request failed before anything was sent.
        ConnectionError: the client left.
    """
    marks = request[MARKS]
    started = False
    async with EventStream(request, {HEADER: "1"}) as stream, merged:
        last = b""
        try:
            async for index, output in merged:
                frames = _frames(writer.events(index, output))
                if output.finish_reason is None and output.completion_tokens <= output.resumed_tokens:
                    marks.skip(output)
                    continue
                marks.note(output)
                if output.finish_reason is not None:
                    last = frames
                elif frames:
                    if not started:
                        await stream.start()
                        started = True
                    await stream.send_bytes(frames + marks.mark())
        except ConnectionError:
            raise
        except Exception as error:  # after the status, an event is the only way to tell the client
            if not started:
                raise
            mark = b':sgl {"failed":true}\n\n' if _is_own_fault(request, error) else marks.mark()
            await stream.send_bytes(_frames([failure_event(request.path, error)]) + mark)
            return await stream.finish()
        if not started:
            await stream.start()
        await stream.send_bytes(last + _frames(writer.closing_events()) + _DONE + marks.mark())
        return await stream.finish()


def _is_own_fault(request: web.Request, error: Exception) -> bool:
    """Whether another server would not have failed: this one broke, or is leaving."""
    if not isinstance(error, RequestError) or error.status == 500:
        return True
    return error.status == 503 and context_of(request).phase is Phase.DRAINING


def _frames(events: Iterable[Any]) -> bytes:
    return b"".join(b"data: %b\n\n" % (event if type(event) is bytes else encode_json(event)) for event in events)
