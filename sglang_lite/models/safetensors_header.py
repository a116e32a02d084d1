"""Reading and checking the header of a safetensors file, without reading its data and without torch.

Format: eight bytes little-endian header length, a JSON object that maps each tensor to dtype, shape and
``data_offsets`` (begin and end, relative to the first byte after the header), then the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sglang_lite.types import StartupError

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "U8": 8,
        "I8": 8,
        "F8_E4M3": 8,
        "F8_E5M2": 8,
        "F8_E8M0": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "I64": 64,
        "U64": 64,
        "F64": 64,
    }
)
FLOATING_DTYPES = frozenset({"F16", "BF16", "F32", "F64"})
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_LFS_POINTER_START = b"version "


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as a header declares it.

    Attributes:
        name: its name in the checkpoint.
        file: the safetensors file that holds it.
        dtype: safetensors' name of the element type, such as ``BF16``.
        shape: extents, row-major.
        num_bytes: length of its data.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Tensors of a safetensors file, each checked against the file's length.

    Raises:
        StartupError: the file cannot be read, or its header or a tensor in it is invalid; names file and tensor.
    """
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            length_field = file.read(_LENGTH_BYTES)
            header_bytes = int.from_bytes(length_field, "little")
            if length_field == _LFS_POINTER_START:
                raise _invalid_header(path, "this is a Git LFS pointer, not the weights (run 'git lfs pull')")
            if file_bytes < _LENGTH_BYTES:
                raise _invalid_header(path, f"the file has {file_bytes} bytes, fewer than the length field")
            if not 0 < header_bytes <= min(_MAX_HEADER_BYTES, file_bytes - _LENGTH_BYTES):
                raise _invalid_header(
                    path, f"a header of {header_bytes} bytes does not fit a file of {file_bytes} bytes"
                )
            text = file.read(header_bytes)
    except OSError as error:
        raise StartupError(f"cannot read safetensors file {path}: {error}") from error
    header = _parse(path, text)
    header.pop("__metadata__", None)
    data_bytes = file_bytes - _LENGTH_BYTES - header_bytes
    entries = {name: _entry(path, name, value, data_bytes) for name, value in header.items()}
    _check_coverage(path, header, data_bytes)
    return entries


def data_offset(entry: TensorEntry) -> int:
    """Where the data of a tensor begins, in bytes from the start of its file.

    Raises:
        StartupError: the file is no longer what it was when the entry was read.
    """
    try:
        with entry.file.open("rb") as file:
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = _parse(entry.file, file.read(min(header_bytes, _MAX_HEADER_BYTES)))
        begin = int(header[entry.name]["data_offsets"][0])
    except (OSError, KeyError, TypeError, IndexError, ValueError) as error:
        raise StartupError(f"cannot find tensor {entry.name!r} in {entry.file} any more: {error}") from error
    return _LENGTH_BYTES + header_bytes + begin


def _invalid_header(path: Path, reason: str) -> StartupError:
    return StartupError(f"invalid safetensors header in {path}: {reason}; download or convert the file again")


def _invalid_tensor(path: Path, name: str, reason: str) -> StartupError:
    return StartupError(
        f"invalid safetensors data in {path}: tensor {name!r} {reason}; download or convert the file again"
    )


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise _invalid_header(path, f"not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _invalid_header(path, f"expected a JSON object, got {type(header).__name__}")
    return header


def _entry(path: Path, name: str, value: Any, data_bytes: int) -> TensorEntry:
    if not isinstance(value, dict):
        raise _invalid_tensor(path, name, f"is described by {type(value).__name__}, not by an object")
    for key in ("dtype", "shape", "data_offsets"):
        if key not in value:
            raise _invalid_tensor(path, name, f"has no {key!r}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _invalid_tensor(path, name, f"has unknown dtype {dtype!r}; known: {', '.join(DTYPE_BITS)}")
    if not _are_counts(shape):
        raise _invalid_tensor(path, name, f"has shape {shape!r}, not a list of non-negative integers")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise _invalid_tensor(path, name, f"has data_offsets {offsets!r}, not [begin, end]")
    begin, end = offsets
    if end < begin:
        raise _invalid_tensor(path, name, f"has reversed data_offsets [{begin}, {end}]")
    expected = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if end - begin != expected:
        raise _invalid_tensor(path, name, f"has {end - begin} bytes where {dtype} of shape {shape} takes {expected}")
    if end > data_bytes:
        raise _invalid_tensor(
            path, name, f"ends at byte {end} of data that ends at {data_bytes}: the file is truncated"
        )
    return TensorEntry(name, path, dtype, tuple(shape), expected)


def _check_coverage(path: Path, header: Mapping[str, Any], data_bytes: int) -> None:
    """The format wants every byte of the data to belong to exactly one tensor."""
    covered = 0
    for begin, end, name in sorted((*value["data_offsets"], name) for name, value in header.items()):
        if begin != covered:
            fault = "overlaps the tensor before it" if begin < covered else "leaves a gap before it"
            raise _invalid_tensor(path, name, f"begins at byte {begin}, not at {covered}: it {fault}")
        covered = end
    if covered != data_bytes:
        raise _invalid_header(path, f"the tensors end at byte {covered} of {data_bytes} bytes of data")


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )
