"""OpenTelemetry spans of the sequences that the server runs: preparation, queue, prefill, decode.

A sequence's spans are made when it is over, from the same record as its explanation, so tracing costs nothing while
tokens flow. The packages come with the extra ``otel`` and are imported only where tracing is on.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from sglang_lite.observability.explain import ExplainedOutput, explanation
from sglang_lite.types import StartupError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

_NANOSECONDS = 1_000_000_000
_FLUSH_MILLISECONDS = 1000
_parent: ContextVar[Context | None] = ContextVar("trace_parent", default=None)


class RequestTracer:
    """Makes and exports spans. Exporting happens in a thread; what a collector does not take in time is dropped.

    Args:
        exporter: where spans go.
        model_name: attribute of every span.
    """

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # Nothing waits for a collector when the process ends; ``close`` flushes for a bounded time.
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "sglang-lite"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("sglang_lite")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    @classmethod
    def to_collector(cls, endpoint: str, model_name: str) -> RequestTracer:
        """Spans to an OTLP collector over gRPC.

        Args:
            endpoint: ``host:port``, or a URL; https is used only where it says so.

        Raises:
            StartupError: OpenTelemetry is not installed.
        """
        check_tracing_installed()
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://")), model_name)

    def enter(self, headers: Mapping[str, str]) -> None:
        """The spans of the running call belong to the trace that its ``traceparent`` header names."""
        _parent.set(self._propagator.extract({name.lower(): value for name, value in headers.items()}))

    @contextmanager
    def track(self, request_id: str) -> Iterator[Callable[[ExplainedOutput], None]]:
        """A sequence for as long as it takes; yields the function that takes its snapshots."""
        newest: list[ExplainedOutput] = []
        started_at = time.time()

        def see(output: ExplainedOutput) -> None:
            newest[:] = [output]

        try:
            yield see
        finally:
            self._record(request_id, newest[0] if newest else None, started_at, time.time())

    def close(self) -> None:
        """Send what has not been sent, for at most a second."""
        self._provider.force_flush(_FLUSH_MILLISECONDS)

    def _record(self, request_id: str, output: ExplainedOutput | None, started_at: float, ended_at: float) -> None:
        from opentelemetry.trace import StatusCode, set_span_in_context

        attributes: dict[str, Any] = {"gen_ai.request.model": self._model_name, "sglang.request_id": request_id}
        root = self._tracer.start_span(
            "generate", _parent.get(), attributes=attributes, start_time=round(started_at * _NANOSECONDS)
        )
        if output is None:
            root.set_status(StatusCode.ERROR, "refused, or the client left before the first token")
            root.end(round(ended_at * _NANOSECONDS))
            return
        told = explanation(output, ended_at)
        reason = output.finish_reason
        root.set_attributes(
            {
                "gen_ai.usage.input_tokens": told["prompt_tokens"],
                "gen_ai.usage.output_tokens": told["completion_tokens"],
                "sglang.cached_tokens": told["cached_tokens"],
                "sglang.preemptions": told["preemptions"],
                "gen_ai.response.finish_reasons": ["cancelled" if reason is None else reason.type],
            }
        )
        inside = set_span_in_context(root)
        moment = started_at
        for name, seconds, details in _phases(told):
            if seconds:
                begin, moment = moment, min(moment + seconds, ended_at)
                span = self._tracer.start_span(name, inside, attributes=details, start_time=round(begin * _NANOSECONDS))
                span.end(round(moment * _NANOSECONDS))
        root.end(round(ended_at * _NANOSECONDS))


def check_tracing_installed() -> None:
    """Find out before a start whether spans can be made and sent.

    Raises:
        StartupError: OpenTelemetry is not installed.
    """
    for module in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise StartupError(
                f"--enable-trace needs OpenTelemetry ({error.name} is not installed): pip install 'sglang-lite[otel]'"
            ) from error


def _phases(told: Mapping[str, Any]) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """(name, seconds, attributes) of the phases, in their order; what preemptions cost lies inside of decoding."""
    for name, seconds in told["preparation_seconds"].items():
        yield name, seconds, {}
    waits = {f"sglang.waited_for.{cause}": seconds for cause, seconds in told["waited_for"].items()}
    yield "queue", told["queue_seconds"], waits
    yield (
        "prefill",
        told["prefill_seconds"],
        {"sglang.prefill_chunks": told["prefill_chunks"], "sglang.computed_tokens": told["computed_tokens"]},
    )
    preempted = told["preempted_seconds"]
    yield "decode", told["decode_seconds"] + preempted, {"sglang.preempted_seconds": preempted}
