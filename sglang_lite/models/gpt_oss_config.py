"""gpt-oss: alternating windows, attention sinks, experts with biases and a clamped activation. Free of torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sglang_lite.models.config_files import ConfigReader
from sglang_lite.models.decoder_config import describe_decoder, layer_kinds
from sglang_lite.models.dense_names import Shapes, attention_tensors, decoder_tensors
from sglang_lite.models.family import Family
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.moe_config import MoEDescription, check_moe, experts_per_token, number_of_experts

SINKS = "self_attn.sinks"
ROUTER = "mlp.router"
EXPERTS = "mlp.experts."
_WINDOW = 128
_THETA = 150_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssDetails:
    """What the family has beside a plain decoder.

    Attributes:
        moe: its experts.
        alpha, limit: of the clamped SwiGLU of its experts.
    """

    moe: MoEDescription
    alpha: float
    limit: float


def describe(config: ConfigReader, generation: ConfigReader, architecture: str) -> ModelDescription:
    """See ``Family.describe``."""
    config = dataclasses.replace(config, values={"rope_theta": _THETA, **config.values})
    plain = describe_decoder(config, generation, architecture)
    has_bias = config.boolean("attention_bias", True)
    moe = MoEDescription(
        num_experts=number_of_experts(config),
        top_k=experts_per_token(config),
        intermediate_size=plain.intermediate_size,
        sparse_layers=(True,) * plain.num_layers,
        scoring="top_k_softmax",
    )
    return dataclasses.replace(
        plain,
        qkv_bias=has_bias,
        output_bias=has_bias,
        sliding_windows=_windows(config, plain.num_layers),
        details=GptOssDetails(
            moe=check_moe(config, moe),
            alpha=config.number("swiglu_alpha", 1.702),
            limit=config.number("swiglu_limit", 7.0),
        ),
    )


def _windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Every second layer has a window, from the first on, unless ``layer_types`` says otherwise."""
    window = config.integer("sliding_window", _WINDOW)
    kinds = layer_kinds(config, num_layers, ("full_attention", "sliding_attention"))
    if kinds is None:
        return tuple(None if layer % 2 else window for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def details_of(description: ModelDescription) -> GptOssDetails:
    """The details of a description that this family made."""
    if not isinstance(description.details, GptOssDetails):
        raise TypeError(f"{description.architecture} was not described by this family")
    return description.details


def expected_tensors(description: ModelDescription) -> Shapes:
    """name -> shape of every tensor the model reads. Expert matrices are stored as [experts, in, out]."""
    hidden, moe = description.hidden_size, details_of(description).moe
    experts, intermediate = moe.num_experts, moe.intermediate_size
    block: Shapes = {
        SINKS: (description.num_heads,),
        f"{ROUTER}.weight": (experts, hidden),
        f"{ROUTER}.bias": (experts,),
        f"{EXPERTS}gate_up_proj": (experts, hidden, 2 * intermediate),
        f"{EXPERTS}gate_up_proj_bias": (experts, 2 * intermediate),
        f"{EXPERTS}down_proj": (experts, intermediate, hidden),
        f"{EXPERTS}down_proj_bias": (experts, hidden),
    }
    return decoder_tensors(description, lambda layer: attention_tensors(description) | block)


GPT_OSS = Family(
    architectures=("GptOssForCausalLM",),
    describe=describe,
    expected_tensors=expected_tensors,
    module="sglang_lite.models.gpt_oss",
)
