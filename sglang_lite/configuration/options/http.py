"""Options of the HTTP server."""

from __future__ import annotations

from typing import Annotated

from sglang_lite.configuration import values
from sglang_lite.configuration.option import Number, Option, OptionGroup, Text

_GROUP = "HTTP server"


class HttpOptions(OptionGroup):
    """The fields of ``ServerConfig`` under the heading "HTTP server"."""

    host: Annotated[str, Option(_GROUP, "Address to bind.")] = "127.0.0.1"
    port: Annotated[int, Option(_GROUP, "Port to bind.", convert=values.port, minimum=0, maximum=65535)] = 30000
    api_key: Annotated[Text, Option(_GROUP, "Bearer key of the normal endpoints.")] = None
    admin_api_key: Annotated[Text, Option(_GROUP, "Bearer key of the administration endpoints.")] = None
    ssl_keyfile: Annotated[Text, Option(_GROUP, "PEM file with the key of the certificate; serves HTTPS.")] = None
    ssl_certfile: Annotated[Text, Option(_GROUP, "PEM file with the certificate and its chain.")] = None
    ssl_ca_certs: Annotated[
        Text, Option(_GROUP, "PEM file with authorities; certificates that clients present are checked against them.")
    ] = None
    ssl_keyfile_password: Annotated[Text, Option(_GROUP, "Password of the key.")] = None
    enable_ssl_refresh: Annotated[
        bool, Option(_GROUP, "Read the TLS files again when they change; SIGHUP does it at any time.")
    ] = False
    enable_response_store: Annotated[
        bool, Option(_GROUP, "Keep responses of /v1/responses in memory, to be looked up, continued and cancelled.")
    ] = False
    max_concurrent_requests: Annotated[
        int,
        Option(
            _GROUP,
            "Most generation requests in the server at once; more are answered with 503 before their body is read.",
            convert=values.integer,
            minimum=1,
        ),
    ] = 16384
    tokenizer_worker_num: Annotated[
        int,
        Option(
            _GROUP,
            "Front processes that share the port; one serves some thousand streamed tokens a second.",
            convert=values.integer,
            minimum=1,
            maximum=64,
        ),
    ] = 1
    skip_server_warmup: Annotated[bool, Option(_GROUP, "Report ready without a generation of its own first.")] = False
    allow_auto_truncate: Annotated[bool, Option(_GROUP, "Cut over-long prompts instead of answering 400.")] = False
    stream_interval: Annotated[
        int, Option(_GROUP, "Send a stream chunk every N tokens.", convert=values.integer, minimum=1)
    ] = 1
    incremental_streaming_output: Annotated[
        bool, Option(_GROUP, "/generate chunks carry only the new text and ids.")
    ] = False
    enable_return_hidden_states: Annotated[
        bool, Option(_GROUP, "Let /generate return hidden states (return_hidden_states).")
    ] = False
    enable_cache_report: Annotated[bool, Option(_GROUP, "Accepted; OpenAI usage always reports cached tokens.")] = False
    stream_stall_timeout: Annotated[
        float,
        Option(
            _GROUP,
            "Seconds after which a stream whose client reads nothing is ended; 0 is never.",
            convert=values.number,
            minimum=0,
        ),
    ] = 60.0
    drain_timeout: Annotated[
        float, Option(_GROUP, "Seconds that running requests get after SIGTERM.", convert=values.number, minimum=0)
    ] = 30.0
    watchdog_timeout: Annotated[
        float,
        Option(
            _GROUP,
            "Seconds after which a stuck step ends the server, and the requests of an engine core that is stopped end; "
            "0 is never.",
            convert=values.number,
            minimum=0,
        ),
    ] = 300.0
    request_waiting_timeout: Annotated[
        Number, Option(_GROUP, "Seconds a request may wait in the queue.", convert=values.number, more_than=0)
    ] = None
    request_running_timeout: Annotated[
        Number, Option(_GROUP, "Seconds a request may take in all.", convert=values.number, more_than=0)
    ] = None
