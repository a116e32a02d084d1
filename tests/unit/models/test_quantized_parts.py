"""Parts and joins of quantized weights stand for the parts and joins of what the weights stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_lite.adapters.dequantize import dequantize
from sglang_lite.adapters.quantized import Mxfp4Weight, QuantizedWeight
from sglang_lite.models.checkpoint import Checkpoint
from sglang_lite.models.config_files import ConfigReader
from sglang_lite.models.quantization import read_quantization
from sglang_lite.models.quantized_parts import columns_of, join_rows, map_tensors, rows_of, shard_of
from sglang_lite.models.quantized_storage import find_layout
from sglang_lite.models.stored_weights import read_stored
from sglang_lite.models.weight_reader import Shard
from tests.support.quantized_checkpoints import FORMATS, mxfp4

NAME = "layer.weight"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[QuantizedWeight]]:
    """For every format two matrices [256, 256] of different values."""
    made: dict[str, list[QuantizedWeight]] = {}
    for name, storage in FORMATS.items():
        quantization = read_quantization(ConfigReader({storage.key: storage.config}, "config.json"))
        made[name] = []
        for seed in range(2):
            values = np.random.default_rng(seed).standard_normal((256, 256)).astype(np.float32)
            packed = storage.pack(values)
            tensors = {f"layer.{part}": tensor.contiguous() for part, tensor in packed.tensors.items()}
            directory = tmp_path_factory.mktemp(name)
            save_file(tensors, directory / "model.safetensors")
            layout = find_layout({NAME: (256, 256)}, Checkpoint.open(directory), quantization)
            made[name].append(read_stored(layout.quantized[NAME], tensors.__getitem__))
    blocks = [mxfp4(np.random.default_rng(seed).standard_normal((256, 256)).astype(np.float32)) for seed in range(2)]
    made["mxfp4"] = [Mxfp4Weight(stored, scales) for stored, scales, _ in blocks]
    return made


def plain(weight: QuantizedWeight | None) -> Tensor:
    assert weight is not None
    return dequantize(weight)


each_format = pytest.mark.parametrize("name", [*FORMATS, "mxfp4"])


@each_format
@pytest.mark.parametrize(("start", "stop"), [(0, 128), (128, 256), (0, 256)])
def test_rows(weights: dict[str, list[QuantizedWeight]], name: str, start: int, stop: int) -> None:
    weight = weights[name][0]
    part = rows_of(weight, start, stop)
    if name == "fp8_blocks_uneven" and (start, stop) != (0, 256):
        assert part is None
        return
    assert torch.equal(plain(part), plain(weight)[start:stop])


@each_format
@pytest.mark.parametrize(("start", "stop"), [(0, 128), (128, 256), (0, 256)])
def test_columns(weights: dict[str, list[QuantizedWeight]], name: str, start: int, stop: int) -> None:
    weight = weights[name][0]
    part = columns_of(weight, start, stop)
    if name == "fp8_blocks_uneven" and (start, stop) != (0, 256):
        assert part is None
        return
    assert torch.equal(plain(part), plain(weight)[:, start:stop])


def test_blocks_that_end_at_the_edge(weights: dict[str, list[QuantizedWeight]]) -> None:
    weight = weights["fp8_blocks_uneven"][0]
    assert torch.equal(plain(rows_of(weight, 96, 256)), plain(weight)[96:])
    assert torch.equal(plain(columns_of(weight, 120, 256)), plain(weight)[:, 120:])


@pytest.mark.parametrize(
    ("name", "cut_rows", "cut_columns"),
    [
        ("awq", False, False),
        ("gptq", False, False),
        ("compressed_int4_32", True, False),
        ("compressed_int4_zeros", False, False),
        ("mxfp4", True, False),
        ("compressed_int8", True, True),
        ("compressed_fp8_channel", True, True),
    ],
)
def test_cuts_inside_words_and_groups(
    weights: dict[str, list[QuantizedWeight]], name: str, cut_rows: bool, cut_columns: bool
) -> None:
    weight = weights[name][0]
    assert (rows_of(weight, 0, 4) is not None) is cut_rows
    assert (columns_of(weight, 0, 4) is not None) is cut_columns


@each_format
def test_joins(weights: dict[str, list[QuantizedWeight]], name: str) -> None:
    first, second = weights[name]
    joined = join_rows([first, second])
    if name == "fp8_blocks_uneven":
        assert joined is None
        return
    assert torch.equal(plain(joined), torch.cat([plain(first), plain(second)]))


def test_a_join_of_one_is_itself(weights: dict[str, list[QuantizedWeight]]) -> None:
    assert join_rows(weights["awq"][:1]) is weights["awq"][0]


def test_formats_do_not_join(weights: dict[str, list[QuantizedWeight]]) -> None:
    assert join_rows([weights["awq"][0], weights["gptq"][0]]) is None


def test_orders_of_inputs_do_not_join(weights: dict[str, list[QuantizedWeight]]) -> None:
    first = weights["gptq_reordered"][0]
    other = map_tensors(first, lambda tensor: tensor.flip(0) if tensor.dim() == 1 else tensor)
    assert join_rows([first, other]) is None


def test_shards(weights: dict[str, list[QuantizedWeight]]) -> None:
    weight = weights["awq"][0]
    rows = [plain(shard_of(weight, Shard(0, rank, 4), (256, 256))) for rank in range(4)]
    columns = [plain(shard_of(weight, Shard(1, rank, 4), (256, 256))) for rank in range(4)]
    assert torch.equal(torch.cat(rows), plain(weight))
    assert torch.equal(torch.cat(columns, 1), plain(weight))
    assert shard_of(weight, Shard(0, 0, 3), (256, 256)) is None
