"""How long a sequence may get on a device."""

from __future__ import annotations

from sglang_lite.config import ServerConfig
from sglang_lite.models.model_description import ModelDescription
from sglang_lite.types import StartupError


def served_context_length(config: ServerConfig, description: ModelDescription, *, selects_keys: bool) -> int:
    """Most tokens of a sequence: ``--context-length``, else what the model is made for.

    A model with sparse attention lets a query attend to a limited number of chosen keys. Up to that length nothing is
    left out, so a device without that choice serves such contexts, and longer ones it must not.

    Args:
        selects_keys: whether the device can choose keys.

    Raises:
        StartupError: ``--context-length`` is longer than the device can serve.
    """
    limit = description.selected_keys
    if limit is None or selects_keys:
        return config.context_length or description.context_length
    if config.context_length is not None and config.context_length > limit:
        raise StartupError(
            f"--context-length {config.context_length}: on --device {config.device} there is no kernel that chooses "
            f"the keys of {description.architecture}'s sparse attention, so contexts up to {limit} tokens (index_topk) "
            f"are served; choose at most {limit}, or --device cpu"
        )
    return min(config.context_length or description.context_length, limit)
