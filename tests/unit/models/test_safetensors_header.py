"""Damaged safetensors files are refused with file and tensor named; sound ones are described exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sglang_lite.models.safetensors_header import TensorEntry, read_header
from sglang_lite.types import StartupError
from tests.support.safetensors_files import encode, write_arrays


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in entry().items() if name != key}


def test_headers_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(5), "c": torch.zeros(0, 4)}
    save_file(tensors, path, metadata={"format": "pt"})
    assert read_header(path) == {
        "a": TensorEntry("a", path, "BF16", (2, 3), 12),
        "b": TensorEntry("b", path, "F32", (5,), 20),
        "c": TensorEntry("c", path, "F32", (0, 4), 0),
    }


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "0 bytes"),
        (b"\x01\x00", "2 bytes"),
        ((1000).to_bytes(8, "little") + b"{}", "header of 1000 bytes does not fit"),
        ((0).to_bytes(8, "little"), "header of 0 bytes"),
        (b"\xff" * 8 + b"{}", "does not fit"),
        (encode(b"{not json"), "not JSON"),
        (encode(b"\xff\xfe\x00"), "not JSON"),
        (encode(b"[" * 100_000), "not JSON"),
        (encode([1, 2]), "expected a JSON object, got list"),
        (encode("text"), "expected a JSON object, got str"),
        (encode({}, b"spare"), "tensors end at byte 0 of 5"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
    ],
)
def test_bad_headers_name_the_file(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(StartupError, match="invalid safetensors header") as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("text", "described by str"),
        (without("dtype"), "has no 'dtype'"),
        (without("shape"), "has no 'shape'"),
        (without("data_offsets"), "has no 'data_offsets'"),
        (entry(dtype="F31"), "unknown dtype 'F31'"),
        (entry(dtype=4), "unknown dtype 4"),
        (entry(shape=6), "shape 6"),
        (entry(shape=[2, -3]), "shape [2, -3]"),
        (entry(shape=[2, 3.0]), "shape [2, 3.0]"),
        (entry(shape=[True]), "shape [True]"),
        (entry(data_offsets=[0]), "data_offsets [0]"),
        (entry(data_offsets=[0, 12, 24]), "data_offsets [0, 12, 24]"),
        (entry(data_offsets=["0", "24"]), "data_offsets ['0', '24']"),
        (entry(data_offsets=[24, 0]), "reversed data_offsets [24, 0]"),
        (entry(data_offsets=[0, 20]), "20 bytes where F32 of shape [2, 3] takes 24"),
        (entry(shape=[3, 3]), "24 bytes where F32 of shape [3, 3] takes 36"),
        (entry(shape=[20, 3], data_offsets=[0, 240]), "ends at byte 240 of data that ends at 24"),
    ],
)
def test_bad_tensors_are_named(tmp_path: Path, value: Any, reason: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(encode({"model.norm.weight": value}, bytes(24)))
    with pytest.raises(StartupError, match="invalid safetensors data") as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert "'model.norm.weight'" in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize(("begin", "fault"), [(20, "overlaps"), (28, "gap")])
def test_tensors_must_follow_each_other(tmp_path: Path, begin: int, fault: str) -> None:
    path = tmp_path / "model.safetensors"
    second = entry(shape=[1], data_offsets=[begin, begin + 4])
    path.write_bytes(encode({"first": entry(), "second": second}, bytes(32)))
    with pytest.raises(StartupError, match=f"'second'.*{fault}"):
        read_header(path)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot read safetensors file.*absent"):
        read_header(tmp_path / "absent.safetensors")


@settings(max_examples=150, deadline=None)
@given(position=st.integers(0, 400), value=st.integers(0, 255), cut=st.none() | st.integers(0, 400))
def test_no_damage_raises_anything_but_a_startup_error(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int, cut: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    write_arrays(path, {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)})
    content = bytearray(path.read_bytes())
    content[position % len(content)] = value
    path.write_bytes(bytes(content)[:cut])
    try:
        tensors = read_header(path)
    except StartupError as error:
        assert str(path) in str(error)
    else:
        assert sum(tensor.num_bytes for tensor in tensors.values()) == 40
