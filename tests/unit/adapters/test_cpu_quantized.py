"""Quantizers and quantized products on the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cpu.quantized import CpuQuantized, quantize_mxfp4, quantize_nvfp4
from sglang_lite.adapters.dequantize import dequantize
from sglang_lite.adapters.moe import Routing, Scoring
from sglang_lite.adapters.quantized import AwqWeight, Fp8Weight, Int8Weight, Mxfp4Weight

ops = CpuQuantized()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class TestQuantizers:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_fp8_a_row_uses_the_whole_range(self, dtype: torch.dtype) -> None:
        x = random(5, 64).to(dtype) * torch.tensor([[1e-3], [1], [10], [0.5], [0]], dtype=dtype)
        quantized, scale = ops.quantize_fp8_token(x)
        assert quantized.dtype == torch.float8_e4m3fn and scale.shape == (5, 1) and scale.dtype == torch.float32
        assert quantized[:4].float().abs().amax(-1).tolist() == [448.0] * 4
        error = (quantized.float() * scale - x.float()).abs()
        # Three bits behind the leading one: half a step is 1/16 of the value, or of the smallest normal one.
        assert bool((error <= x.float().abs() / 16 + scale * 2**-10).all())
        assert not quantized[4].float().any() and scale[4].item() > 0

    def test_fp8_of_a_tensor(self) -> None:
        x = random(5, 64)
        quantized, scale = ops.quantize_fp8_tensor(x)
        assert scale.tolist() == pytest.approx([float(x.abs().max()) / 448])
        assert float(quantized.float().abs().max()) == 448.0

    def test_fp8_with_a_given_scale_saturates(self) -> None:
        quantized, scale = ops.quantize_fp8_tensor(torch.tensor([[1000.0, -1000.0, 0.5]]), torch.tensor(1.0))
        assert quantized.float().tolist() == [[448.0, -448.0, 0.5]] and scale.tolist() == [1.0]

    def test_fp8_of_a_group_knows_nothing_of_its_neighbours(self) -> None:
        x = random(3, 64)
        quantized, scale = ops.quantize_fp8_group(x, 16)
        assert scale.shape == (3, 4)
        for group in range(4):
            alone, alone_scale = ops.quantize_fp8_token(x[:, group * 16 : group * 16 + 16])
            assert torch.equal(quantized[:, group * 16 : group * 16 + 16].float(), alone.float())
            assert torch.equal(scale[:, group : group + 1], alone_scale)
        with pytest.raises(OperationInputError, match="do not divide"):
            ops.quantize_fp8_group(x, 48)

    def test_int8_rounds_half_to_even(self) -> None:
        quantized, scale = ops.quantize_int8_token(torch.tensor([[127.0, -127.0, 2.5, 3.5, -2.5, 0.4]]))
        assert quantized.tolist() == [[127, -127, 2, 4, -2, 0]] and scale.tolist() == [[1.0]]

    def test_mxfp4_keeps_what_it_can_hold(self) -> None:
        blocks = torch.randint(0, 256, (4, 3, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        blocks[..., 0] = 0x77  # the largest value is there, so the exponent of the block is the one that was stored
        stored = Mxfp4Weight(blocks, torch.tensor([[100, 127, 140]], dtype=torch.uint8).repeat(4, 1))
        plain = dequantize(stored)
        again = quantize_mxfp4(plain)
        assert torch.equal(dequantize(again), plain)
        assert torch.equal(again.scales, stored.scales)

    def test_mxfp4_rounds_to_the_nearest_even(self) -> None:
        x = torch.zeros(1, 32)
        x[0, :10] = torch.tensor([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -2.5, 0.26])
        expected = [4.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -2.0, 0.5]
        assert dequantize(quantize_mxfp4(x))[0, :10].tolist() == expected

    def test_mxfp4_of_zeros(self) -> None:
        assert not dequantize(quantize_mxfp4(torch.zeros(2, 64))).any()

    def test_nvfp4_keeps_what_it_can_hold(self) -> None:
        stored = quantize_nvfp4(random(4, 64))
        plain = dequantize(stored)
        again = quantize_nvfp4(plain)
        torch.testing.assert_close(dequantize(again), plain, rtol=1e-5, atol=0)
        assert float(stored.scale.float().max()) == 448.0

    def test_nvfp4_rounds_to_the_nearest(self) -> None:
        x = random(4, 64)
        x[1, 16:32] = 0
        x[2, :16] *= 1e-9  # beside the rest, nothing
        stored = quantize_nvfp4(x)
        step = (stored.scale.float() * stored.global_scale).repeat_interleave(16, -1)
        # Neighbours are at most 2 apart, the last ones; a scale rounded down to nearly nothing clips.
        assert bool(((dequantize(stored) - x).abs() <= 1.07 * step + 1e-8).all())
        assert not dequantize(stored)[1, 16:32].any() and not dequantize(stored)[2, :16].any()
        with pytest.raises(OperationInputError, match="blocks of 16"):
            quantize_nvfp4(random(2, 24))


class TestProducts:
    def test_fp8(self) -> None:
        x, x_scale = ops.quantize_fp8_token(random(5, 32))
        weight, weight_scale = ops.quantize_fp8_token(random(7, 32, seed=1))
        bias = random(7, seed=2)
        out = ops.fp8_gemm(x, x_scale, weight, weight_scale, torch.float32, bias)
        expected = (x.float() * x_scale) @ (weight.float() * weight_scale).T + bias
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        assert ops.fp8_gemm(x, x_scale, weight, weight_scale, torch.bfloat16).dtype == torch.bfloat16

    def test_fp8_in_blocks(self) -> None:
        x, x_scale = ops.quantize_fp8_group(random(5, 64), 16)
        weight, weight_scale = random(24, 64, seed=1).to(torch.float8_e4m3fn), torch.rand(2, 4) + 0.1
        out = ops.fp8_block_gemm(x, x_scale, weight, weight_scale, torch.float32, (16, 16))
        plain = x.float().view(5, 4, 16) * x_scale[..., None]
        by_row = weight_scale.repeat_interleave(16, 0)[:24]
        expected = sum(plain[:, g] @ (weight.float()[:, g * 16 : g * 16 + 16] * by_row[:, g, None]).T for g in range(4))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)

    def test_int8_sums_are_exact(self) -> None:
        x = torch.full((2, 70001), 127, dtype=torch.int8)
        x[1, 1::2] = -127
        x[1, 0] = 1
        one = torch.ones(1)
        out = ops.int8_gemm(x, one, x[:1], one, torch.float32)
        # Float32 sums of the second row would lose the single 1 * 127 beside partial sums of 2^29.
        assert out.tolist() == [[float(torch.tensor(127.0 * 127 * 70001))], [127.0]]

    @pytest.mark.parametrize(
        ("x_scale", "message"), [(torch.ones(3), "x_scale"), (torch.ones(2, 1).double(), "x_scale")]
    )
    def test_scales_that_do_not_fit_are_named(self, x_scale: Tensor, message: str) -> None:
        x = torch.zeros(2, 16, dtype=torch.int8)
        with pytest.raises(OperationInputError, match=message):
            ops.int8_gemm(x, x_scale, x, torch.ones(2, 1), torch.float32)
        with pytest.raises(OperationInputError, match="float8"):
            ops.fp8_gemm(x, torch.ones(2, 1), x, torch.ones(2, 1), torch.float32)


class TestLinear:
    def test_activations_are_rounded_as_a_device_rounds_them(self) -> None:
        x, bias = random(2, 3, 32), random(8, seed=3)
        weight, scale = ops.quantize_fp8_token(random(8, 32, seed=1))
        linear = ops.pack_linear(Fp8Weight(weight, scale), bias)
        expected = ops.fp8_gemm(*ops.quantize_fp8_token(x.view(6, 32)), weight, scale, torch.float32, bias)
        torch.testing.assert_close(linear(x), expected.view(2, 3, 8))
        assert (linear.in_features, linear.out_features) == (32, 8)
        static = ops.pack_linear(Fp8Weight(weight, scale, input_scale=torch.tensor(0.25)), None)
        rounded = (x / 0.25).to(torch.float8_e4m3fn).float() * 0.25
        torch.testing.assert_close(static(x), rounded @ (weight.float() * scale).T)

    def test_blocks_and_int8(self) -> None:
        x = random(3, 32)
        block = Fp8Weight(random(8, 32, seed=1).to(torch.float8_e4m3fn), torch.rand(1, 2) + 0.1, (16, 16))
        expected = ops.fp8_block_gemm(
            *ops.quantize_fp8_group(x, 16), block.weight, block.scale, torch.float32, (16, 16)
        )
        torch.testing.assert_close(ops.pack_linear(block, None)(x), expected)
        weight, scale = ops.quantize_int8_token(random(8, 32, seed=1))
        expected = ops.int8_gemm(*ops.quantize_int8_token(x), weight, scale, torch.float32)
        torch.testing.assert_close(ops.pack_linear(Int8Weight(weight, scale), None)(x), expected)

    def test_four_bits_leave_activations_alone(self) -> None:
        stored = AwqWeight(*(torch.randint(-(2**31), 2**31, s).int() for s in [(16, 1), (2, 1)]), torch.rand(2, 8))
        x = random(3, 16)
        torch.testing.assert_close(ops.pack_linear(stored, None)(x), x @ dequantize(stored).T)
        assert ops.refusal(stored) is not None

    def test_experts(self) -> None:
        w13, w2 = quantize_mxfp4(random(4, 64, 32, seed=1)), quantize_mxfp4(random(4, 32, 32, seed=2))
        x = random(5, 32)
        from sglang_lite.adapters.cpu.moe import CpuMoE

        ids, weights = CpuMoE().route(random(5, 4, seed=3), Routing(Scoring.SOFTMAX, 2))
        out = ops.pack_experts(w13, w2)(x, ids, weights)
        torch.testing.assert_close(out, CpuMoE().fused_experts(x, ids, weights, dequantize(w13), dequantize(w2)))
