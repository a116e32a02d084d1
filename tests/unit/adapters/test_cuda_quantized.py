"""Quantizers and quantized products over the wheels' doubles against the host's, for both kernel lines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cpu.moe import CpuMoE
from sglang_lite.adapters.cpu.quantized import CpuQuantized, quantize_mxfp4
from sglang_lite.adapters.cuda.quantized import CudaQuantized
from sglang_lite.adapters.cuda.selection import Selection
from sglang_lite.adapters.cuda.wheels import load_wheels
from sglang_lite.adapters.dequantize import dequantize
from sglang_lite.adapters.dispatch import Target
from sglang_lite.adapters.moe import ActivationKind, ExpertActivation, Routing, Scoring
from sglang_lite.adapters.quantized import (
    AwqWeight,
    Fp8Weight,
    GptqWeight,
    Int8Weight,
    Nvfp4Weight,
    PackedIntWeight,
    QuantizedWeight,
)
from tests.support.kernel_doubles.families import Calls, installed_families

REFERENCE = CpuQuantized()
NEW, OLD = "sglang-kernel", "sgl-kernel"
FP8 = torch.float8_e4m3fn


@pytest.fixture(params=[NEW, OLD])
def line(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def calls(line: str) -> Iterator[Calls]:
    with installed_families(line) as made:
        yield made


def operations(
    line: str, sm: int = 90, dtype: torch.dtype = torch.bfloat16, *, has_flashinfer: bool = True
) -> CudaQuantized:
    return CudaQuantized(load_wheels(), Selection(Target(sm, line, has_flashinfer)), dtype)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def words(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int32)


def fp8_rows(num_outputs: int, num_inputs: int) -> Fp8Weight:
    return Fp8Weight(*REFERENCE.quantize_fp8_token(random(num_outputs, num_inputs, seed=1)))


def fp8_blocks(num_outputs: int, num_inputs: int, seed: int = 1) -> Fp8Weight:
    shape = (-(-num_outputs // 128), -(-num_inputs // 128))
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5
    return Fp8Weight(random(num_outputs, num_inputs, seed=seed).to(FP8), scale, (128, 128))


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.float(), expected.float(), rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


class TestQuantizers:
    def test_equal_the_host(self, line: str, calls: Calls) -> None:
        ops, x = operations(line), random(5, 256).bfloat16()
        for name in ("quantize_fp8_tensor", "quantize_fp8_token", "quantize_fp8_group", "quantize_int8_token"):
            quantized, scale = getattr(ops, name)(x)
            expected, expected_scale = getattr(REFERENCE, name)(x)
            torch.testing.assert_close(scale, expected_scale)
            assert quantized.dtype == expected.dtype
            # One step of rounding may differ where the scale does in its last bit.
            torch.testing.assert_close(quantized.float(), expected.float(), rtol=0.13, atol=1)
            assert (quantized.float() != expected.float()).float().mean() < 0.01

    def test_a_given_scale(self, line: str, calls: Calls) -> None:
        x, scale = random(3, 16).bfloat16() * 100, torch.tensor(0.25)
        quantized, used = operations(line).quantize_fp8_tensor(x, scale)
        assert torch.equal(quantized.float(), REFERENCE.quantize_fp8_tensor(x, scale)[0].float())
        assert used.tolist() == [0.25]

    def test_shapes_that_the_kernels_do_not_take(self, line: str, calls: Calls) -> None:
        ops = operations(line)
        with pytest.raises(OperationInputError, match="multiple of 4"):
            ops.quantize_fp8_token(random(3, 18).bfloat16())
        for width, group in ((256, 48), (96, 64)):
            with pytest.raises(OperationInputError, match="groups of 16, 32"):
                ops.quantize_fp8_group(random(3, width).bfloat16(), group)

    def test_no_rows(self, line: str, calls: Calls) -> None:
        ops, x = operations(line), torch.empty(0, 256).bfloat16()
        assert ops.quantize_fp8_token(x)[0].shape == (0, 256)
        assert ops.quantize_fp8_group(x)[1].shape == (0, 2)


class TestLinear:
    @pytest.mark.parametrize("biased", [False, True])
    @pytest.mark.parametrize("scale", ["row", "tensor", "static"])
    def test_fp8(self, line: str, calls: Calls, scale: str, biased: bool) -> None:
        weight = fp8_rows(24, 32)
        if scale != "row":
            input_scale = torch.tensor(0.01) if scale == "static" else None
            weight = Fp8Weight(weight.weight, torch.tensor(0.5), input_scale=input_scale)
        bias = random(24, seed=3).bfloat16() if biased else None
        x = random(2, 3, 32).bfloat16()
        linear = operations(line).pack_linear(weight, bias)
        close(linear(x), REFERENCE.pack_linear(weight, bias)(x))
        assert (linear.in_features, linear.out_features) == (32, 24)
        assert linear(x[:0]).shape == (0, 3, 24)
        assert "sgl_kernel.fp8_scaled_mm" in calls

    def test_int8(self, line: str, calls: Calls) -> None:
        weight = Int8Weight(*REFERENCE.quantize_int8_token(random(24, 32, seed=1)))
        bias, x = random(24, seed=3).bfloat16(), random(5, 32).bfloat16()
        close(operations(line).pack_linear(weight, bias)(x), REFERENCE.pack_linear(weight, bias)(x))

    @pytest.mark.parametrize(
        ("sm", "kernel"),
        [(90, "flashinfer.gemm.fp8_blockscale_gemm_sm90"), (100, "flashinfer.gemm.gemm_fp8_nt_groupwise")],
    )
    def test_fp8_blocks(self, line: str, calls: Calls, sm: int, kernel: str) -> None:
        weight, bias, x = fp8_blocks(256, 384), random(256, seed=3).bfloat16(), random(5, 384).bfloat16()
        close(operations(line, sm).pack_linear(weight, bias)(x), REFERENCE.pack_linear(weight, bias)(x))
        assert kernel in calls

    def test_fp8_blocks_of_the_older_line(self) -> None:
        weight, x = fp8_blocks(256, 384), random(5, 384).bfloat16()
        with installed_families(OLD) as calls:
            close(
                operations(OLD, has_flashinfer=False).pack_linear(weight, None)(x),
                REFERENCE.pack_linear(weight, None)(x),
            )
        assert "sgl_kernel.fp8_blockwise_scaled_mm" in calls

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_awq(self, dtype: torch.dtype) -> None:
        weight = AwqWeight(words(32, 3), words(2, 3, seed=2), (random(2, 24, seed=4).abs() / 8).half())
        bias, x = random(24, seed=3).to(dtype), random(5, 32).to(dtype)
        with installed_families(OLD):
            close(operations(OLD, 80, dtype).pack_linear(weight, bias)(x), REFERENCE.pack_linear(weight, bias)(x))

    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize("ordered", [False, True])
    def test_gptq(self, ordered: bool, bits: int) -> None:
        per_word = 32 // bits
        index = (torch.randperm(32, generator=torch.Generator().manual_seed(5)) // 16).int() if ordered else None
        weight = GptqWeight(
            words(32 // per_word, 16), words(2, 16 // per_word, seed=2), random(2, 16, seed=4).abs() / 8, index, bits
        )
        before, x = weight.qweight.clone(), random(5, 32).half()
        with installed_families(OLD):
            close(
                operations(OLD, 80, torch.float16).pack_linear(weight, None)(x), REFERENCE.pack_linear(weight, None)(x)
            )
        assert torch.equal(weight.qweight, before)


REFUSED: dict[str, tuple[QuantizedWeight, str, int, torch.dtype, str]] = {
    "fp8 on Ampere": (fp8_rows(24, 32), NEW, 80, torch.bfloat16, "not on SM 80"),
    "fp8 rows of 24 bytes": (fp8_rows(24, 24), NEW, 90, torch.bfloat16, "inputs in multiples of 16"),
    "fp8 blocks of 64": (Fp8Weight(fp8_rows(64, 64).weight, torch.ones(1, 1), (64, 64)), NEW, 90, torch.bfloat16, "64"),
    "fp8 blocks with a rest": (fp8_blocks(32, 128), NEW, 90, torch.bfloat16, "outputs of 64"),
    "fp8 blocks on Ada": (fp8_blocks(128, 128), NEW, 89, torch.bfloat16, "not on SM 89"),
    "int8 on Blackwell": (Int8Weight(torch.zeros(8, 16).char(), torch.ones(8)), NEW, 100, torch.bfloat16, "SM 100"),
    "awq on the new line": (
        AwqWeight(words(32, 3), words(2, 3), torch.ones(2, 24)),
        NEW,
        90,
        torch.bfloat16,
        "does not have it",
    ),
    "gptq in bfloat16": (GptqWeight(words(4, 8), words(2, 1), torch.ones(2, 8)), OLD, 90, torch.bfloat16, "float16"),
    "gptq v2": (
        GptqWeight(words(4, 8), words(2, 1), torch.ones(2, 8), zero_offset=0),
        OLD,
        90,
        torch.float16,
        "adds 1",
    ),
    "gptq uneven": (
        GptqWeight(words(4, 8), words(2, 1), torch.ones(2, 8), torch.zeros(32).int()),
        OLD,
        90,
        torch.float16,
        "equal size",
    ),
    "packed": (PackedIntWeight(words(8, 4), torch.ones(8, 1), 32), NEW, 90, torch.bfloat16, "this order"),
    "mxfp4": (quantize_mxfp4(random(8, 32)), NEW, 90, torch.bfloat16, "MXFP4"),
    "nvfp4": (
        Nvfp4Weight(torch.zeros(8, 16).byte(), torch.zeros(8, 2).to(FP8), torch.tensor(1.0)),
        NEW,
        100,
        torch.bfloat16,
        "NVFP4",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_kernel_serves_is_refused_with_the_reason(case: str) -> None:
    weight, line, sm, dtype, message = REFUSED[case]
    with installed_families(line) as calls:
        ops = operations(line, sm, dtype)
        reason = ops.refusal(weight)
        assert reason is not None and message in reason
        with pytest.raises(OperationInputError) as error:
            ops.pack_linear(weight, None)
        assert reason in str(error.value)
        assert not calls
        torch.testing.assert_close(ops.dequantize(weight, torch.float32), dequantize(weight))


class TestProducts:
    def test_equal_the_host(self, line: str, calls: Calls) -> None:
        ops, bias = operations(line), random(24, seed=3).bfloat16()
        x, x_scale = REFERENCE.quantize_fp8_token(random(5, 32))
        weight = fp8_rows(24, 32)
        arguments = (x, x_scale, weight.weight, weight.scale, torch.bfloat16, bias)
        close(ops.fp8_gemm(*arguments), REFERENCE.fp8_gemm(*arguments))
        x, x_scale = REFERENCE.quantize_int8_token(random(5, 32))
        values, scale = REFERENCE.quantize_int8_token(random(24, 32, seed=1))
        arguments = (x, x_scale, values, scale, torch.bfloat16, bias)
        close(ops.int8_gemm(*arguments), REFERENCE.int8_gemm(*arguments))

    @pytest.mark.parametrize(("sm", "has_flashinfer"), [(90, True), (100, True), (90, False)])
    def test_blocks(self, sm: int, has_flashinfer: bool) -> None:
        x, x_scale = REFERENCE.quantize_fp8_group(random(5, 256))
        weight = fp8_blocks(128, 256)
        arguments = (x, x_scale, weight.weight, weight.scale, torch.bfloat16)
        with installed_families(OLD):
            ops = operations(OLD, sm, has_flashinfer=has_flashinfer)
            close(ops.fp8_block_gemm(*arguments), REFERENCE.fp8_block_gemm(*arguments))


class TestExperts:
    def blocks(self, num_experts: int, num_outputs: int, num_inputs: int, seed: int) -> Fp8Weight:
        parts = [fp8_blocks(num_outputs, num_inputs, seed + expert) for expert in range(num_experts)]
        values, scales = torch.stack([p.weight for p in parts]), torch.stack([p.scale for p in parts])
        return Fp8Weight(values, scales / 16, (128, 128))

    def test_fp8_blocks(self, line: str, calls: Calls) -> None:
        w13, w2 = self.blocks(4, 256, 128, seed=1), self.blocks(4, 128, 128, seed=9)
        x = random(5, 128, seed=5).bfloat16()
        ids, weights = CpuMoE().route(random(5, 4, seed=6), Routing(Scoring.SOFTMAX, 2))
        out = operations(line).pack_experts(w13, w2)(x, ids, weights)
        expected = CpuMoE().fused_experts(x.float(), ids, weights, dequantize(w13), dequantize(w2))
        # Activations are rounded to 8 bits twice on the way.
        torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.05 * float(expected.abs().max()))
        assert len(calls["sgl_kernel.fp8_blockwise_scaled_grouped_mm"]) == 2

    def test_parts_of_the_experts_add_up(self, line: str, calls: Calls) -> None:
        w13, w2 = self.blocks(4, 256, 128, seed=1), self.blocks(4, 128, 128, seed=9)
        x = random(5, 128, seed=5).bfloat16()
        ids, weights = CpuMoE().route(random(5, 4, seed=6), Routing(Scoring.SOFTMAX, 2))
        ids[2, 1] = -1
        ops = operations(line)
        whole = ops.pack_experts(w13, w2)(x, ids, weights).float()
        parts = [
            ops.pack_experts(
                Fp8Weight(w13.weight[a : a + 2], w13.scale[a : a + 2], (128, 128)),
                Fp8Weight(w2.weight[a : a + 2], w2.scale[a : a + 2], (128, 128)),
                first_expert=a,
                total_experts=4,
            )(x, ids, weights).float()
            for a in (0, 2)
        ]
        torch.testing.assert_close(parts[0] + parts[1], whole, rtol=2e-2, atol=2e-2 * float(whole.abs().max()))

    def test_other_formats_dequantize_the_experts_hit(self, line: str, calls: Calls) -> None:
        w13, w2 = quantize_mxfp4(random(4, 64, 32, seed=1)), quantize_mxfp4(random(4, 32, 32, seed=2))
        activation = ExpertActivation(ActivationKind.CLAMPED_SWIGLU, interleaved=True)
        b13, b2 = random(4, 64, seed=3).bfloat16(), random(4, 32, seed=4).bfloat16()
        x = random(5, 32).bfloat16()
        ids, weights = CpuMoE().route(random(5, 4, seed=6), Routing(Scoring.TOP_K_SOFTMAX, 2))
        out = operations(line).pack_experts(w13, w2, activation=activation, w13_bias=b13, w2_bias=b2)(x, ids, weights)
        expected = CpuMoE().fused_experts(
            x,
            ids,
            weights,
            dequantize(w13, torch.bfloat16),
            dequantize(w2, torch.bfloat16),
            activation=activation,
            w13_bias=b13,
            w2_bias=b2,
        )
        assert torch.equal(out, expected)

    def test_one_scale_for_each_expert(self, line: str, calls: Calls) -> None:
        w13 = Fp8Weight(random(4, 64, 32, seed=1).to(FP8), torch.rand(4) + 0.1, input_scale=torch.ones(4))
        w2 = Fp8Weight(random(4, 32, 32, seed=2).to(FP8), torch.rand(4) + 0.1)
        x = random(5, 32).bfloat16()
        ids, weights = CpuMoE().route(random(5, 4, seed=6), Routing(Scoring.SOFTMAX, 2))
        out = operations(line).pack_experts(w13, w2)(x, ids, weights)
        plain = [dequantize(weight, torch.bfloat16) for weight in (w13, w2)]
        assert torch.equal(out, CpuMoE().fused_experts(x, ids, weights, *plain))
