"""Giving the host's memory of an idle engine back, and taking it again."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection
from typing import Final, NoReturn, Protocol

from torch import Tensor

from sglang_lite.models.base import CausalLanguageModel

KV_CACHE: Final = "kv_cache"
WEIGHTS: Final = "weights"
MEMORY_TAGS: Final = (KV_CACHE, WEIGHTS)
"""What can be given back, by the names of SGLang."""


class SavedRunner(Protocol):
    """What a runner offers that can run with nothing in its memory until a next step."""

    def release_pool(self) -> None:
        """Let go of the KV pool and of recurrent states."""

    def restore_pool(self) -> None:
        """Allocate them again."""

    def release_model(self) -> None:
        """Let go of the weights."""


class KeepingOperations(Protocol):
    """Operations that keep copies between steps."""

    def release(self) -> None:
        """Let go of what is kept of pools and weights."""


class WeightSource(Protocol):
    """Reads the weights of a model (``executor.Reloader``)."""

    def read(self, directory: str) -> Callable[[], None]:
        """Check and read them; the result puts them in place."""


class MemorySaver:
    """Releases and restores the memory of one runner, between two plans.

    Args:
        directory: where its weights come from.
    """

    def __init__(self, runner: SavedRunner, ops: KeepingOperations, source: WeightSource, directory: str) -> None:
        self._runner = runner
        self._ops = ops
        self._source = source
        self._directory = directory

    def loaded(self, directory: str) -> None:
        """Other weights were put in place."""
        self._directory = directory

    def release(self, tags: Collection[str]) -> None:
        """Let go of these kinds of memory; no step may run before they are back."""
        self._ops.release()
        if KV_CACHE in tags:
            self._runner.release_pool()
        if WEIGHTS in tags:
            self._runner.release_model()
        _return_freed_memory()

    def read(self, tags: Collection[str]) -> Callable[[], None]:
        """Read what has to be read; the result puts all of it in place and must not run during a step.

        Raises:
            StartupError: the checkpoint cannot be loaded again.
        """
        install = self._source.read(self._directory) if WEIGHTS in tags else None

        def restore() -> None:
            if KV_CACHE in tags:
                self._runner.restore_pool()
            if install is not None:
                install()

        return restore


class ReleasedModel:
    """Stands where a model was until its weights are back; no step may reach it."""

    def __init__(self, model: CausalLanguageModel) -> None:
        self.num_layers = model.num_layers
        self.num_kv_heads = model.num_kv_heads
        self.head_dim = model.head_dim
        self.vocab_size = model.vocab_size

    def forward(self, *inputs: object, **options: object) -> NoReturn:
        """See ``CausalLanguageModel.forward``."""
        raise RuntimeError("the weights were released; a step must not run before they are back")

    def logits(self, hidden: Tensor) -> NoReturn:
        """See ``CausalLanguageModel.logits``."""
        raise RuntimeError("the weights were released; a step must not run before they are back")


def _return_freed_memory() -> None:
    """The C library keeps freed memory for itself; where it can be told to give it back, tell it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
