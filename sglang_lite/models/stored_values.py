"""Values of single tensors of a checkpoint, for people who want to see which weights are served. Free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_lite.models.checkpoint import weight_files
from sglang_lite.models.description import ModelDescription
from sglang_lite.models.registry import OUTPUT_MATRIX, open_checkpoint
from sglang_lite.models.safetensors_header import TensorEntry, data_offset
from sglang_lite.types import RequestError, StartupError

EMBEDDING = "model.embed_tokens.weight"
MAX_VALUES = 4_000_000
"""Most numbers of one answer."""

_DTYPES: dict[str, str] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}

Stamp = tuple[tuple[str, int, int], ...]
"""Name, length in bytes and time of change in nanoseconds of every weight file."""


def checkpoint_stamp(directory: Path | str) -> Stamp:
    """Tells whether the weight files of a directory are still the same; empty when there are none to be read."""
    try:
        states = [(file.name, file.stat()) for file in weight_files(Path(directory))]
    except (OSError, StartupError):
        return ()
    return tuple((name, state.st_size, state.st_mtime_ns) for name, state in states)


def stored_values(directory: Path | str, description: ModelDescription, name: str, rows: int) -> list[Any]:
    """The first ``rows`` entries of a tensor along its first dimension, as nested lists of numbers.

    Args:
        name: in the checkpoint or in the family's spelling; of a model with tied embeddings also the output matrix.

    Raises:
        RequestError: there is no such tensor, its type has no plain numbers, or the answer would be too long.
        StartupError: the checkpoint cannot be read any more.
    """
    checkpoint = open_checkpoint(directory, description)
    tensors = {entry.name: entry for entry in checkpoint.tensors.values()} | dict(checkpoint.tensors)
    if name == OUTPUT_MATRIX and name not in tensors and description.tie_word_embeddings:
        name = EMBEDDING
    entry = tensors.get(name)
    if entry is None:
        raise RequestError(
            f"there is no tensor {name[:200]!r}; /get_weights_by_name takes checkpoint names", field="name"
        )
    count = entry.shape[0] if entry.shape else 1
    shape = (min(rows, count), *entry.shape[1:]) if entry.shape else ()
    total = int(np.prod(shape, dtype=np.int64))
    if total > MAX_VALUES:
        raise RequestError(
            f"{shape[0]} rows of {name[:200]!r} are {total} values, over the limit of {MAX_VALUES}; "
            f"lower truncate_size",
            field="truncate_size",
        )
    values: list[Any] = _read(entry, total).reshape(shape or (1,)).tolist()
    return values


def whole_tensor(directory: Path | str, description: ModelDescription, name: str) -> npt.NDArray[np.float32]:
    """A tensor of floating-point numbers.

    Raises:
        RequestError: its type has no plain numbers.
        StartupError: there is no such tensor, or the checkpoint cannot be read.
    """
    entry = open_checkpoint(directory, description).tensors.get(name)
    if entry is None:
        raise StartupError(f"there is no tensor {name!r} in {directory}")
    return _read(entry, int(np.prod(entry.shape, dtype=np.int64))).astype(np.float32).reshape(entry.shape)


def _read(entry: TensorEntry, count: int) -> npt.NDArray[Any]:
    start = data_offset(entry)
    if entry.dtype == "BF16":  # the upper half of a 32-bit float
        halves = np.fromfile(entry.file, "<u2", count, offset=start)
        return (halves.astype(np.uint32) << 16).view(np.float32)
    if entry.dtype not in _DTYPES:
        raise RequestError(f"tensor {entry.name!r} is stored as {entry.dtype}, which is not shown", field="name")
    numbers = np.fromfile(entry.file, _DTYPES[entry.dtype], count, offset=start)
    return numbers if entry.dtype.startswith(("I", "U")) else numbers.astype(np.float32)
