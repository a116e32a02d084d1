"""The tensors of a checkpoint directory, known from headers alone. Free of torch.

A damaged or mismatched checkpoint is found here, before any weight is read or memory reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_lite.models.config_files import read_json_object
from sglang_lite.models.safetensors_header import FLOATING_DTYPES, TensorEntry, read_header
from sglang_lite.types import StartupError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True, slots=True)
class TensorRequirement:
    """What a tensor must look like.

    Attributes:
        shapes: one of these; the first is the usual one.
        dtypes: one of these, in safetensors' names.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: frozenset[str] = FLOATING_DTYPES


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Tensors of a directory by name.

    Attributes:
        directory: where the files are.
        tensors: name -> where and what it is.
    """

    directory: Path
    tensors: Mapping[str, TensorEntry]

    @classmethod
    def open(cls, directory: Path | str) -> Checkpoint:
        """Read the headers of all safetensors files of a checkpoint.

        The index file decides which files belong to it; without one, ``model.safetensors``; without that, every
        ``*.safetensors`` file.

        Raises:
            StartupError: no weights, a bad index, a missing shard, or an invalid header or tensor.
        """
        directory = Path(directory)
        index = directory / INDEX_NAME
        if index.is_file():
            return cls(directory, _read_indexed(index))
        return cls(directory, _read_unindexed(_unindexed_files(directory)))

    def renamed(self, canonical_name: Callable[[str], str]) -> Checkpoint:
        """The same tensors under other names, of which several spellings may lead to one.

        Raises:
            StartupError: two tensors get one name.
        """
        tensors: dict[str, TensorEntry] = {}
        for name, entry in self.tensors.items():
            canonical = canonical_name(name)
            if canonical in tensors:
                raise StartupError(
                    f"tensors {tensors[canonical].name} and {name} ({entry.file}) are spellings of one tensor, "
                    f"{canonical}; the checkpoint must hold it once"
                )
            tensors[canonical] = entry
        return Checkpoint(self.directory, tensors)

    def require(self, requirements: Mapping[str, tuple[int, ...] | TensorRequirement]) -> None:
        """Check that every named tensor is there, with its shape and a type that it may have (floating-point unless
        the requirement says otherwise).

        Raises:
            StartupError: the first tensor that is not, by name.
        """
        for name, requirement in requirements.items():
            if not isinstance(requirement, TensorRequirement):
                requirement = TensorRequirement((requirement,))
            entry = self.tensors.get(name)
            if entry is None:
                raise StartupError(
                    f"missing checkpoint tensor {name} (not in any safetensors file under {self.directory})"
                )
            if entry.shape not in requirement.shapes:
                raise StartupError(
                    f"tensor {name} shape {list(entry.shape)} does not match expected "
                    f"{' or '.join(str(list(shape)) for shape in requirement.shapes)} ({entry.file}); "
                    f"config.json and the weights are of different models"
                )
            if entry.dtype not in requirement.dtypes:
                raise StartupError(
                    f"tensor {name} has dtype {entry.dtype} ({entry.file}); "
                    f"supported weight types: {', '.join(sorted(requirement.dtypes))}"
                )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that belong to a checkpoint; with an index some of them may not exist.

    Raises:
        StartupError: there are none, or the index is bad.
    """
    index = directory / INDEX_NAME
    if index.is_file():
        return [directory / shard for shard in sorted(set(_weight_map(index).values()))]
    return _unindexed_files(directory)


def _unindexed_files(directory: Path) -> list[Path]:
    single = directory / SINGLE_NAME
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not files:
        raise StartupError(
            f"no safetensors weights found under {directory}: expected {SINGLE_NAME} or {INDEX_NAME}; "
            f"other weight formats have to be converted first"
        )
    return files


def _read_indexed(index: Path) -> dict[str, TensorEntry]:
    weight_map = _weight_map(index)
    headers: dict[str, dict[str, TensorEntry]] = {}
    for shard in sorted(set(weight_map.values())):
        path = index.parent / shard
        if not path.is_file():
            raise StartupError(f"missing checkpoint shard {path}: {index.name} names it; download the model again")
        headers[shard] = read_header(path)
    tensors: dict[str, TensorEntry] = {}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise StartupError(
                f"missing checkpoint tensor {name}: {index} places it in {shard}, which does not hold it"
            )
        tensors[name] = headers[shard][name]
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """tensor name -> file name, as the index says."""
    weight_map = read_json_object(index, "safetensors index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"invalid safetensors index {index}: 'weight_map' must be a non-empty object")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".."):
            raise StartupError(
                f"invalid safetensors index {index}: 'weight_map' gives {shard!r} for tensor {name!r}, not a file name"
            )
    return weight_map


def _read_unindexed(files: list[Path]) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in tensors:
                raise StartupError(f"tensor {name} is in both {tensors[name].file} and {file}; add {INDEX_NAME}")
            tensors[name] = entry
    return tensors
