"""Plans travel to other ranks whole, but for what only sampling needs; anything else is named as malformed."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from sglang_lite.execution.plan_frames import PlanFrameError, decode_plan, encode_plan, encode_stop
from sglang_lite.scheduler.plan import LogprobRequest, StepPlan
from tests.support.step_plans import sampling_columns

ARRAYS = (
    "rows",
    "query_lens",
    "input_ids",
    "positions",
    "slot_mapping",
    "kv_lens",
    "page_table",
    "sample_index",
    "generated",
    "page_copies",
)


def make_plan() -> StepPlan:
    table = np.arange(24, dtype=np.int32).reshape(3, 8)
    scored = LogprobRequest(2, 77, 3, 5, np.array([8, 9], dtype=np.int32), True, 4, (1, 2), hidden=True)
    return StepPlan(
        step=41,
        num_decode=2,
        rows=np.array([5, 0, 3], dtype=np.int32),
        query_lens=np.array([1, 1, 4], dtype=np.int32),
        input_ids=np.array([-1, -1, 6, 7, 8, 9], dtype=np.int32),
        positions=np.array([9, 4, 1, 2, 3, 4], dtype=np.int32),
        slot_mapping=np.array([2**40, 4, 11, 12, 13, 14], dtype=np.int64),
        kv_lens=np.array([10, 5, 5], dtype=np.int32),
        page_table=table[:, :5],
        sample_index=np.array([0, 1, 2], dtype=np.int32),
        sampling=sampling_columns(3, temperature=0.5),
        generated=np.array([1, 2, 0], dtype=np.int32),
        suppressed={0: (2,)},
        resumed={},
        page_copies=np.array([[1, 2]], dtype=np.int32),
        logprobs=[scored],
    )


@pytest.mark.parametrize("draft_lens", [None, np.array([3, 0, 0], dtype=np.int32)])
def test_a_plan_comes_back(draft_lens: np.ndarray[tuple[int], np.dtype[np.int32]] | None) -> None:
    plan = replace(make_plan(), draft_lens=draft_lens)
    frame = encode_plan(plan)
    plan.page_table[:] = 0  # the planner may, once the frame is made
    back = decode_plan(frame)
    assert back is not None
    assert (back.step, back.num_decode) == (41, 2)
    for name in ARRAYS[:6] + ARRAYS[7:]:
        sent, received = getattr(plan, name), getattr(back, name)
        assert (received == sent).all(), name
        assert received.dtype == sent.dtype
        assert received.flags.writeable
    assert back.page_table.tolist() == [list(range(start, start + 5)) for start in (0, 8, 16)]
    (scored,) = back.logprobs
    assert (scored.row_index, scored.key, scored.prompt_start, scored.prompt_stop) == (2, 77, 3, 5)
    assert (scored.output, scored.top, scored.token_ids) == (True, 4, (1, 2))
    assert scored.prompt_token_ids.tolist() == [8, 9]
    if draft_lens is None:
        assert back.draft_lens is None
    else:
        assert back.draft_lens is not None
        assert back.draft_lens.tolist() == [3, 0, 0]


def test_the_end_is_no_plan() -> None:
    assert decode_plan(encode_stop()) is None


def test_malformed_frames_are_named() -> None:
    header, buffer = encode_plan(make_plan())
    broken = [[], [b"\x00"], [msgspec.msgpack.encode(["other", 1])], [header], [header, buffer[:-1]]]
    for frame in (*broken, [header, buffer + b"x"], [header, buffer, b""]):
        with pytest.raises(PlanFrameError):
            decode_plan(frame)
