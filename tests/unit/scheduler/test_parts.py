"""The parts on their own: queue, table, deadlines, prefills in progress, decode batch, configuration."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sglang_lite.scheduler import SchedulerConfig
from sglang_lite.scheduler.deadlines import Deadlines
from sglang_lite.scheduler.decode import DecodeBatch
from sglang_lite.scheduler.queue import WaitingQueue
from sglang_lite.scheduler.request import Request, RequestState, Special, parameters_from_columns, special_bits
from sglang_lite.scheduler.sharing import PrefillsInProgress
from sglang_lite.scheduler.table import RequestTable
from sglang_lite.types import EMPTY_EXTRAS, FinishCode, Int32Array, RequestExtras, RequestFlags
from tests.support.scheduler_driver import request_columns


def make_config(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {"num_pages": 64, "page_size": 4, "context_length": 64, "max_running_requests": 4}
    return SchedulerConfig(**(values | changes))


def make_request(order: int, *, tokens: int = 4, extras: RequestExtras = EMPTY_EXTRAS, **values: Any) -> Request:
    columns = request_columns([order], [list(range(tokens))], **values)
    record = parameters_from_columns(columns)[0]
    return Request(record, int(special_bits(columns)[0]), columns.token_ids, order, 0.0, extras)


class TestConfig:
    """Values that make no sense are refused by name."""

    @pytest.mark.parametrize(
        ("name", "value"),
        [("num_pages", 0), ("page_size", 0), ("max_wait_ms", -1), ("policy", "random"), ("free_page_watermark", 1.0)],
    )
    def test_refused(self, name: str, value: object) -> None:
        with pytest.raises(ValueError, match=name):
            make_config(**{name: value})


class TestQueue:
    """Order, removal and re-queueing."""

    def test_preempted_request_returns_to_the_head(self) -> None:
        queue = WaitingQueue(make_config())
        first, second = make_request(1), make_request(2)
        queue.push(second)
        queue.push(first)
        assert next(queue.candidates(lambda request: 0)) is first
        assert queue.num_tokens == 8

    def test_a_request_can_leave_and_return_many_times_without_growth(self) -> None:
        queue = WaitingQueue(make_config(policy="priority"))
        requests = [make_request(order, priority=order % 3) for order in range(1, 20)]
        for request in requests:
            queue.push(request)
        for _ in range(50):
            for request in requests:
                queue.remove(request)
                queue.push(request)
        assert len(queue) == 19
        assert len(queue._heap) <= 2 * 19 + 64
        assert [request.order for request in queue.requests()] == list(range(1, 20))

    def test_candidates_go_on_only_while_they_are_taken(self) -> None:
        queue = WaitingQueue(make_config())
        for order in range(1, 5):
            queue.push(make_request(order))
        seen = []
        for request in queue.candidates(lambda request: 0):
            seen.append(request.order)
            if request.order < 3:
                queue.remove(request)
        assert seen == [1, 2, 3]


class TestTable:
    """Rows and their reuse."""

    def test_row_in_flight_is_free_after_its_last_plan(self) -> None:
        table = RequestTable(1, 16, 4)
        request = make_request(1)
        assert table.assign(request) == 0
        assert table.known_tokens(request).tolist() == [0, 1, 2, 3]
        table.vacate(request, RequestState.ABORTED, last_step=7)
        assert (table.num_free_rows, table.num_live, request.row) == (0, 0, -1)
        table.reclaim_rows(6)
        assert table.num_free_rows == 0
        table.reclaim_rows(7)
        assert table.num_free_rows == 1

    def test_serial_differs_for_every_assignment(self) -> None:
        table = RequestTable(1, 16, 4)
        serials = []
        for order in range(3):
            request = make_request(order)
            table.assign(request)
            serials.append(int(table.serial[0]))
            table.vacate(request, RequestState.FINISHED, last_step=None)
        assert len(set(serials)) == 3


def test_special_bits_tell_what_is_out_of_the_ordinary() -> None:
    assert make_request(1).special == 0
    assert make_request(1, min_new_tokens=2).special == Special.MIN_TOKENS
    assert make_request(1, repetition_penalty=1.1).special == Special.PENALTIES
    assert make_request(1, flags=int(RequestFlags.RETURN_LOGPROB)).special == Special.LOGPROBS
    extras = RequestExtras(stop_token_ids=(1,), logit_bias={3: 1.0})
    assert make_request(1, extras=extras).special == Special.STOP_TOKENS | Special.LOGIT_BIAS
    assert make_request(1, extras=extras, flags=int(RequestFlags.IGNORE_EOS)).special == Special.LOGIT_BIAS


class TestDeadlines:
    """Limits that no longer concern anyone disappear."""

    def test_waiting_limit_lapses_when_the_request_runs(self) -> None:
        deadlines = Deadlines()
        request = make_request(1)
        deadlines.add_waiting(request, 1.0)
        request.state = RequestState.PREFILL
        assert deadlines.next() is None
        assert deadlines.expired(2.0) == []

    def test_preempted_request_counts_as_running(self) -> None:
        deadlines = Deadlines()
        request = make_request(1)
        deadlines.add_total(request, 1.0)
        request.state = RequestState.PENDING
        assert deadlines.expired(1.0) == [(request, FinishCode.RUNNING_TIMEOUT)]

    def test_entries_of_ended_requests_are_pruned(self) -> None:
        deadlines = Deadlines()
        for order in range(1000):
            request = make_request(order)
            deadlines.add_total(request, 1e9)
            request.state = RequestState.FINISHED
            deadlines.prune(0)
        assert len(deadlines._heap) <= 257


class TestPrefillsInProgress:
    """Waiting is worth it for long, common and mostly new prefixes."""

    @staticmethod
    def tokens(count: int, end: int) -> Int32Array:
        return np.array([*range(count), end], dtype=np.int32)

    @pytest.mark.parametrize(
        ("common", "start", "worth"),
        [(256, 0, True), (100, 0, False), (130, 0, False), (256, 192, False), (150, 0, True)],
    )
    def test_threshold(self, common: int, start: int, worth: bool) -> None:
        progress = PrefillsInProgress(16, enabled=True)
        first = make_request(1)
        progress.add(first, self.tokens(300, 7000))
        second = make_request(2)
        second.tokens = np.array([*range(common), *range(9000, 9000 + min(common, 128))], dtype=np.int32)
        if common == 130:
            second.tokens = np.array([*range(common), *range(9000, 9400)], dtype=np.int32)
        assert progress.is_worth_waiting(second, start) == worth
        progress.remove(first)
        assert not progress.is_worth_waiting(second, start)
        assert len(progress) == 0

    def test_namespaces_and_a_disabled_cache_share_nothing(self) -> None:
        for progress, namespace in (
            (PrefillsInProgress(16, enabled=True), "other"),
            (PrefillsInProgress(16, enabled=False), ""),
        ):
            progress.add(make_request(1), self.tokens(300, 7000))
            second = make_request(2, extras=RequestExtras(namespace=namespace))
            second.tokens = self.tokens(300, 8000)
            assert not progress.is_worth_waiting(second, 0)


class TestDecodeBatch:
    """Columns of successive steps; the ones handed out stay as they are."""

    def test_page_table_of_a_plan_in_flight_keeps_its_entries(self) -> None:
        table = RequestTable(2, 64, 4)
        batch = DecodeBatch(table, 4)
        for order in range(2):
            request = make_request(order)
            row = table.assign(request)
            table.page_table[row, 0] = 10 + order
            table.num_pages[row] = 1
        rows = np.array([0, 1], dtype=np.int32)
        batch.join(rows, np.full(2, 4, np.int32), np.array([43, 47], dtype=np.int64), np.ones(2, np.int32))
        batch.refresh()
        assert batch.page_starts().tolist() == [0, 1]
        first = batch.advance(batch.page_starts(), np.array([20, 21], dtype=np.int32))
        assert first.slots.tolist() == [80, 84]
        assert first.page_table.tolist() == [[10, 20], [11, 21]]
        columns: list[npt.NDArray[Any]] = [first.rows, first.positions, first.kv_lens, first.slots, first.page_table]
        kept = [column.copy() for column in columns]
        for _ in range(3):
            batch.refresh()
            assert len(batch.page_starts()) == 0
            step = batch.advance(batch.page_starts(), np.empty(0, dtype=np.int32))
        assert step.slots.tolist() == [83, 87]
        table.live[0] = False
        batch.stale = True
        batch.refresh()
        assert batch.rows.tolist() == [1]
        last = batch.advance(batch.page_starts(), np.array([30], dtype=np.int32))
        assert last.page_table.tolist() == [[11, 21, 30]]
        for column, copy in zip(columns, kept, strict=True):
            assert np.array_equal(column, copy)
