"""Reading tensors of a checkpoint, memory-mapped, converted while they are copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sglang_lite.adapters.quantized import QuantizedWeight
from sglang_lite.layers.adapted import AdapterSlots
from sglang_lite.layers.parallel import SINGLE, ParallelGroup, VocabularyRows
from sglang_lite.models.checkpoint import Checkpoint
from sglang_lite.models.load_progress import LoadProgress
from sglang_lite.models.quantized_storage import StoredMatrix
from sglang_lite.models.safetensors_header import TensorEntry
from sglang_lite.models.stored_weights import read_plain, read_stored
from sglang_lite.types import StartupError

NOTHING_QUANTIZED: Mapping[str, StoredMatrix] = MappingProxyType({})


class _Slice(Protocol):
    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


class _OpenFile(Protocol):
    def get_tensor(self, name: str) -> Tensor: ...

    def get_slice(self, name: str) -> _Slice: ...


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``index`` of ``count`` equal parts of a tensor along dimension ``dim``."""

    dim: int
    index: int
    count: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The part's shape. ``whole`` must divide."""
        return (*whole[: self.dim], whole[self.dim] // self.count, *whole[self.dim + 1 :])

    def slices(self, whole: tuple[int, ...]) -> tuple[slice, ...]:
        """Where the part lies in the whole."""
        extent = whole[self.dim] // self.count
        return (*[slice(None)] * self.dim, slice(self.index * extent, (self.index + 1) * extent))


@dataclass(frozen=True, slots=True)
class Span:
    """The rows ``start`` to ``stop`` of a matrix."""

    start: int
    stop: int

    def slices(self, whole: tuple[int, ...]) -> tuple[slice, ...]:
        """Where they lie in the whole."""
        return (slice(self.start, self.stop), *[slice(None)] * (len(whole) - 1))


class WeightReader:
    """Reads tensors of a checkpoint into fresh memory of one element type.

    Only one source tensor is touched at a time and its pages belong to the file, so the peak is the model in its
    final type plus one tensor. Use as a context manager: leaving it closes the files.

    Args:
        checkpoint: already checked with ``Checkpoint.require`` for the names that will be read.
        dtype: element type of the results.
        device: where they live.
        progress: counts the bytes read.
        parallel: the ranks that share the model; whoever reads asks it which parts are this rank's.
        quantized: the matrices that the checkpoint stores quantized. Reading one of them gives the plain matrix it
            stands for; for a moment it is in memory as a whole, whatever part of it is asked for.
        adapters: slots of low-rank adapters, which linear layers get when they are made; None for no adapters.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: LoadProgress,
        parallel: ParallelGroup = SINGLE,
        quantized: Mapping[str, StoredMatrix] = NOTHING_QUANTIZED,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.adapters = adapters
        self.parallel = parallel
        self._quantized = quantized
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._files: dict[Path, _OpenFile] = {}
        self._stack = ExitStack()
        self._counted: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the results."""
        return self._dtype

    def read(self, name: str) -> Tensor:
        """One tensor, in the reader's type, in memory of its own."""
        return self.read_merged([name])

    def read_float32(self, name: str) -> Tensor:
        """One tensor in float32 whatever the reader's type, for values that its rounding would spoil."""
        return self._plain(name, None).to(device=self._device, dtype=torch.float32, copy=True)

    def rows_of(self, name: str) -> int:
        """First extent of a tensor in the checkpoint."""
        return self.shape_of(name)[0]

    def read_vocabulary(self, name: str) -> Tensor:
        """This rank's rows of a matrix [vocab, hidden], padded with zeros to the length that all ranks have."""
        if self.parallel.size == 1:
            return self.read(name)
        vocab_size, *others = self.shape_of(name)
        rows = VocabularyRows(vocab_size, self.parallel)
        part = torch.zeros(rows.length, *others, dtype=self._dtype, device=self._device)
        part[: rows.stop - rows.start].copy_(self._plain(name, Span(rows.start, rows.stop)))
        return part

    def read_merged(self, names: Sequence[str], shard: Shard | Sequence[Shard | None] | None = None) -> Tensor:
        """Tensors stacked along their first dimension; with ``shard``, that part of each of them (or one for each).

        Raises:
            StartupError: a file cannot be read as safetensors, or an extent does not divide into the parts; names
                the tensor.
        """
        shards = [shard] * len(names) if shard is None or isinstance(shard, Shard) else shard
        shapes = [_part_shape(name, self.shape_of(name), part) for name, part in zip(names, shards, strict=True)]
        rows = sum(shape[0] for shape in shapes)
        merged = torch.empty(rows, *shapes[0][1:], dtype=self._dtype, device=self._device)
        start = 0
        for name, shape, part in zip(names, shapes, shards, strict=True):
            stop = start + shape[0]
            merged[start:stop].copy_(self._plain(name, part))
            start = stop
        return merged

    def read_spans(self, name: str, spans: Sequence[Span]) -> Tensor:
        """Rows of one tensor, span behind span."""
        rows = sum(span.stop - span.start for span in spans)
        joined = torch.empty(rows, *self.shape_of(name)[1:], dtype=self._dtype, device=self._device)
        start = 0
        for span in spans:
            stop = start + span.stop - span.start
            joined[start:stop].copy_(self._plain(name, span))
            start = stop
        return joined

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        """A matrix as the checkpoint stores it, on the host, or None when it is stored plain.

        Raises:
            StartupError: a file cannot be read, or parts of the matrix contradict each other.
        """
        matrix = self._quantized.get(name)
        return None if matrix is None else read_stored(matrix, self._whole)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor; of a quantized matrix, that of what it stands for."""
        matrix = self._quantized.get(name)
        return self._checkpoint.tensors[name].shape if matrix is None else matrix.shape

    def _plain(self, name: str, part: Shard | Span | None) -> Tensor:
        """A tensor, or its part, in a floating-point type."""
        matrix = self._quantized.get(name)
        if matrix is not None:
            whole = read_plain(matrix, self._whole, self._dtype)
            return whole if part is None else whole[part.slices(matrix.shape)]
        entry = self._checkpoint.tensors[name]
        tensor = self._stored(entry, part)
        self._count(entry)
        return tensor

    def _whole(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        entry = self._checkpoint.tensors[name]
        tensor = self._stored(entry, None)
        self._count(entry)
        return tensor

    def _count(self, entry: TensorEntry) -> None:
        """Advance the progress by a tensor, once however often it is read."""
        if entry.name not in self._counted:
            self._counted.add(entry.name)
            self._progress.advance(entry.num_bytes)

    def _stored(self, entry: TensorEntry, shard: Shard | Span | None) -> Tensor:
        """A tensor, or its part, as the file has it."""
        try:
            file = self._file(entry.file)
            return (
                file.get_tensor(entry.name) if shard is None else file.get_slice(entry.name)[shard.slices(entry.shape)]
            )
        except (SafetensorError, OSError) as error:
            raise StartupError(
                f"invalid safetensors data in {entry.file}: cannot read tensor {entry.name!r}: {error}"
            ) from error

    def _file(self, path: Path) -> _OpenFile:
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        return file


def _part_shape(name: str, shape: tuple[int, ...], shard: Shard | None) -> tuple[int, ...]:
    if shard is None:
        return shape
    if shape[shard.dim] % shard.count:
        raise StartupError(
            f"tensor {name} of shape {list(shape)} does not divide into {shard.count} parts along "
            f"dimension {shard.dim}; choose a tensor parallel size that divides it"
        )
    return shard.shape(shape)
