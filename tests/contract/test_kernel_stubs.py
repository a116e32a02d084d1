"""The stand-ins of the kernel wheels: exactly the recorded names, signatures and schemas."""

from __future__ import annotations

import importlib
import inspect
import sys

import pytest
import torch
from torch import Tensor

from tests.support.kernel_records import ContractError, RecordedDefault, load_record
from tests.support.kernel_stubs import KernelNotDoubled, installed_stubs, registered_operators

DECODE = "flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper"


def test_records_have_the_recorded_extent() -> None:
    extent = {
        name: (record.version, len(record.functions), len(record.classes), len(record.schemas))
        for name in ("sglang-kernel", "sgl-kernel", "flashinfer-python")
        for record in [load_record(name)]
    }
    assert extent == {
        "sglang-kernel": ("0.4.10", 116, 0, 88),
        "sgl-kernel": ("0.3.21", 125, 0, 113),
        "flashinfer-python": ("0.7.2", 277, 16, 0),
    }


def test_signatures_carry_kinds_and_defaults() -> None:
    parsed = load_record("sgl-kernel").signature("sgl_kernel.merge_state_v2")
    assert list(parsed.parameters) == ["v_a", "s_a", "v_b", "s_b", "v_merged", "s_merged"]
    assert parsed.parameters["v_merged"].default is None
    assert parsed.parameters["s_b"].default is inspect.Parameter.empty
    recorded = load_record("flashinfer-python").signature("flashinfer.top_p_sampling_from_probs")
    assert recorded.parameters["deterministic"].default is True
    assert RecordedDefault("torch.bfloat16") == RecordedDefault("torch.bfloat16")


def test_calls_are_bound_as_the_wheel_binds_them() -> None:
    record = load_record("flashinfer-python")
    bound = record.bind("flashinfer.rmsnorm", 1, weight=2, eps=1e-5, enable_pdl=False)
    assert bound.arguments == {"input": 1, "weight": 2, "eps": 1e-5, "enable_pdl": False}
    for arguments in ({}, {"input": 1, "weight": 2, "epsilon": 1e-5}):
        with pytest.raises(ContractError, match="rmsnorm"):
            record.bind("flashinfer.rmsnorm", **arguments)
    with pytest.raises(ContractError, match=r"has no flashinfer\.rms_norm"):
        record.bind("flashinfer.rms_norm")


def test_keywords_behind_a_catch_all_are_checked() -> None:
    record = load_record("flashinfer-python")
    required = (1, 2, 3, 4, 5, 6, 7)
    for path in (f"{DECODE}.plan", "flashinfer.BatchDecodeWithPagedKVCacheWrapper.plan"):
        record.bind(path, *required, q_data_type=torch.bfloat16, window_left=-1)
        with pytest.raises(ContractError, match="unknown keywords q_dtype"):
            record.bind(path, *required, q_dtype=torch.bfloat16)
        with pytest.raises(ContractError, match="by keyword"):
            record.bind(path, *required, "NONE")


def test_stub_modules_are_imported_and_removed() -> None:
    before = sys.modules.get("flashinfer")

    def rmsnorm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
        return input * weight + eps

    with installed_stubs(doubles={"flashinfer.rmsnorm": rmsnorm}) as modules:
        norm = importlib.import_module("flashinfer.norm")
        assert norm is modules["flashinfer.norm"]
        assert norm.rmsnorm is importlib.import_module("flashinfer").rmsnorm
        assert str(inspect.signature(norm.rmsnorm)) == str(
            load_record("flashinfer-python").signature("flashinfer.rmsnorm")
        )
        assert norm.rmsnorm(torch.ones(2), torch.full((2,), 3.0), eps=0.5).tolist() == [3.5, 3.5]
        with pytest.raises(ContractError, match="missing a required argument: 'weight'"):
            norm.rmsnorm(torch.ones(2))
        with pytest.raises(KernelNotDoubled, match="gemma_rmsnorm"):
            norm.gemma_rmsnorm(torch.ones(2), torch.ones(2))
        assert callable(importlib.import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache)
    assert sys.modules.get("flashinfer") is before


def test_classes_forward_to_their_double() -> None:
    class Wrapper:
        def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
            self.layout = kv_layout
            self.is_cuda_graph_enabled = False
            self.planned: dict[str, object] = {}

        def plan(self, **arguments: object) -> None:
            self.planned = arguments

    with installed_stubs(doubles={DECODE: lambda **arguments: Wrapper(**arguments)}) as modules:
        wrapper = modules["flashinfer"].BatchDecodeWithPagedKVCacheWrapper(torch.empty(8), "HND")
        assert wrapper.double.layout == "HND"
        assert wrapper.is_cuda_graph_enabled is False
        with pytest.raises(ContractError, match="unknown keywords q_dtype"):
            wrapper.plan(1, 2, 3, 4, 5, 6, 7, q_dtype=torch.float32)
        with pytest.raises(KernelNotDoubled, match="run"):
            wrapper.run(torch.empty(1), torch.empty(1))
        with pytest.raises(ContractError, match="unexpected keyword argument"):
            modules["flashinfer"].BatchDecodeWithPagedKVCacheWrapper(torch.empty(8), layout="HND")


def test_doubles_for_what_no_wheel_has_are_refused() -> None:
    with (
        pytest.raises(ContractError, match=r"has no sgl_kernel\.gptq_gemm"),
        installed_stubs(doubles={"sgl_kernel.gptq_gemm": print}),
    ):
        pass
    with installed_stubs("sgl-kernel", doubles={"sgl_kernel.gptq_gemm": print}):
        pass


@pytest.mark.parametrize("line", ["sglang-kernel", "sgl-kernel"])
def test_operators_have_the_recorded_schemas(line: str) -> None:
    def rmsnorm(output: Tensor, input: Tensor, weight: Tensor, eps: float, enable_pdl: bool) -> None:
        output.copy_(input * weight)

    with registered_operators(line, {"rmsnorm": rmsnorm}):
        out = torch.zeros(2)
        operator = torch.ops.sgl_kernel.rmsnorm.default
        operator(out, torch.ones(2), torch.full((2,), 4.0), 1e-5, False)
        assert out.tolist() == [4.0, 4.0]
        with pytest.raises(RuntimeError, match="missing value for argument 'enable_pdl'"):
            operator(out, torch.ones(2), torch.ones(2), 1e-5)
        with pytest.raises(NotImplementedError):
            torch.ops.sgl_kernel.moe_sum.default(torch.ones(1, 1, 1), out)
    with pytest.raises(AttributeError):
        _ = torch.ops.sgl_kernel.rmsnorm
    with (
        pytest.raises(ContractError, match="registers no operator no_such"),
        registered_operators(line, {"no_such": rmsnorm}),
    ):
        pass
