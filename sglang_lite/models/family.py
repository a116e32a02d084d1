"""What a model family is: how it is recognised, described and built. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sglang_lite.models.config_files import ConfigReader
from sglang_lite.models.model_description import ModelDescription

Shapes = Mapping[str, tuple[int, ...]]
"""name -> shape of checkpoint tensors, in reading order."""


def unchanged(name: str) -> str:
    """The names of a checkpoint that needs no renaming."""
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models that one description and one wiring serve.

    Attributes:
        architectures: entries of ``architectures`` in config.json.
        describe: (config.json, generation_config.json, the entry of ``architectures``) -> description; raises
            StartupError for a configuration that cannot be served.
        expected_tensors: every tensor the model reads, as if the checkpoint were not quantized.
        module: dotted name of the module whose ``build(description, reader, ops, num_positions)`` wires the model.
            It is imported when weights are loaded, since it needs torch.
        canonical_name: a checkpoint's tensor name -> the name that ``expected_tensors`` and ``module`` use, for
            families whose checkpoints come with several spellings.
        prediction_layer: a model's description -> that of a decoder of one layer that looks like the multi-token
            prediction layer in its checkpoint; None where there is none, or none that is built. ``module`` then has a
            function ``layer_blocks(description)``.
    """

    architectures: tuple[str, ...]
    describe: Callable[[ConfigReader, ConfigReader, str], ModelDescription]
    expected_tensors: Callable[[ModelDescription], Shapes]
    module: str
    canonical_name: Callable[[str], str] = unchanged
    prediction_layer: Callable[[ModelDescription], ModelDescription] | None = None
