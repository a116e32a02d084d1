"""Reading tensors of a checkpoint, memory-mapped, converted while they are copied."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sglang_lite.models.checkpoint import Checkpoint
from sglang_lite.models.load_progress import LoadProgress
from sglang_lite.types import StartupError


class _OpenFile(Protocol):
    def get_tensor(self, name: str) -> Tensor: ...


class WeightReader:
    """Reads tensors of a checkpoint into fresh memory of one element type.

    Only one source tensor is touched at a time and its pages belong to the file, so the peak is the model in its
    final type plus one tensor. Use as a context manager: leaving it closes the files.

    Args:
        checkpoint: already checked with ``Checkpoint.require`` for the names that will be read.
        dtype: element type of the results.
        device: where they live.
        progress: counts the bytes read.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, progress: LoadProgress
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._files: dict[Path, _OpenFile] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, name: str) -> Tensor:
        """One tensor, in the reader's type, in memory of its own."""
        return self.read_merged([name])

    def read_merged(self, names: Sequence[str]) -> Tensor:
        """Tensors stacked along their first dimension.

        Raises:
            StartupError: a file cannot be read as safetensors; names file and tensor.
        """
        entries = [self._checkpoint.tensors[name] for name in names]
        rows = sum(entry.shape[0] for entry in entries)
        merged = torch.empty(rows, *entries[0].shape[1:], dtype=self._dtype, device=self._device)
        start = 0
        for entry in entries:
            stop = start + entry.shape[0]
            try:
                merged[start:stop].copy_(self._file(entry.file).get_tensor(entry.name))
            except (SafetensorError, OSError) as error:
                raise StartupError(
                    f"invalid safetensors data in {entry.file}: cannot read tensor {entry.name!r}: {error}"
                ) from error
            self._progress.advance(entry.num_bytes)
            start = stop
        return merged

    def _file(self, path: Path) -> _OpenFile:
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        return file
