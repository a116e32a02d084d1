"""GLM-4.5 and GLM-4.6: grouped key/value heads, half of each head rotating, experts behind dense first layers.

Free of torch.
"""

from __future__ import annotations

import dataclasses

from sglang_lite.models.config_files import ConfigReader
from sglang_lite.models.decoder_config import describe_decoder, layer_index
from sglang_lite.models.family import Family
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.moe_config import MoEDescription, expected_tensors, layers_from, read_sigmoid_moe

_ROTATING_PART = 0.5


def describe(config: ConfigReader, generation: ConfigReader, architecture: str) -> ModelDescription:
    """See ``Family.describe``. The output projection never has a bias."""
    values = {"partial_rotary_factor": _ROTATING_PART, **config.values}
    config = dataclasses.replace(config, values=values)
    plain = describe_decoder(config, generation, architecture)
    sparse_layers = layers_from(layer_index(config, "first_k_dense_replace", 1), plain.num_layers)
    return dataclasses.replace(
        plain,
        qkv_bias=config.boolean("attention_bias", False),
        query_key_norm=config.boolean("use_qk_norm", False),
        details=read_sigmoid_moe(config, sparse_layers),
    )


def prediction_layer(description: ModelDescription) -> ModelDescription:
    """See ``Family.prediction_layer``: it has experts, whatever the first layers have."""
    moe = description.details
    assert isinstance(moe, MoEDescription)
    return dataclasses.replace(
        description,
        num_layers=1,
        sliding_windows=(None,),
        kv=dataclasses.replace(description.kv, num_layers=1),
        details=dataclasses.replace(moe, sparse_layers=(True,)),
    )


GLM4_MOE = Family(
    architectures=("Glm4MoeForCausalLM",),
    describe=describe,
    expected_tensors=expected_tensors,
    module="sglang_lite.models.moe_decoder",
    prediction_layer=prediction_layer,
)
