"""Metrics of several processes as one text."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from sglang_lite.observability.merging import merge_metrics
from sglang_lite.observability.metrics import ServerMetrics


def test_requests_add_up_and_the_engine_is_counted_once() -> None:
    engine = (
        "# HELP sglang:num_pages Pages.\n# TYPE sglang:num_pages gauge\n"
        'sglang:num_pages{model_name="m",tp_rank="0"} 8.0\n'
    )
    one, two = ServerMetrics("m"), ServerMetrics("m")
    for metrics, paths in ((one, ["/a", "/b"]), (two, ["/b", "/c"])):
        for path in paths:
            metrics.http.started(path, "GET")
            metrics.http.ended(path, "GET", 200)
    merged = merge_metrics([one.render() + engine.encode(), two.render() + engine.encode()]).decode()
    assert merged.endswith("\n")
    samples = {
        (sample.name, sample.labels.get("endpoint")): sample.value
        for family in text_string_to_metric_families(merged)
        for sample in family.samples
    }
    assert samples["sglang:http_requests_total", "/a"] == 1
    assert samples["sglang:http_requests_total", "/b"] == 2
    assert samples["sglang:http_requests_total", "/c"] == 1
    assert samples["sglang:num_pages", None] == 8


def test_one_text_stays_what_it_says() -> None:
    text = ServerMetrics("m").render().decode()

    def families(exposition: str) -> list[object]:
        return list(text_string_to_metric_families(exposition))

    assert families(merge_metrics([text.encode()]).decode()) == families(text)
