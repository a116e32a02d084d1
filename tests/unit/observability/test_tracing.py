"""Spans of sequences, made from what the scheduler recorded."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sglang_lite.frontend.request import FinishReason, GenerationOutput
from sglang_lite.observability.tracing import RequestTracer
from sglang_lite.types import RequestTimeline


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def output(received_at: float) -> GenerationOutput:
    return GenerationOutput(
        request_id="r",
        text="",
        output_ids=[],
        finish_reason=FinishReason("length", length=3),
        prompt_tokens=10,
        completion_tokens=3,
        cached_tokens=4,
        received_at=received_at,
        first_token_at=received_at + 3,
        finished_at=received_at + 5,
        timeline=RequestTimeline(
            queue_seconds=2.0, waits={"pages": 2.0}, prefill_seconds=1.0, prefill_chunks=2, computed_tokens=6
        ),
        preparation={"tokenization": 0.5, "grammar": 0.0},
    )


def test_phases_follow_one_another_under_the_callers_span(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    tracer = RequestTracer(exporter, "m")
    clock = iter([1000.0, 1005.5])
    monkeypatch.setattr("sglang_lite.observability.tracing.time.time", lambda: next(clock))
    tracer.enter({"Traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"})
    with tracer.track("r") as see:
        see(output(1000.5))
    monkeypatch.undo()
    tracer.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"generate", "tokenization", "queue", "prefill", "decode"}
    assert [seconds(spans[name]) for name in ("tokenization", "queue", "prefill", "decode", "generate")] == [
        pytest.approx(expected, abs=1e-5) for expected in (0.5, 2.0, 1.0, 2.0, 5.5)
    ]
    assert spans["queue"].start_time == spans["tokenization"].end_time
    root = spans["generate"]
    assert root.parent is not None
    assert (f"{root.parent.trace_id:x}", f"{root.parent.span_id:x}") == ("ab" * 16, "cd" * 8)
    parents = {name: span.parent for name, span in spans.items() if name != "generate"}
    assert {parent.span_id for parent in parents.values() if parent is not None} == {root.get_span_context().span_id}
    assert dict(spans["queue"].attributes or {}) == {"sglang.waited_for.pages": 2.0}
    assert (root.attributes or {})["gen_ai.usage.output_tokens"] == 3


def test_a_refused_sequence_is_an_error() -> None:
    exporter = InMemorySpanExporter()
    tracer = RequestTracer(exporter, "m")
    with pytest.raises(ValueError, match="refused"), tracer.track("r"):
        raise ValueError("refused")
    tracer.close()
    (span,) = exporter.get_finished_spans()
    assert not span.status.is_ok
