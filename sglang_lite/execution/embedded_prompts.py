"""Prompts that were sent as vectors, on their way into the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sglang_lite.layers.given_embeddings import GivenEmbeddings
from sglang_lite.scheduler.plan import StepPlan

Upload = Callable[[npt.NDArray[Any]], Tensor]
"""A host array as a tensor where the model is."""


def given_embeddings(plan: StepPlan, upload: Upload) -> GivenEmbeddings | None:
    """What takes the place of the embedding of some of the plan's tokens; None in nearly every step."""
    if not plan.embedded:
        return None
    rows = [np.arange(part.first, part.first + len(part.values), dtype=np.int64) for part in plan.embedded]
    values = np.concatenate([part.values for part in plan.embedded])  # writable and whole, as tensors over it must be
    return GivenEmbeddings(upload(np.concatenate(rows)), upload(values))
