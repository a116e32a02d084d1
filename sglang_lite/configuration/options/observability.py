"""Options of logs, traces and metrics."""

from __future__ import annotations

from typing import Annotated, Any

from sglang_lite.configuration import values
from sglang_lite.configuration.option import Option, OptionGroup

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

_GROUP = "Observability"


class ObservabilityOptions(OptionGroup):
    """The fields of ``ServerConfig`` under the heading "Observability"."""

    log_level: Annotated[str, Option(_GROUP, "Log level.", choices=LOG_LEVELS, convert=values.lower_text)] = "info"
    enable_trace: Annotated[
        bool, Option(_GROUP, "Send OpenTelemetry spans of every request; needs the extra 'otel'.")
    ] = False
    otlp_traces_endpoint: Annotated[str, Option(_GROUP, "Collector of --enable-trace: host:port or URL.")] = (
        "localhost:4317"
    )
    kv_events_config: Annotated[
        dict[str, Any] | None,
        Option(
            _GROUP,
            'JSON object: {"publisher": "zmq", "endpoint": "tcp://*:5557"} tells subscribers what enters and leaves '
            "the prefix cache.",
            convert=values.json_object,
        ),
    ] = None
    enable_metrics: Annotated[bool, Option(_GROUP, "Serve /metrics and timings in meta_info.")] = False
