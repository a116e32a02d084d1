"""Request metrics and engine gauges."""

from __future__ import annotations

import re
import time

import pytest

from sglang_lite.disaggregation.base import SessionStats
from sglang_lite.engine.info import LoadSnapshot
from sglang_lite.frontend.request import FinishReason, GenerationOutput
from sglang_lite.observability.engine import EngineCollector
from sglang_lite.observability.metrics import ServerMetrics


def output(tokens: int, finish: str | None = None) -> GenerationOutput:
    return GenerationOutput(
        request_id="r",
        text="",
        output_ids=[],
        finish_reason=FinishReason(finish) if finish else None,
        prompt_tokens=10,
        completion_tokens=tokens,
        cached_tokens=4,
    )


def values(metrics: ServerMetrics, name: str) -> dict[str, float]:
    """Label text -> value of a metric's series."""
    pattern = rf"^{re.escape(name)}(?:{{([^}}]*)}})? (\S+)$"
    return {labels: float(number) for labels, number in re.findall(pattern, metrics.render().decode(), re.MULTILINE)}


def test_finished_request() -> None:
    metrics = ServerMetrics("m")
    with metrics.track(streaming=True) as tracker:
        for tokens in (1, 2, 5):
            tracker.observe(output(tokens))
        assert values(metrics, "sglang_requests_in_flight") == {"": 1}
        tracker.observe(output(6, "length"))
    streaming = 'engine_type="unified",is_streaming="true",model_name="m"'
    assert values(metrics, "sglang:num_requests_total")[streaming] == 1
    assert values(metrics, "sglang:prompt_tokens_total")[streaming] == 10
    assert values(metrics, "sglang:generation_tokens_total")[streaming] == 6
    assert sum(values(metrics, "sglang:cached_tokens_total").values()) == 4
    assert values(metrics, "sglang:time_to_first_token_seconds_count")[streaming] == 1
    assert sum(values(metrics, "sglang:inter_token_latency_seconds_count").values()) == 5
    assert values(metrics, "sglang_requests_total") == {"": 1}
    assert values(metrics, "sglang_requests_failed_total") == {"": 0}
    assert values(metrics, "sglang_requests_in_flight") == {"": 0}


def test_a_reply_in_one_piece_has_the_latency_of_its_first_token() -> None:
    metrics = ServerMetrics("m")
    with metrics.track(streaming=False) as tracker:
        began = time.time()
        last = output(5, "length")
        last.first_token_at = began + 10
        tracker.observe(last)
    assert sum(values(metrics, "sglang:time_to_first_token_seconds_sum").values()) == pytest.approx(10, abs=1)
    assert sum(values(metrics, "sglang_time_to_first_token_seconds_sum").values()) == pytest.approx(10, abs=1)
    assert sum(values(metrics, "sglang:inter_token_latency_seconds_count").values()) == 4


@pytest.mark.parametrize("case", ["left", "aborted", "raised"])
def test_failed_request_leaves_the_gauge(case: str) -> None:
    metrics = ServerMetrics("m")
    try:
        with metrics.track(streaming=False) as tracker:
            tracker.observe(output(2, "abort" if case == "aborted" else None))
            if case == "raised":
                raise RuntimeError
    except RuntimeError:
        pass
    assert values(metrics, "sglang_requests_in_flight") == {"": 0}
    assert values(metrics, "sglang_requests_failed_total") == {"": 1}
    assert sum(values(metrics, "sglang:num_aborted_requests_total").values()) == 1
    assert sum(values(metrics, "sglang:num_requests_total").values()) == 0


def test_http_counts() -> None:
    metrics = ServerMetrics("m")
    metrics.http.started("/generate", "POST")
    metrics.http.started("/generate", "POST")
    metrics.http.ended("/generate", "POST", 200)
    metrics.http.ended("/generate", "POST", None)
    route = 'endpoint="/generate",method="POST"'
    assert values(metrics, "sglang:http_requests_total")[route] == 2
    assert values(metrics, "sglang:http_requests_active")[route] == 0
    assert values(metrics, "sglang:http_responses_total") == {'endpoint="/generate",method="POST",status_code="200"': 1}


def test_routing_keys_are_counted_while_they_are_served() -> None:
    """Distinct ones of requests under way; nothing of a key is kept afterwards."""
    metrics = ServerMetrics("m")
    for key in ("a", "a", "b", None, ""):
        metrics.http.started("/generate", "POST", key)
    assert values(metrics, "sglang:routing_keys_active") == {"": 2}
    metrics.http.ended("/generate", "POST", 200, "a")
    metrics.http.ended("/generate", "POST", None, "b")
    metrics.http.ended("/generate", "POST", 200, "")
    assert values(metrics, "sglang:routing_keys_active") == {"": 1}
    metrics.http.ended("/generate", "POST", 200, "a")
    assert values(metrics, "sglang:routing_keys_active") == {"": 0}


