"""Options of the gRPC server."""

from __future__ import annotations

from typing import Annotated

from sglang_lite.configuration import values
from sglang_lite.configuration.option import Integer, Option, OptionGroup

_GROUP = "gRPC"


class GrpcOptions(OptionGroup):
    """The fields of ``ServerConfig`` under the heading "gRPC"."""

    grpc_mode: Annotated[bool, Option(_GROUP, "Serve gRPC instead of HTTP.", aliases=("smg-grpc-mode",))] = False
    smg_http_sidecar_port: Annotated[
        Integer,
        Option(
            _GROUP,
            "HTTP port beside the gRPC server; default: the gRPC port + 1.",
            aliases=("grpc-http-sidecar-port",),
            convert=values.port,
            minimum=0,
            maximum=65535,
        ),
    ] = None
