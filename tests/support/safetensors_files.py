"""Writes safetensors files byte by byte, so that a test can make any kind of damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def encode(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with this header, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_arrays(path: Path, arrays: dict[str, npt.NDArray[np.float32]]) -> None:
    """A valid file of float32 arrays."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array, dtype="<f4").tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    path.write_bytes(encode(header, data))
