"""Decoders that end in a score for each of a few classes instead of one for each token. Free of torch."""

from __future__ import annotations

import dataclasses

from sglang_lite.models.config_files import ConfigReader
from sglang_lite.models.dense_config import LLAMA, MISTRAL, QWEN2, QWEN3
from sglang_lite.models.family import Family, Shapes
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.models.qwen3_moe_config import QWEN3_MOE

SCORE = "score.weight"
"""[classes, hidden]: multiplied with the state of a text's last token. The engine hands out that state and the front
multiplies, so that such a model runs as the decoder that it is, with the embedding in place of an output matrix."""

MOST_CLASSES = 65536

DEFAULT_CLASSES = 2
"""Of a configuration that says nothing of classes."""


def classifier(family: Family, architecture: str) -> Family:
    """The models of ``family`` with a score head."""

    def describe(config: ConfigReader, generation: ConfigReader, name: str) -> ModelDescription:
        decoder = family.describe(config, generation, name)
        return dataclasses.replace(decoder, tie_word_embeddings=True, labels=read_labels(config))

    def expected_tensors(description: ModelDescription) -> Shapes:
        shape = (len(description.labels), description.hidden_size)
        return {**family.expected_tensors(description), SCORE: shape}

    return Family(
        architectures=(architecture,),
        describe=describe,
        expected_tensors=expected_tensors,
        module=family.module,
        canonical_name=family.canonical_name,
    )


def read_labels(config: ConfigReader) -> tuple[str, ...]:
    """The names of the classes in their order: ``id2label``, or ``LABEL_0`` and so on for ``num_labels`` of them.

    Raises:
        StartupError: not a name for each number from 0 on.
    """
    names = config.values.get("id2label")
    if not names:
        count = config.integer("num_labels", DEFAULT_CLASSES)
        if count > MOST_CLASSES:
            raise config.error("num_labels", f"at most {MOST_CLASSES}")
        return tuple(f"LABEL_{index}" for index in range(count))
    expected = f"an object with a name for each of the numbers 0, 1, .., at most {MOST_CLASSES}"
    if not isinstance(names, dict) or len(names) > MOST_CLASSES:
        raise config.error("id2label", expected)
    found = tuple(names.get(str(index)) for index in range(len(names)))
    labels = tuple(label for label in found if isinstance(label, str))
    if len(labels) != len(names):
        raise config.error("id2label", expected)
    return labels


LLAMA_CLASSIFIER = classifier(LLAMA, "LlamaForSequenceClassification")
MISTRAL_CLASSIFIER = classifier(MISTRAL, "MistralForSequenceClassification")
QWEN2_CLASSIFIER = classifier(QWEN2, "Qwen2ForSequenceClassification")
QWEN3_CLASSIFIER = classifier(QWEN3, "Qwen3ForSequenceClassification")
QWEN3_MOE_CLASSIFIER = classifier(QWEN3_MOE, "Qwen3MoeForSequenceClassification")
