"""The families with latent attention: DeepSeek V2, V3 and V3.2, Kimi K2 and K2.5, GLM MLA and GLM-5. Free of torch."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from sglang_lite.models.config_files import ConfigReader
from sglang_lite.models.decoder_config import MOST_LAYERS, describe_decoder, is_one_a_layer, layer_index, text_config
from sglang_lite.models.dense_names import Shapes, decoder_tensors, mlp_tensors
from sglang_lite.models.family import Family
from sglang_lite.models.latent_config import LatentDescription, latent_tensors, read_indexer, read_latent
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.moe_config import (
    MoEDescription,
    check_moe,
    experts_per_token,
    layers_from,
    moe_tensors,
    number_of_experts,
    number_of_shared_experts,
    read_sigmoid_moe,
)

MODULE = "sglang_lite.models.deepseek"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekDetails:
    """What these families have beside a plain decoder.

    Attributes:
        latent: their attention.
        moe: their experts; None when every layer is dense.
    """

    latent: LatentDescription
    moe: MoEDescription | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekRules:
    """What distinguishes the families.

    Attributes:
        softmax_routing: experts are chosen by a softmax and the best expert of each group (V2); else by a logistic
            function each, a correction bias and the two best of each group.
        has_indexer, indexer_is_interleaved: queries attend to chosen keys, and how index keys rotate.
        is_wrapped: the decoder is the ``text_config`` of a larger model.
    """

    softmax_routing: bool = False
    has_indexer: bool = False
    indexer_is_interleaved: bool = False
    is_wrapped: bool = False

    def describe(self, config: ConfigReader, generation: ConfigReader, architecture: str) -> ModelDescription:
        """See ``Family.describe``."""
        if self.is_wrapped:
            config = text_config(config)
        num_layers = config.count("num_hidden_layers", MOST_LAYERS)
        indexer = None
        if self.has_indexer:
            indexer = read_indexer(config, num_layers, is_interleaved=self.indexer_is_interleaved)
        latent = read_latent(config, indexer=indexer)
        # What these configurations call head_dim is the rotary width, if they have it at all.
        rotating = {**config.values, "head_dim": latent.rope_dim, "num_key_value_heads": None}
        plain = describe_decoder(dataclasses.replace(config, values=rotating), generation, architecture)
        return dataclasses.replace(
            plain,
            num_kv_heads=1,
            head_dim=latent.row_width,
            kv=latent.kv(num_layers),
            is_wrapped=self.is_wrapped,
            selected_keys=None if indexer is None else indexer.top_k,
            details=DeepseekDetails(latent=latent, moe=self._moe(config, num_layers)),
        )

    def _moe(self, config: ConfigReader, num_layers: int) -> MoEDescription | None:
        if config.values.get("n_routed_experts", config.values.get("num_local_experts")) is None:
            return None
        sparse_layers = _sparse_layers(config, num_layers)
        if self.softmax_routing:
            return _softmax_moe(config, sparse_layers)
        _require(config, "scoring_func", ("sigmoid",))
        _require(config, "topk_method", ("noaux_tc",))
        return read_sigmoid_moe(config, sparse_layers)


def _softmax_moe(config: ConfigReader, sparse_layers: tuple[bool, ...]) -> MoEDescription:
    """Experts chosen by their softmax, out of the groups whose best expert is best. Weights are never renormalised."""
    _require(config, "scoring_func", ("softmax",))
    is_grouped = _require(config, "topk_method", ("greedy", "group_limited_greedy")) == "group_limited_greedy"
    intermediate_size = config.integer("moe_intermediate_size")
    moe = MoEDescription(
        num_experts=number_of_experts(config),
        top_k=experts_per_token(config),
        intermediate_size=intermediate_size,
        sparse_layers=sparse_layers,
        scaling=config.number("routed_scaling_factor", 1.0),
        num_groups=config.integer("n_group", 1) if is_grouped else 1,
        kept_groups=config.integer("topk_group", 1) if is_grouped else 1,
        shared_intermediate_size=number_of_shared_experts(config) * intermediate_size,
    )
    return check_moe(config, moe)


def _require(config: ConfigReader, key: str, allowed: tuple[str, ...]) -> str:
    """A name out of a few; absent means the first."""
    value = config.values.get(key)
    if value is None:
        return allowed[0]
    if value not in allowed:
        raise config.error(key, " or ".join(repr(name) for name in allowed) + " for this architecture")
    return str(value)


def _sparse_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    kinds = config.values.get("mlp_layer_types")
    if kinds is None:
        first, step = layer_index(config, "first_k_dense_replace", 0), config.integer("moe_layer_freq", 1)
        return layers_from(first, num_layers, step=step)
    if not is_one_a_layer(kinds, num_layers, ("dense", "sparse")):
        raise config.error("mlp_layer_types", f"a list of {num_layers} entries 'dense' or 'sparse', one a layer")
    return tuple(kind == "sparse" for kind in kinds)


def details_of(description: ModelDescription) -> DeepseekDetails:
    """The details of a description that these families made."""
    if not isinstance(description.details, DeepseekDetails):
        raise TypeError(f"{description.architecture} was not described by this family")
    return description.details


def expected_tensors(description: ModelDescription) -> Shapes:
    """name -> shape of every tensor the model reads, in reading order."""
    details = details_of(description)

    def blocks(layer: int) -> Shapes:
        attention = latent_tensors(description.hidden_size, description.num_heads, details.latent, layer)
        if details.moe is not None and details.moe.sparse_layers[layer]:
            return attention | moe_tensors(description.hidden_size, details.moe)
        return attention | mlp_tensors(description)

    return decoder_tensors(description, blocks)


_EXPERT = re.compile(r"(\.experts\.\d+|\.shared_experts)\.(w1|w2|w3)\.")
_EXPERT_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def canonical_name(name: str) -> str:
    """Expert matrices named w1, w2, w3, and the prefixes of checkpoints whose decoder is part of a larger model."""
    if name.startswith("language_model."):
        name = name.removeprefix("language_model.")
        if not name.startswith(("model.", "lm_head.")):
            name = f"model.{name}"
    return _EXPERT.sub(lambda match: f"{match[1]}.{_EXPERT_MATRICES[match[2]]}.", name)


def prediction_layer(description: ModelDescription) -> ModelDescription:
    """See ``Family.prediction_layer``: it has experts, whatever the first layers have."""
    details = details_of(description)
    moe = details.moe
    return dataclasses.replace(
        description,
        num_layers=1,
        sliding_windows=(None,),
        kv=details.latent.kv(1),
        details=dataclasses.replace(
            details, moe=None if moe is None else dataclasses.replace(moe, sparse_layers=(True,))
        ),
    )


def _family(architectures: tuple[str, ...], rules: DeepseekRules, *, predicts: bool = False) -> Family:
    return Family(
        architectures=architectures,
        describe=rules.describe,
        expected_tensors=expected_tensors,
        module=MODULE,
        canonical_name=canonical_name,
        prediction_layer=prediction_layer if predicts else None,
    )


DEEPSEEK_V2 = _family(("DeepseekV2ForCausalLM",), DeepseekRules(softmax_routing=True))
DEEPSEEK_V3 = _family(("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"), DeepseekRules(), predicts=True)
DEEPSEEK_V32 = _family(("DeepseekV32ForCausalLM",), DeepseekRules(has_indexer=True))
GLM_5 = _family(("GlmMoeDsaForCausalLM",), DeepseekRules(has_indexer=True, indexer_is_interleaved=True))
KIMI_K25 = _family(("KimiK25ForConditionalGeneration",), DeepseekRules(is_wrapped=True))
