"""Every stored format against a reader that takes one value at a time out of the bytes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.dequantize import dequantize
from sglang_lite.adapters.quantized import (
    AwqWeight,
    Fp8Weight,
    GptqWeight,
    Int8Weight,
    Mxfp4Weight,
    Nvfp4Weight,
    PackedIntWeight,
    QuantizedWeight,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def words(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=generator(seed)).to(torch.int32)


def scales(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(shape, generator=generator(seed)) + 0.1


def bits_of(word: int, index: int, bits: int = 4) -> int:
    return (int(word) & 0xFFFFFFFF) >> (bits * index) & ((1 << bits) - 1)


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    value = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def e2m1(nibble: int) -> float:
    sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
    value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -value if sign else value


def fp8_bytes(*shape: int) -> Tensor:
    """Every byte but the two that are not numbers."""
    values = torch.randint(0, 254, shape, generator=generator(), dtype=torch.uint8)
    return torch.where(values == 127, 0, values)


def built(num_rows: int, num_columns: int, value: object) -> Tensor:
    return torch.tensor([[value(n, k) for k in range(num_columns)] for n in range(num_rows)])  # type: ignore[operator]


class TestFp8:
    def test_all_bytes(self) -> None:
        stored = torch.arange(256, dtype=torch.uint8).view(1, 256)
        plain = dequantize(Fp8Weight(stored.view(torch.float8_e4m3fn), torch.tensor(2.0)))
        expected = torch.tensor([[2 * e4m3(byte) for byte in range(256)]])
        assert torch.equal(plain.nan_to_num(7777.0), expected.nan_to_num(7777.0))

    def test_blocks_at_the_edges_are_smaller(self) -> None:
        stored, scale = fp8_bytes(200, 150), scales(2, 2)
        plain = dequantize(Fp8Weight(stored.view(torch.float8_e4m3fn), scale, (128, 128)))
        expected = built(200, 150, lambda n, k: e4m3(int(stored[n, k])) * float(scale[n // 128, k // 128]))
        torch.testing.assert_close(plain, expected.float())

    @pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
    def test_one_scale(self, shape: tuple[int, ...]) -> None:
        stored = fp8_bytes(4, 6).view(torch.float8_e4m3fn)
        torch.testing.assert_close(dequantize(Fp8Weight(stored, torch.full(shape, 3.0))), stored.float() * 3)

    @pytest.mark.parametrize("shape", [(4,), (4, 1)])
    def test_one_scale_an_output(self, shape: tuple[int, ...]) -> None:
        stored, scale = fp8_bytes(4, 6).view(torch.float8_e4m3fn), scales(4)
        plain = dequantize(Fp8Weight(stored, scale.view(shape)))
        torch.testing.assert_close(plain, stored.float() * scale[:, None])

    def test_experts_have_their_own_scales(self) -> None:
        stored, scale = fp8_bytes(3, 4, 6).view(torch.float8_e4m3fn), scales(3)
        torch.testing.assert_close(dequantize(Fp8Weight(stored, scale)), stored.float() * scale[:, None, None])
        by_row = scales(3, 4, 1)
        torch.testing.assert_close(dequantize(Fp8Weight(stored, by_row)), stored.float() * by_row)

    def test_scales_that_do_not_fit_are_refused(self) -> None:
        stored = fp8_bytes(4, 6).view(torch.float8_e4m3fn)
        with pytest.raises(OperationInputError, match="neither one for the tensor"):
            dequantize(Fp8Weight(stored, scales(6)))
        with pytest.raises(OperationInputError, match=r"need scales \[2, 3\]"):
            dequantize(Fp8Weight(stored, scales(3, 2), (2, 2)))


def test_int8() -> None:
    stored, scale = torch.arange(-127, 127, dtype=torch.int8).view(2, 127), scales(2, 1)
    torch.testing.assert_close(dequantize(Int8Weight(stored, scale)), stored.float() * scale)


def test_awq() -> None:
    num_rows, num_columns, group = 16, 12, 4
    qweight, qzeros, scale = words(12, 2), words(3, 2, seed=5), scales(3, 16)
    place = {output: nibble for nibble, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7))}

    def value(n: int, k: int) -> float:
        quantized = bits_of(qweight[k, n // 8], place[n % 8])
        zero = bits_of(qzeros[k // group, n // 8], place[n % 8])
        return (quantized - zero) * float(scale[k // group, n])

    torch.testing.assert_close(dequantize(AwqWeight(qweight, qzeros, scale)), built(num_rows, num_columns, value))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zero_offset", [0, 1])
@pytest.mark.parametrize("ordered", [False, True])
def test_gptq(ordered: bool, zero_offset: int, bits: int) -> None:
    num_rows, num_columns, group, per_word = 16, 32, 8, 32 // bits
    qweight, qzeros, scale = words(32 // per_word, 16), words(4, 16 // per_word, seed=5), scales(4, 16)
    index = torch.randperm(32, generator=generator(9)) // group if ordered else torch.arange(32) // group

    def value(n: int, k: int) -> float:
        quantized = bits_of(qweight[k // per_word, n], k % per_word, bits)
        zero = bits_of(qzeros[index[k], n // per_word], n % per_word, bits) + zero_offset
        return (quantized - zero) * float(scale[index[k], n])

    stored = GptqWeight(qweight, qzeros, scale, index.int() if ordered else None, bits, zero_offset)
    torch.testing.assert_close(dequantize(stored), built(num_rows, num_columns, value))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("with_zeros", [False, True])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_packed_int(num_groups: int, with_zeros: bool, bits: int) -> None:
    num_rows, num_columns, per_word, offset = 10, 30, 32 // bits, 1 << (bits - 1)
    group = num_columns // num_groups
    packed, scale = words(10, -(-30 // per_word)), scales(10, num_groups)
    zeros = words(-(-10 // per_word), num_groups, seed=4) if with_zeros else None

    def value(n: int, k: int) -> float:
        quantized = bits_of(packed[n, k // per_word], k % per_word, bits) - offset
        zero = 0 if zeros is None else bits_of(zeros[n // per_word, k // group], n % per_word, bits) - offset
        return (quantized - zero) * float(scale[n, k // group])

    stored = PackedIntWeight(packed, scale, num_columns, zeros, bits=bits)
    torch.testing.assert_close(dequantize(stored), built(num_rows, num_columns, value))


def test_mxfp4() -> None:
    blocks = torch.randint(0, 256, (3, 2, 16), generator=generator(), dtype=torch.uint8)
    exponents = torch.tensor([[127, 120], [130, 1], [127, 200]], dtype=torch.uint8)

    def value(n: int, k: int) -> float:
        byte = int(blocks[n, k // 32, k % 32 // 2])
        return e2m1(byte >> 4 if k % 2 else byte & 15) * 2.0 ** (int(exponents[n, k // 32]) - 127)

    assert torch.equal(dequantize(Mxfp4Weight(blocks, exponents)), built(3, 64, value))


def test_nvfp4() -> None:
    packed = torch.randint(0, 256, (3, 16), generator=generator(), dtype=torch.uint8)
    block_scales = fp8_bytes(3, 2) % 0x7E

    def value(n: int, k: int) -> float:
        byte = int(packed[n, k // 2])
        return e2m1(byte >> 4 if k % 2 else byte & 15) * e4m3(int(block_scales[n, k // 16])) * 0.25

    stored = Nvfp4Weight(packed, block_scales.view(torch.float8_e4m3fn), torch.tensor(0.25))
    torch.testing.assert_close(dequantize(stored), built(3, 32, value))


@pytest.mark.parametrize("kind", ["awq", "gptq", "packed", "mxfp4", "nvfp4"])
def test_a_leading_dimension_of_experts(kind: str) -> None:
    def one(seed: int) -> tuple[Tensor, ...]:
        match kind:
            case "awq":
                return words(8, 2, seed=seed), words(2, 2, seed=seed + 9), scales(2, 16, seed=seed)
            case "gptq":
                index = torch.randint(0, 2, (16,), generator=generator(seed)).int()
                return words(2, 8, seed=seed), words(2, 1, seed=seed + 9), scales(2, 8, seed=seed), index
            case "packed":
                return words(4, 2, seed=seed), scales(4, 2, seed=seed)
            case "mxfp4":
                raw = torch.randint(0, 256, (4, 2, 17), generator=generator(seed), dtype=torch.uint8)
                return raw[..., :16], raw[..., 16]
        raw = torch.randint(0, 0x7E, (4, 18), generator=generator(seed), dtype=torch.uint8)
        return raw[:, :16], raw[:, 16:].contiguous().view(torch.float8_e4m3fn), torch.tensor(seed + 1.0)

    def weight(parts: tuple[Tensor, ...]) -> QuantizedWeight:
        match kind:
            case "awq":
                return AwqWeight(*parts)
            case "gptq":
                return GptqWeight(*parts)
            case "packed":
                return PackedIntWeight(parts[0], parts[1], 16)
            case "mxfp4":
                return Mxfp4Weight(*parts)
        return Nvfp4Weight(*parts)

    experts = [one(seed) for seed in range(3)]
    together = dequantize(weight(tuple(torch.stack(part) for part in zip(*experts, strict=True))))
    for expert, parts in enumerate(experts):
        torch.testing.assert_close(together[expert], dequantize(weight(parts)))


def test_the_wanted_type() -> None:
    stored = Mxfp4Weight(torch.zeros(1, 1, 16, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8))
    assert dequantize(stored, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (AwqWeight(words(12, 2), words(3, 2), scales(3, 8)), "do not fit zeros"),
        (AwqWeight(words(13, 2), words(3, 2), scales(3, 16)), "3 equal groups"),
        (GptqWeight(words(2, 8), words(2, 1), scales(2, 8), torch.full((16,), 2).int()), "one of 2 groups"),
        (GptqWeight(words(2, 8), words(2, 1), scales(2, 8), torch.zeros(15).int()), "each of 16 inputs"),
        (Mxfp4Weight(torch.zeros(2, 2, 8, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)), "MXFP4"),
        (Nvfp4Weight(torch.zeros(2, 8, dtype=torch.uint8), scales(2, 2), torch.tensor(1.0)), "NVFP4"),
    ],
)
def test_parts_that_do_not_fit_are_refused(weight: QuantizedWeight, message: str) -> None:
    with pytest.raises(OperationInputError, match=message):
        dequantize(weight)
