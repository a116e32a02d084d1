"""Options of prefill/decode disaggregation."""

from __future__ import annotations

from typing import Annotated

from sglang_lite.configuration import values
from sglang_lite.configuration.option import Option, OptionGroup, Text

TRANSFER_BACKENDS = ("mooncake", "mooncake_tcp", "nixl", "tcp", "ascend", "mori")

_GROUP = "Prefill/decode disaggregation"


class DisaggregationOptions(OptionGroup):
    """The fields of ``ServerConfig`` under the heading "Prefill/decode disaggregation"."""

    disaggregation_mode: Annotated[str, Option(_GROUP, "Role.", choices=("null", "prefill", "decode"))] = "null"
    disaggregation_transfer_backend: Annotated[str, Option(_GROUP, "KV transport.", choices=TRANSFER_BACKENDS)] = (
        "mooncake"
    )
    disaggregation_bootstrap_port: Annotated[
        int, Option(_GROUP, "Port of the bootstrap server.", convert=values.port, minimum=0, maximum=65535)
    ] = 8998
    disaggregation_mooncake_rpc_port: Annotated[
        int, Option(_GROUP, "Port of the transfer engine; 0 is any.", convert=values.port, minimum=0, maximum=65535)
    ] = 0
    disaggregation_ib_device: Annotated[Text, Option(_GROUP, "InfiniBand devices.")] = None
    disaggregation_zmq_ports: Annotated[Text, Option(_GROUP, "Ports N or A-B.", convert=values.port_range)] = None
    disaggregation_decode_polling_interval: Annotated[
        int, Option(_GROUP, "Transfer polls per request.", convert=values.integer, minimum=1)
    ] = 1
    disaggregation_decode_enable_radix_cache: Annotated[bool, Option(_GROUP, "Prefix cache on decode.")] = False
    disaggregation_decode_enable_offload_kvcache: Annotated[bool, Option(_GROUP, "Offload KV on decode.")] = False
    disaggregation_fallback: Annotated[
        str,
        Option(_GROUP, "Decode: what to do with a prompt whose prefill server fails.", choices=("none", "local")),
    ] = "none"
    disaggregation_verify_checksums: Annotated[
        bool,
        Option(_GROUP, "Check the bytes of every page; on both sides.", aliases=("disaggregation-enable-kv-checksum",)),
    ] = False
    engine_info_bootstrap_port: Annotated[
        int, Option(_GROUP, "Port of the engine information service.", convert=values.port, minimum=0, maximum=65535)
    ] = 6789

    @property
    def is_disaggregated(self) -> bool:
        """True in prefill and decode mode."""
        return self.disaggregation_mode != "null"
