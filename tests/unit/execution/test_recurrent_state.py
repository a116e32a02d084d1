"""States of recurrent layers: where they stand, what they cost, and what they rule out."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from sglang_lite.adapters.cpu import CpuOperations
from sglang_lite.config import ServerConfig
from sglang_lite.engine.info import LoadSnapshot, RecurrentStateInfo
from sglang_lite.engine.parts import make_scheduler
from sglang_lite.execution.recurrent_limits import check_recurrent_options, plan_rows, without_prefix_cache
from sglang_lite.execution.recurrent_state import RecurrentStatePool
from sglang_lite.models.description import ModelDescription, describe
from sglang_lite.models.model_description import RecurrentDescription
from sglang_lite.models.share import check_tensor_parallel, share_of
from sglang_lite.server.context import ServerContext
from sglang_lite.server.info_routes import server_info_body
from sglang_lite.types import StartupError
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.step_plans import PlanMaker, PlannedSequence

SHAPES = RecurrentDescription(num_layers=2, conv_channels=6, conv_kernel=4, num_heads=2, key_dim=3, value_dim=5)
ROW_BYTES = 2 * (6 * 3 * 4 + 2 * 3 * 5 * 4)
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
DENSE = {**HYBRID, "architectures": ["Qwen3ForCausalLM"]}


def config(**options: Any) -> ServerConfig:
    return ServerConfig(**{"model_path": "x", "device": "cpu", **options})


def pool(num_rows: int = 4, dtype: torch.dtype = torch.float32) -> RecurrentStatePool:
    return RecurrentStatePool(SHAPES, num_rows, dtype, CpuOperations(measure=False))


def test_the_pool_has_a_place_for_every_row_and_layer() -> None:
    states = pool(dtype=torch.bfloat16)
    assert states.tails.shape == (2, 4, 6, 3)
    assert states.tails.dtype == torch.bfloat16
    assert states.states.shape == (2, 4, 2, 3, 5)
    assert states.states.dtype == torch.float32
    assert states.num_bytes == 4 * SHAPES.row_bytes(2)


def test_a_row_goes_on_where_its_state_stands() -> None:
    states, maker = pool(), PlanMaker(page_size=4, num_pages=16)
    first, second = PlannedSequence(row=2), PlannedSequence(row=0)
    states.step(maker.plan([], [(first, [5] * 6), (second, [5] * 3)]))
    states.step(maker.plan([second], [(first, [5] * 2)]))
    states.step(maker.plan([first, second]))
    again = PlannedSequence(row=2)
    states.step(maker.plan([second], [(again, [5])]))  # the row has another sequence now
    states.step(maker.plan([second, again]))


@pytest.mark.parametrize("start", [4, 7])
def test_a_sequence_that_starts_behind_a_prefix_is_refused(start: int) -> None:
    states, maker = pool(), PlanMaker(page_size=4, num_pages=16)
    states.step(maker.plan([], [(PlannedSequence(row=1), [5] * 6)]))
    shared = PlannedSequence(row=1, pages=[3, 4], num_tokens=start)
    with pytest.raises(RuntimeError, match=f"row 1 continues at position {start}, but its recurrent state stands at 6"):
        states.step(maker.plan([], [(shared, [5] * 2)]))


def test_rows_as_far_as_there_is_memory() -> None:
    def rows(available: int, **options: Any) -> int:
        budget = plan_rows(config(**options), SHAPES, activation_bytes=4, available_bytes=available, default_rows=256)
        assert budget.row_bytes == ROW_BYTES
        assert budget.state_bytes == budget.num_rows * ROW_BYTES <= available
        return budget.num_rows

    assert rows(ROW_BYTES << 20) == 256
    assert rows(ROW_BYTES * 100) == 50
    assert rows(ROW_BYTES * 100, max_running_requests=80) == 80
    assert rows(ROW_BYTES * 100, max_running_requests=3) == 3


@pytest.mark.parametrize(("available", "asked"), [(ROW_BYTES * 10, 11), (ROW_BYTES, None), (0, None)])
def test_states_that_do_not_fit_are_refused(available: int, asked: int | None) -> None:
    with pytest.raises(StartupError, match="--max-running-requests"):
        plan_rows(
            config(max_running_requests=asked), SHAPES, activation_bytes=4, available_bytes=available, default_rows=256
        )


def test_other_models_keep_their_rows() -> None:
    for asked, expected in ((None, 256), (7, 7)):
        budget = plan_rows(
            config(max_running_requests=asked), None, activation_bytes=4, available_bytes=0, default_rows=256
        )
        assert (budget.num_rows, budget.state_bytes) == (expected, 0)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_states_cannot_be_sent_to_another_server(mode: str) -> None:
    separate = config(disaggregation_mode=mode)
    with pytest.raises(StartupError, match=f"--disaggregation-mode {mode}.*KV-only transfer is insufficient"):
        check_recurrent_options(separate, describe(HYBRID))
    check_recurrent_options(separate, describe(DENSE))


def test_states_are_split_over_ranks_by_key_heads() -> None:
    whole = describe(HYBRID)
    share = share_of(whole, 2).recurrent
    assert whole.recurrent is not None
    assert share is not None
    assert (share.num_heads, share.conv_channels) == (2, whole.recurrent.conv_channels // 2)
    assert 2 * share.row_bytes(4) == whole.recurrent.row_bytes(4)
    with pytest.raises(StartupError, match="--tp-size 4 does not divide the 2 key heads of linear attention"):
        check_tensor_parallel(whole, 4)


@pytest.mark.parametrize(("model", "is_off"), [(HYBRID, True), (DENSE, False)])
def test_prefixes_are_not_kept(model: dict[str, Any], is_off: bool) -> None:
    description: ModelDescription = describe(model)
    settled = without_prefix_cache(config(), description)
    assert settled.disable_radix_cache is is_off
    assert without_prefix_cache(settled, description) is settled


STATE = RecurrentStateInfo(num_layers=2, conv_elements=18, state_elements=30, bytes_per_request=384, pool_bytes=1536)


def test_the_scheduler_shares_no_prefix_whatever_the_configuration_says() -> None:
    info = msgspec.structs.replace(INFO, recurrent_state=STATE)
    assert not make_scheduler(config(), info).config.enable_radix_cache
    assert make_scheduler(config(), INFO).config.enable_radix_cache


def test_the_decode_step_uses_states_in_place() -> None:
    """Consecutive rows are updated where they are; the step of a plan names its own rows alone."""
    states, maker = pool(), PlanMaker(page_size=4, num_pages=16)
    sequences = [PlannedSequence(row=row) for row in (1, 2)]
    states.step(maker.plan([], [(sequence, [5] * 2) for sequence in sequences]))
    step = states.step(maker.plan(sequences))
    states.states.fill_(1.0)
    ops = CpuOperations(measure=False).recurrent
    ones = torch.ones(2, 2, 3)
    ops.gated_delta(ones, ones, torch.ones(2, 2, 5), torch.zeros(2, 2), torch.ones(2, 2), step.states[1], step.plan)
    changed = (states.states != 1.0).flatten(2).any(-1).numpy()
    assert np.array_equal(changed, [[False] * 4, [False, True, True, False]])


def test_the_server_shows_the_state_of_a_request() -> None:
    engine = FakeEngine()
    context = ServerContext(engine)
    assert server_info_body(context, [])["recurrent_state"] is None
    engine.info = msgspec.structs.replace(INFO, recurrent_state=STATE)
    body = server_info_body(context, [(0, LoadSnapshot())])
    assert body["recurrent_state"] == {
        "num_layers": 2,
        "conv_elements": 18,
        "state_elements": 30,
        "bytes_per_request": 384,
        "pool_bytes": 1536,
    }
    assert body["internal_states"][0]["memory_usage"]["recurrent_state"] == 1536 / 2**30
