"""Headers of the frames between the front and the engine core. Bulk data travels beside them as raw buffers.

Every header is one msgpack array whose first element names its kind. ``call`` numbers a control call of one front,
so that the reply finds its caller; ``front`` says which front that is (the high 16 bits of its request keys).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sglang_lite.engine.info import EngineInfo, LoadSnapshot
from sglang_lite.types import ProfileOptions, RequestExtras, RequestTimeline

PauseMode = Literal["abort", "retract", "in_place"]
MemoryTag = Literal["kv_cache", "weights"]

MEMORY_TAGS: tuple[MemoryTag, ...] = ("kv_cache", "weights")
"""What an idle engine can give back."""


class _Header(msgspec.Struct, frozen=True, array_like=True, tag_field="kind"):
    """Base of all headers."""


class Admit(_Header, frozen=True, tag="admit"):
    """New requests: ``count`` rows of columns in the first buffer, their token ids in the second.

    Attributes:
        embeds: (request, vectors, width) of the prompts that are vectors, each of which has a further buffer.
    """

    count: int
    extras: dict[int, RequestExtras] = {}
    embeds: list[tuple[int, int, int]] = []


class Abort(_Header, frozen=True, tag="abort"):
    """End the requests whose keys (int64) are in the buffer. The reply's count says how many were live."""

    front: int
    call: int


class AbortAll(_Header, frozen=True, tag="abort_all"):
    """End every request. The reply's count says how many there were."""

    front: int
    call: int


class Finish(_Header, frozen=True, tag="finish"):
    """The front ended the requests whose keys (int64) are in the buffer (a stop string); nothing is replied."""


class Flush(_Header, frozen=True, tag="flush"):
    """Empty the prefix cache once nothing runs or waits; give up after ``timeout`` seconds."""

    front: int
    call: int
    timeout: float


class Pause(_Header, frozen=True, tag="pause"):
    """Stop generating; ``mode`` says what happens to running requests."""

    front: int
    call: int
    mode: PauseMode


class Resume(_Header, frozen=True, tag="resume"):
    """Continue after ``Pause``."""

    front: int
    call: int


class QueryLoad(_Header, frozen=True, tag="query_load"):
    """Ask for a ``Load`` message now."""

    front: int
    call: int


class Ping(_Header, frozen=True, tag="ping"):
    """Ask for a reply from the loop itself, to see that it turns."""

    front: int
    call: int


class LoadAdapter(_Header, frozen=True, tag="load_adapter"):
    """Read a low-rank adapter and put it into a slot that no request uses."""

    front: int
    call: int
    slot: int
    path: str


class UnloadAdapter(_Header, frozen=True, tag="unload_adapter"):
    """Empty a slot that no request uses any more."""

    front: int
    call: int
    slot: int


class LoadGrammar(_Header, frozen=True, tag="load_grammar"):
    """Take a compiled grammar, which requests then name in their extras. Answered when it is there."""

    front: int
    call: int
    identity: str
    compiled: bytes


class UpdateWeights(_Header, frozen=True, tag="update_weights"):
    """Replace the model's weights by those of a directory, while nothing runs."""

    front: int
    call: int
    path: str


class ReleaseMemory(_Header, frozen=True, tag="release_memory"):
    """Give these kinds of memory back, while nothing runs; nothing is planned until all of it is resumed."""

    front: int
    call: int
    tags: tuple[MemoryTag, ...]


class ResumeMemory(_Header, frozen=True, tag="resume_memory"):
    """Take these kinds of memory again."""

    front: int
    call: int
    tags: tuple[MemoryTag, ...]


class StartProfile(_Header, frozen=True, tag="start_profile"):
    """Record the steps. The reply's count is 1 when it is refused because steps are recorded already."""

    front: int
    call: int
    options: ProfileOptions


class StopProfile(_Header, frozen=True, tag="stop_profile"):
    """End the recording and write the trace; the reply's message is its file. Its count is 1 when
    nothing was recorded."""

    front: int
    call: int


class Shutdown(_Header, frozen=True, tag="shutdown"):
    """Leave the loop; requests still live are dropped."""


class Output(_Header, frozen=True, tag="output"):
    """Result of a step: ``count`` rows of columns in the first buffer, log-probabilities if any in the second.

    Attributes:
        logprobs: one (key, prompt, positions, top, extra, hidden) for each record in the second buffer.
        messages: key -> text of a row that ended with an error.
        timelines: key -> record of a request.
    """

    count: int
    logprobs: list[tuple[int, bool, int, int, int, int]] = []
    messages: dict[int, str] = {}
    timelines: dict[int, RequestTimeline] = {}


class Reply(_Header, frozen=True, tag="reply"):
    """Answer to a control call; ``message`` says why it failed where that can be said."""

    call: int
    ok: bool = True
    count: int = 0
    message: str = ""


class Load(_Header, frozen=True, tag="load"):
    """Load of the core, about once per second while it works (``call`` 0) and as the answer to ``QueryLoad``."""

    call: int
    snapshot: LoadSnapshot


class Progress(_Header, frozen=True, tag="progress"):
    """Something to tell the person who waits for the start; ``fraction`` in 0..1, or negative when unknown."""

    message: str
    fraction: float = -1.0


class Ready(_Header, frozen=True, tag="ready"):
    """The core serves from now on."""

    info: EngineInfo


class Failure(_Header, frozen=True, tag="failure"):
    """The core is about to exit. ``startup`` tells a configuration that cannot be served from a fault later on."""

    message: str
    startup: bool


CommandHeader = (
    Admit
    | Abort
    | AbortAll
    | Finish
    | Flush
    | Pause
    | Resume
    | QueryLoad
    | Ping
    | LoadAdapter
    | UnloadAdapter
    | LoadGrammar
    | UpdateWeights
    | ReleaseMemory
    | ResumeMemory
    | StartProfile
    | StopProfile
    | Shutdown
)
EventHeader = Output | Reply | Load | Progress | Ready | Failure
