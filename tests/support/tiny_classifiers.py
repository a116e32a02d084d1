"""Tiny random classification models made with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.in_process_engine import write_character_tokenizer
from tests.support.tiny_checkpoints import COMMON

CLASSIFIERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
LABELS = ["calm", "glad", "sad"]
"""Family -> its options beside the common ones."""


def save_classifier(directory: Path, family: str, labels: list[str] | None = LABELS) -> Any:
    """Write the checkpoint; returns the transformers model."""
    torch.manual_seed(len(family))
    named = {} if labels is None else {"id2label": dict(enumerate(labels))}
    config = getattr(transformers, f"{family}Config")(**COMMON, **CLASSIFIERS[family], **named)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    write_character_tokenizer(directory, COMMON["vocab_size"])
    return model
