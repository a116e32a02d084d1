"""Other weights for a model that is loaded: checked against it, read beside it, exchanged between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sglang_lite.execution.memory import available_memory
from sglang_lite.models.base import CausalLanguageModel
from sglang_lite.models.description import ModelDescription, read_description
from sglang_lite.models.registry import check_checkpoint, expected_tensors
from sglang_lite.types import StartupError


class ModelHolder(Protocol):
    """What runs a model and can take another one of the same shapes."""

    def replace_model(self, model: CausalLanguageModel) -> None:
        """Run this model from the next step on."""


class ModelReloader:
    """Replaces the model of a runner on the host.

    Args:
        description: of the model that was loaded.
        overrides: keys that replace those of config.json.
        weight_bytes: what a model needs beside the one that is there.
        load: builds the model of a directory.
        runner: gets it.
    """

    def __init__(
        self,
        description: ModelDescription,
        overrides: Mapping[str, Any] | None,
        weight_bytes: int,
        load: Callable[[str], CausalLanguageModel],
        runner: ModelHolder,
    ) -> None:
        self._description = description
        self._overrides = overrides
        self._weight_bytes = weight_bytes
        self._load = load
        self._runner = runner

    def read(self, directory: str) -> Callable[[], None]:
        """Check and load the model of ``directory``; the result puts it in place and must not run during a step.

        Raises:
            StartupError: it is no checkpoint, or not one of the same model, or does not fit beside the other.
        """
        description = read_description(directory, self._overrides)
        check_same_model(self._description, description, directory)
        check_checkpoint(directory, description)
        available = available_memory()
        if available < self._weight_bytes:
            raise StartupError(
                f"new weights are loaded beside the old ones and need {self._weight_bytes >> 20} MiB, but "
                f"{available >> 20} MiB are available; restart the server with --model-path {directory}"
            )
        model = self._load(directory)
        return lambda: self._runner.replace_model(model)


def check_same_model(served: ModelDescription, other: ModelDescription, directory: str) -> None:
    """Check that the weights of one model can run where the other is served.

    Raises:
        StartupError: names what differs.
    """
    differing = [
        name
        for name in ("architecture", "vocab_size", "eos_token_ids", "context_length", "kv", "recurrent")
        if getattr(served, name) != getattr(other, name)
    ]
    if not differing and expected_tensors(served) != expected_tensors(other):
        differing = ["the shapes of the tensors"]
    if differing:
        raise StartupError(
            f"{directory} is another model than the one that is served: {', '.join(differing)} differ; weights can "
            f"be replaced by others of the same model only"
        )
