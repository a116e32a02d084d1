"""Options of devices, ranks and nodes."""

from __future__ import annotations

from typing import Annotated

from sglang_lite.configuration import values
from sglang_lite.configuration.option import Option, OptionGroup, Text

DEVICES = ("auto", "cpu", "cuda", "metal", "rocm", "musa", "xpu", "npu", "hpu")

LOAD_BALANCE_METHODS = ("auto", "follow_bootstrap_room", "round_robin", "total_requests", "total_tokens")

_GROUP = "Devices and parallelism"


class DeviceOptions(OptionGroup):
    """The fields of ``ServerConfig`` under the heading "Devices and parallelism"."""

    device: Annotated[
        str,
        Option(_GROUP, "Device; auto never falls back to cpu.", choices=DEVICES, convert=values.device_name),
    ] = "auto"
    tp_size: Annotated[
        int,
        Option(
            _GROUP,
            "Tensor parallel size.",
            aliases=("tensor-parallel-size", "tp"),
            convert=values.integer,
            minimum=1,
        ),
    ] = 1
    dp_size: Annotated[
        int,
        Option(_GROUP, "Replicas.", aliases=("data-parallel-size", "dp"), convert=values.integer, minimum=1),
    ] = 1
    ep_size: Annotated[
        int,
        Option(
            _GROUP,
            "Parts that the experts are split into; divides the tensor parallel size.",
            aliases=("expert-parallel-size", "ep"),
            convert=values.integer,
            minimum=1,
        ),
    ] = 1
    load_balance_method: Annotated[str, Option(_GROUP, "How replicas are chosen.", choices=LOAD_BALANCE_METHODS)] = (
        "auto"
    )
    nnodes: Annotated[int, Option(_GROUP, "Nodes.", convert=values.integer, minimum=1)] = 1
    node_rank: Annotated[int, Option(_GROUP, "Rank of this node.", convert=values.integer, minimum=0)] = 0
    dist_init_addr: Annotated[Text, Option(_GROUP, "host:port of rank 0.", aliases=("nccl-init-addr",))] = None
    base_gpu_id: Annotated[int, Option(_GROUP, "First device ordinal.", convert=values.integer, minimum=0)] = 0
    gpu_id_step: Annotated[int, Option(_GROUP, "Step between device ordinals.", convert=values.integer, minimum=1)] = 1
