"""Request fields that this server understands but cannot serve: refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_lite.config import ServerConfig
from sglang_lite.frontend.fields import read_int, shorten
from sglang_lite.types import RequestError

_DISAGGREGATION = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "disaggregated_params")
_NOT_SUPPORTED = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "custom_logit_processor",
    "session_id",
    "session_params",
    "return_routed_experts",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "return_flat_raw_top_logprobs",
    "return_flat_raw_output_top_logprobs",
    "return_flat_raw_top_logprobs_b64",
    "return_indexer_topk",
    "return_entropy",
    "max_thinking_tokens",
    "watermark",
    "suffix",
)
_RANK_FIELDS = ("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank")


def _is_set(value: Any) -> bool:
    """Whether a field asks for something; clients fill lists with null for the items that do not."""
    return any(map(_is_set, value)) if isinstance(value, list) else value is not None


def refuse_unsupported(body: Mapping[str, Any], config: ServerConfig) -> None:
    """Check the fields of a generation request that ask for something else than plain generation.

    Raises:
        RequestError: 501 for prefill/decode fields on a server without that role, 400 for the rest.
    """
    for name in _DISAGGREGATION:
        if _is_set(body.get(name)) and not config.is_disaggregated:
            raise RequestError(
                f"{name} needs a server started with --disaggregation-mode prefill or decode", status=501, field=name
            )
    for name in _NOT_SUPPORTED:
        if body.get(name) and _is_set(body[name]):
            raise RequestError(f"{name} is not supported yet", field=name)


def wanted_replica(body: Mapping[str, Any], header: str | None, replicas: int) -> int | None:
    """Which replica a request wants, None for any.

    Args:
        header: value of ``X-Data-Parallel-Rank``, which wins over the body.
        replicas: how many there are.

    Raises:
        RequestError: not an integer, or no such replica.
    """
    if header is not None:
        try:
            ranks: list[tuple[str, Any]] = [("X-Data-Parallel-Rank", int(header))]
        except ValueError:
            raise RequestError(
                f"X-Data-Parallel-Rank must be an integer, got {shorten(header)!r}", field="X-Data-Parallel-Rank"
            ) from None
    else:
        ranks = [(name, body[name]) for name in _RANK_FIELDS if body.get(name) is not None]
    for name, rank in ranks:
        if not 0 <= read_int(name, rank) < max(1, replicas):
            raise RequestError(f"{name}={rank} out of range [0, {max(1, replicas)})", field=name)
    own = [rank for name, rank in ranks if name != "disagg_prefill_dp_rank"]  # that one names another server's
    return int(own[0]) if own else None
