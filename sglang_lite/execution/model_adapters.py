"""The low-rank adapters of a loaded model: reading them, and putting them into the slots of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from sglang_lite.adapters.base import Operations
from sglang_lite.layers.adapted import AdapterSlots, AdapterWeights
from sglang_lite.models.adapter_checkpoint import read_adapter
from sglang_lite.models.adapter_settings import AdapterSettings
from sglang_lite.scheduler.plan import StepPlan


class ModelAdapters:
    """Slots for adapters, made before the model is loaded so that its layers get them.

    Args:
        ops: operations of the device.
        settings: how many adapters of which rank, and what they may change.
        canonical_name: a checkpoint's tensor name -> the family's.
        dtype: of the layers' inputs and outputs.
    """

    def __init__(
        self,
        ops: Operations,
        settings: AdapterSettings,
        canonical_name: Callable[[str], str],
        dtype: torch.dtype,
    ) -> None:
        self.slots = AdapterSlots(ops, settings.num_slots, settings.max_rank, settings.target_modules)
        self._canonical_name = canonical_name
        self._dtype = dtype

    def read(self, directory: Path | str) -> dict[str, AdapterWeights]:
        """An adapter from its directory, on the host. May run in any thread.

        Raises:
            StartupError: it cannot be served; names the file and the tensor.
        """
        return read_adapter(
            directory,
            self.slots.shapes(),
            max_rank=self.slots.max_rank,
            canonical_name=self._canonical_name,
            dtype=self._dtype,
        )

    def install(self, slot: int, weights: Mapping[str, AdapterWeights]) -> None:
        """Put an adapter into a slot. Not while a step runs."""
        self.slots.install(slot, weights)

    def clear(self, slot: int) -> None:
        """Empty a slot. Not while a step runs."""
        self.slots.clear(slot)

    def select(self, plan: StepPlan) -> None:
        """Choose what the tokens of a step go through: every token of a row has the row's adapter."""
        slots = plan.adapter_slots
        self.slots.select(None if slots is None else np.repeat(slots, plan.query_lens))
