"""Step plans as frames: one msgpack header and one buffer with all arrays, for the ranks that follow rank 0.

A follower runs the forward pass and takes the tokens from rank 0, so what only sampling needs stays behind: penalties,
temperatures and the like. Arrays lie one after another, widest items first, so that each is aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_lite.scheduler.plan import LogprobRequest, SamplingColumns, StepPlan

PlanFrame = list[bytes]
"""Header and buffer."""

_ARRAYS: tuple[tuple[str, np.dtype[Any]], ...] = (
    ("slot_mapping", np.dtype(np.int64)),
    ("rows", np.dtype(np.int32)),
    ("query_lens", np.dtype(np.int32)),
    ("input_ids", np.dtype(np.int32)),
    ("positions", np.dtype(np.int32)),
    ("kv_lens", np.dtype(np.int32)),
    ("page_table", np.dtype(np.int32)),
    ("sample_index", np.dtype(np.int32)),
    ("generated", np.dtype(np.int32)),
    ("page_copies", np.dtype(np.int32)),
)


class PlanFrameError(Exception):
    """A frame that does not follow the format: the ranks do not run the same release."""


class _Scores(msgspec.Struct, frozen=True, array_like=True):
    """A ``LogprobRequest``; its token ids follow the arrays of the plan in the buffer."""

    row_index: int
    key: int
    prompt_start: int
    prompt_stop: int
    output: bool
    top: int
    token_ids: tuple[int, ...]
    hidden: bool


class _PlanHeader(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    step: int
    num_decode: int
    shapes: list[tuple[int, ...]]
    has_drafts: bool = False
    num_verify: int = 0
    scores: list[_Scores] = []


class StopFollowing(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Rank 0 ends the replica; nothing follows."""


_DECODER: msgspec.msgpack.Decoder[_PlanHeader | StopFollowing] = msgspec.msgpack.Decoder(_PlanHeader | StopFollowing)


def encode_plan(plan: StepPlan) -> PlanFrame:
    """The frame of a plan. Its arrays are copied, so the plan's owner may change them afterwards.

    Raises:
        ValueError: the plan has prompts of vectors, which fronts refuse for a model that ranks share.
    """
    if plan.embedded:
        raise ValueError("prompts that are vectors cannot be sent to other ranks")
    arrays = [np.ascontiguousarray(getattr(plan, name), dtype) for name, dtype in _ARRAYS]
    scores = [
        _Scores(
            request.row_index,
            request.key,
            request.prompt_start,
            request.prompt_stop,
            request.output,
            request.top,
            request.token_ids,
            request.hidden,
        )
        for request in plan.logprobs
    ]
    drafts = plan.draft_lens
    shapes = [array.shape for array in arrays]
    header = _PlanHeader(plan.step, plan.num_decode, shapes, drafts is not None, plan.num_verify, scores)
    if drafts is not None:
        arrays.append(np.ascontiguousarray(drafts, np.int32))
    arrays += [np.ascontiguousarray(request.prompt_token_ids, np.int32) for request in plan.logprobs]
    return [msgspec.msgpack.encode(header), b"".join([array.tobytes() for array in arrays])]


def encode_stop() -> PlanFrame:
    """The frame that ends a follower."""
    return [msgspec.msgpack.encode(StopFollowing())]


def decode_plan(frame: Sequence[bytes]) -> StepPlan | None:
    """The plan of a frame, without its sampling parameters; None when it says to stop.

    Raises:
        PlanFrameError: the frame is malformed.
    """
    try:
        header = _DECODER.decode(frame[0])
    except (IndexError, msgspec.MsgspecError) as error:
        raise PlanFrameError(f"malformed plan header: {error}") from error
    if isinstance(header, StopFollowing):
        return None
    if len(frame) != 2 or len(header.shapes) != len(_ARRAYS):
        raise PlanFrameError(f"plan frame of {len(frame)} parts and {len(header.shapes)} arrays")
    reader = _BufferReader(bytearray(frame[1]))  # writable, as tensors over it have to be
    arrays = {name: reader.take(dtype, shape) for (name, dtype), shape in zip(_ARRAYS, header.shapes, strict=True)}
    count = len(arrays["sample_index"])
    draft_lens = reader.take(np.dtype(np.int32), (count,)) if header.has_drafts else None
    logprobs = [
        LogprobRequest(
            row_index=score.row_index,
            key=score.key,
            prompt_start=score.prompt_start,
            prompt_stop=score.prompt_stop,
            prompt_token_ids=reader.take(np.dtype(np.int32), (score.prompt_stop - score.prompt_start,)),
            output=score.output,
            top=score.top,
            token_ids=score.token_ids,
            hidden=score.hidden,
        )
        for score in header.scores
    ]
    reader.finish()
    return StepPlan(
        step=header.step,
        num_decode=header.num_decode,
        sampling=_no_sampling(),
        suppressed={},
        resumed={},
        logprobs=logprobs,
        draft_lens=draft_lens,
        matchers={},  # of rank 0, which draws the tokens
        num_verify=header.num_verify,
        embedded=(),
        **arrays,
    )


@dataclass(slots=True)
class _BufferReader:
    """Arrays of a buffer, one after another, as views."""

    buffer: bytearray
    offset: int = 0

    def take(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        count = 1
        for extent in shape:
            count *= extent
        end = self.offset + count * dtype.itemsize
        if min(shape, default=0) < 0 or end > len(self.buffer):
            raise PlanFrameError(f"plan buffer of {len(self.buffer)} bytes holds no {shape} items at {self.offset}")
        array = np.frombuffer(self.buffer, dtype, count, self.offset).reshape(shape)
        self.offset = end
        return array

    def finish(self) -> None:
        if self.offset != len(self.buffer):
            raise PlanFrameError(f"plan buffer has {len(self.buffer)} bytes, expected {self.offset}")


def _no_sampling() -> SamplingColumns:
    """Columns of no row: a follower draws no token."""
    nothing = np.empty(0, dtype=np.float32)
    return SamplingColumns(
        temperature=nothing,
        top_p=nothing,
        top_k=np.empty(0, dtype=np.int32),
        min_p=nothing,
        frequency_penalty=nothing,
        presence_penalty=nothing,
        repetition_penalty=nothing,
        seed=np.empty(0, dtype=np.int64),
        all_greedy=True,
        penalized=np.empty(0, dtype=np.int32),
    )
