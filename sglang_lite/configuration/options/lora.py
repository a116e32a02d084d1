"""Options of low-rank adapters."""

from __future__ import annotations

from typing import Annotated

from sglang_lite.configuration import values
from sglang_lite.configuration.option import Integer, Option, OptionGroup

LORA_TARGET_MODULES = (
    "all",
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
)

_GROUP = "Low-rank adapters"


class LoraOptions(OptionGroup):
    """The fields of ``ServerConfig`` under the heading "Low-rank adapters"."""

    enable_lora: Annotated[
        bool, Option(_GROUP, "Serve low-rank adapters beside the model; implied by --lora-paths.")
    ] = False
    lora_paths: Annotated[
        list[str] | None,
        Option(
            _GROUP,
            "Adapters to load at the start: PATH, NAME=PATH, or JSON with lora_name and lora_path.",
            convert=values.words,
        ),
    ] = None
    max_lora_rank: Annotated[
        Integer,
        Option(
            _GROUP,
            "Largest rank of an adapter; default: that of --lora-paths.",
            convert=values.integer,
            minimum=1,
            maximum=4096,
        ),
    ] = None
    lora_target_modules: Annotated[
        list[str] | None,
        Option(
            _GROUP,
            "Projections that adapters may change, or 'all'; default: those of --lora-paths.",
            choices=LORA_TARGET_MODULES,
            convert=values.words,
        ),
    ] = None
    max_loaded_loras: Annotated[
        Integer,
        Option(
            _GROUP,
            "Adapters loaded at a time, all of which a batch may mix; default: --max-loras-per-batch.",
            convert=values.integer,
            minimum=1,
            maximum=1024,
        ),
    ] = None
    max_loras_per_batch: Annotated[
        int,
        Option(_GROUP, "Adapters that a batch can mix at least.", convert=values.integer, minimum=1, maximum=1024),
    ] = 8
