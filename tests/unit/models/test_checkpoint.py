"""Which files belong to a checkpoint, and what is refused before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_lite.models.checkpoint import Checkpoint, weight_files
from sglang_lite.types import StartupError
from tests.support.safetensors_files import encode, write_arrays

ONES = np.ones((2, 3), np.float32)


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(StartupError, match="no safetensors weights found under") as caught:
        Checkpoint.open(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_the_index_decides_which_files_count(tmp_path: Path) -> None:
    write_arrays(tmp_path / "one.safetensors", {"a": ONES, "unlisted": ONES})
    write_arrays(tmp_path / "two.safetensors", {"b": ONES})
    (tmp_path / "consolidated.safetensors").write_bytes(b"not a checkpoint of ours")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    checkpoint = Checkpoint.open(tmp_path)
    assert {name: entry.file.name for name, entry in checkpoint.tensors.items()} == {
        "a": "one.safetensors",
        "b": "two.safetensors",
    }
    assert weight_files(tmp_path) == [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]


def test_without_an_index_the_single_file_is_preferred(tmp_path: Path) -> None:
    write_arrays(tmp_path / "model.safetensors", {"a": ONES})
    write_arrays(tmp_path / "other.safetensors", {"b": ONES})
    assert set(Checkpoint.open(tmp_path).tensors) == {"a"}


def test_without_index_and_single_file_all_files_count(tmp_path: Path) -> None:
    write_arrays(tmp_path / "part-1.safetensors", {"a": ONES})
    write_arrays(tmp_path / "part-2.safetensors", {"b": ONES})
    assert set(Checkpoint.open(tmp_path).tensors) == {"a", "b"}
    write_arrays(tmp_path / "part-3.safetensors", {"a": ONES})
    with pytest.raises(StartupError, match=r"tensor a is in both .*part-1.*part-3"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, [], "text"])
def test_an_index_without_entries_is_refused(tmp_path: Path, weight_map: Any) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(
        StartupError, match=r"invalid safetensors index .*index\.json: 'weight_map' must be a non-empty"
    ):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("shard", [1, None, ["one.safetensors"], "../one.safetensors", "/etc/passwd", "", ".."])
def test_an_index_must_give_file_names(tmp_path: Path, shard: Any) -> None:
    write_arrays(tmp_path / "one.safetensors", {"a": ONES})
    write_index(tmp_path, {"a": shard})
    with pytest.raises(StartupError, match=r"invalid safetensors index .*for tensor 'a', not a file name"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "null"])
def test_an_index_must_be_a_json_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(StartupError, match=r"cannot parse safetensors index .*index\.json"):
        Checkpoint.open(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_arrays(tmp_path / "one.safetensors", {"a": ONES})
    write_index(tmp_path, {"a": "one.safetensors", "b": "model-00002-of-00002.safetensors"})
    with pytest.raises(StartupError, match=r"missing checkpoint shard .*model-00002-of-00002\.safetensors"):
        Checkpoint.open(tmp_path)


def test_a_tensor_its_shard_lacks_is_named(tmp_path: Path) -> None:
    write_arrays(tmp_path / "one.safetensors", {"a": ONES})
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(StartupError, match=r"missing checkpoint tensor b: .*one\.safetensors"):
        Checkpoint.open(tmp_path)


def test_required_tensors_are_checked_by_name_shape_and_type(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "packed": {"dtype": "I8", "shape": [4], "data_offsets": [24, 28]},
    }
    (tmp_path / "model.safetensors").write_bytes(encode(header, bytes(28)))
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.require({"a": (2, 3)})
    with pytest.raises(StartupError, match=r"missing checkpoint tensor model\.norm\.weight"):
        checkpoint.require({"a": (2, 3), "model.norm.weight": (3,)})
    with pytest.raises(StartupError, match=r"tensor a shape \[2, 3\] does not match expected \[3, 2\]"):
        checkpoint.require({"a": (3, 2)})
    with pytest.raises(StartupError, match="tensor packed has dtype I8"):
        checkpoint.require({"packed": (4,)})


def test_tensors_under_other_names_are_still_found_in_their_files(tmp_path: Path) -> None:
    write_arrays(tmp_path / "model.safetensors", {"inner.a": ONES, "b": ONES})
    renamed = Checkpoint.open(tmp_path).renamed(lambda name: name.removeprefix("inner."))
    renamed.require({"a": (2, 3), "b": (2, 3)})
    assert renamed.tensors["a"].name == "inner.a"


def test_two_spellings_of_one_tensor_are_refused(tmp_path: Path) -> None:
    write_arrays(tmp_path / "model.safetensors", {"inner.a": ONES, "a": ONES})
    with pytest.raises(StartupError, match=r"tensors (inner\.)?a and (inner\.)?a .* are spellings of one tensor, a;"):
        Checkpoint.open(tmp_path).renamed(lambda name: name.removeprefix("inner."))
