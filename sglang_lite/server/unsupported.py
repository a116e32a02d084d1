"""Request fields that this server understands but cannot serve: refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_lite.config import ServerConfig
from sglang_lite.frontend.fields import read_int, shorten
from sglang_lite.types import RequestError

_DISAGGREGATION = frozenset(
    ("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key", "disaggregated_params")
)
_TEXT_ONLY = "this server takes text and token ids only; send the prompt as text or input_ids, without it"
_NOT_RECORDED = "it is not recorded; leave it out"
_FLAT = "log-probabilities come as nested lists only; use return_logprob with top_logprobs_num"
_REASONS = {
    "input_embeds": "only /generate takes them",
    "image_data": _TEXT_ONLY,
    "video_data": _TEXT_ONLY,
    "audio_data": _TEXT_ONLY,
    "custom_logit_processor": "code from clients is never run; logit_bias, regex, ebnf and json_schema are served",
    "return_routed_experts": _NOT_RECORDED,
    "return_sampling_mask": f"{_NOT_RECORDED}, or use return_logprob with top_logprobs_num",
    "sampling_logprobs_mode": f"{_NOT_RECORDED}, or use return_logprob with top_logprobs_num",
    "return_flat_raw_top_logprobs": _FLAT,
    "return_flat_raw_output_top_logprobs": _FLAT,
    "return_flat_raw_top_logprobs_b64": _FLAT,
    "return_indexer_topk": _NOT_RECORDED,
    "return_entropy": f"{_NOT_RECORDED}, or compute a bound from top_logprobs_num",
    "max_thinking_tokens": "the length of reasoning is not limited by itself; limit all of the output instead",
    "watermark": "outputs are not marked; leave it out",
    "suffix": "text is only continued at its end; put the model's own fill-in-the-middle marks into the prompt",
}
"""What is not served -> why, and what to do instead."""

_RANK_FIELDS = ("routed_dp_rank", "data_parallel_rank")


def _is_set(value: Any) -> bool:
    """Whether a field asks for something; clients fill lists with null for the items that do not."""
    return any(map(_is_set, value)) if isinstance(value, list) else value is not None


def refuse_unsupported(body: Mapping[str, Any], config: ServerConfig, *, takes_embeds: bool = False) -> None:
    """Check the fields of a generation request that ask for something else than plain generation.

    Args:
        takes_embeds: the caller reads ``input_embeds``.

    Raises:
        RequestError: 501 for prefill/decode fields on a server without that role, 400 for the rest.
    """
    for name in _DISAGGREGATION & body.keys():
        if not config.is_disaggregated and _is_set(body.get(name)):
            raise RequestError(
                f"{name} needs a server started with --disaggregation-mode prefill or decode", status=501, field=name
            )
    for name in _REASONS.keys() & body.keys():
        if body[name] and _is_set(body[name]) and not (takes_embeds and name == "input_embeds"):
            raise RequestError(f"{name} is not supported: {_REASONS[name]}", field=name)


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
    return int(ranks[0][1]) if ranks else None
