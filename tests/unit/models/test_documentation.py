"""docs/models.md names exactly what the registry serves and refuses, and every family has a tiny checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import transformers

from sglang_lite.models.families import REFUSED, supported_architectures
from tests.support.tiny_checkpoints import CASES
from tests.support.tiny_classifiers import CLASSIFIERS

ROOT = Path(__file__).parents[3]


def architectures_in(section: str) -> set[str]:
    return set(re.findall(r"`(\w+For(?:CausalLM|ConditionalGeneration|SequenceClassification))`", section))


def test_served_and_refused_architectures_are_documented() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    served, refused = text.split("## Served")[1].split("\n## ")[0], text.split("## Refused")[1]
    assert architectures_in(served) == set(supported_architectures())
    assert architectures_in(refused) == set(REFUSED)


def test_every_architecture_has_a_case() -> None:
    models = {case.model or f"{case.family}ForCausalLM" for case in CASES.values()}
    # Built from the checkpoint of DeepSeek V3 by renaming (tests/parity/test_latent_checkpoints.py).
    models.add("KimiK25ForConditionalGeneration")
    models |= {f"{family}ForSequenceClassification" for family in CLASSIFIERS}
    assert set(supported_architectures()) <= models
    assert all(hasattr(transformers, name) for name in models - {"KimiK25ForConditionalGeneration"})