def test_requests_with_a_grammar_are_counted_when_they_finish() -> None:
    metrics = ServerMetrics("m")
    for structured, reason in ((True, "stop"), (True, "abort"), (False, "stop")):
        with metrics.track(streaming=False, structured=structured) as tracker:
            tracker.observe(output(2, reason))
    assert list(values(metrics, "sglang:num_so_requests_total").values()) == [1]
    assert sum(values(metrics, "sglang:num_requests_total").values()) == 2


def test_engine_gauges_follow_the_snapshot() -> None:
    metrics = ServerMetrics("m", "decode", {"zone": "a"})
    collector = EngineCollector(metrics.labels, context_length=64, weight_bytes=2**30, startup_seconds={"load": 2.0})
    metrics.register(collector)
    assert values(metrics, "sglang:num_running_reqs") == {}
    load = LoadSnapshot(
        num_running=3, num_pages=10, page_size=4, free_pages=5, evictable_pages=2, prompt_tokens=9, cached_tokens=4
    )
    collector.snapshots = [(0, load)]
    labels = 'engine_type="decode",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0",zone="a"'
    assert values(metrics, "sglang:num_running_reqs") == {labels: 3}
    assert values(metrics, "sglang:kv_used_tokens") == {labels: 12}
    assert values(metrics, "sglang:token_usage") == {labels: 0.3}
    assert values(metrics, "sglang:weight_memory_usage_gb") == {labels: 1}
    assert values(metrics, "sglang:startup_time_seconds") == {labels.replace("pp_rank", 'phase="load",pp_rank'): 2}
    assert sorted(values(metrics, "sglang:realtime_tokens_total").values()) == [0, 4, 5]


def test_replicas_have_a_label_each() -> None:
    metrics = ServerMetrics("m")
    collector = EngineCollector(metrics.labels, context_length=64, num_replicas=2)
    metrics.register(collector)
    collector.snapshots = [(0, LoadSnapshot(num_running=3, cpu_seconds=1.0)), (1, LoadSnapshot(num_running=5))]
    found = values(metrics, "sglang:num_running_reqs")
    assert {name.split('dp_rank="')[1][0]: value for name, value in found.items()} == {"0": 3, "1": 5}
    assert len(values(metrics, "sglang:realtime_tokens_total")) == 6
    assert "dp_rank" not in next(iter(values(metrics, "sglang:context_len")))
    assert values(metrics, "sglang:process_cpu_seconds_total")['component="scheduler"'] == 1.0


def test_no_creation_times_and_separate_registries() -> None:
    one, two = ServerMetrics("m"), ServerMetrics("m")
    with one.track(streaming=False):
        pass
    assert "_created" not in one.render().decode()
    assert values(two, "sglang_requests_total") == {"": 0}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_transfers_of_a_server_of_pairs(role: str) -> None:
    """SGLang's names for the queues of each side, sums of what was moved, and failures by reason."""
    metrics = ServerMetrics("m", role)
    collector = EngineCollector(metrics.labels, context_length=64)
    metrics.register(collector)
    collector.snapshots = [(0, LoadSnapshot())]
    assert values(metrics, "sglang:kv_transfers_total") == {}
    stats = SessionStats(
        unopened=2,
        by_state={"bootstrapping": 3, "waiting_for_input": 4, "transferring": 5, "success": 9},
        quarantined=1,
        bytes=1000,
        transfers=7,
        seconds=0.5,
        retries=6,
        failures={"timeout": 2, "handshake": 1},
    )
    collector.snapshots = [(0, LoadSnapshot(transfers=stats))]
    queues = {
        "prefill": {"num_prefill_bootstrap_queue_reqs": 3, "num_prefill_inflight_queue_reqs": 9},
        "decode": {"num_decode_prealloc_queue_reqs": 5, "num_decode_transfer_queue_reqs": 9},
    }
    for side, wanted in queues.items():
        for name, value in wanted.items():
            found = list(values(metrics, f"sglang:{name}").values())
            assert found == ([value] if side == role else []), name
    labels = f'engine_type="{role}",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
    assert values(metrics, "sglang:num_quarantined_reqs") == {labels: 1}
    assert values(metrics, "sglang:kv_transfers_total") == {labels: 7}
    assert values(metrics, "sglang:kv_transfer_bytes_total") == {labels: 1000}
    assert values(metrics, "sglang:kv_transfer_seconds_total") == {labels: 0.5}
    assert values(metrics, "sglang:kv_transfer_retries_total") == {labels: 6}
    assert values(metrics, "sglang:num_transfer_failed_reqs_total") == {labels: 3}
    assert sorted(values(metrics, "sglang:kv_transfer_failures_total").values()) == [1, 2]
