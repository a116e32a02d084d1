"""Choosing a provider from the dispatch table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglang_lite.adapters.dispatch import KNOWN_SMS, TABLE, Package, Provider, Refusal, Target, select
from sglang_lite.adapters.dispatch.document import markdown

ROOT = Path(__file__).parents[3]
NEW, OLD = "sglang-kernel", "sgl-kernel"


def target(sm: int, line: str | None = NEW, has_flashinfer: bool = True) -> Target:
    return Target(sm, line, has_flashinfer)


def label(choice: Provider | Refusal) -> str:
    return choice.label if isinstance(choice, Provider) else f"none: {choice.reason}"


@pytest.mark.parametrize(
    ("operation", "sm", "line", "expected"),
    [
        ("norm.rms", 80, NEW, "flashinfer"),
        ("activation.silu_and_mul", 90, NEW, "sgl_kernel"),
        ("activation.silu_and_mul", 121, NEW, "flashinfer"),
        ("attention.prefill", 90, NEW, "flashinfer fa3"),
        ("attention.prefill", 89, NEW, "flashinfer fa2"),
        ("attention.prefill", 100, OLD, "flashinfer fa2"),
        ("linear.fp8_blocks", 90, NEW, "flashinfer"),
        ("linear.fp8_blocks", 100, NEW, "flashinfer groupwise"),
        ("linear.fp8_blocks", 89, NEW, "torch"),
        ("linear.awq", 90, OLD, "sgl_kernel dequantize"),
        ("linear.awq", 90, NEW, "torch"),
        ("moe.grouped_top_k", 80, OLD, "sgl_kernel"),
        ("moe.grouped_top_k", 80, NEW, "torch"),
        ("speculation.tree_verify", 90, OLD, "sgl_kernel"),
    ],
)
def test_the_first_provider_that_fits(operation: str, sm: int, line: str, expected: str) -> None:
    assert label(select(operation, target(sm, line), "bfloat16")) == expected


def test_without_flashinfer_the_kernel_wheel_serves_what_it_has() -> None:
    assert label(select("norm.rms", target(90, NEW, has_flashinfer=False), "bfloat16")) == "sgl_kernel"
    assert label(select("attention.decode", target(90, NEW, False), "bfloat16")) == "sgl_kernel FlashAttention 3"
    refused = select("attention.decode", target(100, NEW, has_flashinfer=False), "bfloat16")
    assert isinstance(refused, Refusal)
    assert "not installed" in refused.reason
    assert "runs on SM 80, 86, 87, 89, 90, not on SM 100" in refused.reason


def test_a_refusal_says_why_each_provider_does_not_serve() -> None:
    refused = select("speculation.tree_build", target(90, NEW), "bfloat16")
    assert isinstance(refused, Refusal)
    assert refused.operation == "speculation.tree_build"
    assert "sglang-kernel does not have it (sgl-kernel 0.3.21 has)" in refused.reason
    assert "chains of drafts" in refused.reason
    refused = select("norm.rms", target(90), "float32")
    assert isinstance(refused, Refusal)
    assert "takes float16, bfloat16, not float32" in refused.reason
    refused = select("grammar.mask", target(90, line=None), "bfloat16")
    assert isinstance(refused, Refusal)
    assert "no kernel wheel" in refused.reason


def test_an_operation_that_is_not_in_the_table() -> None:
    with pytest.raises(KeyError, match=r"no operation 'norm\.batch'"):
        select("norm.batch", target(90), "bfloat16")


def test_a_device_older_than_the_wheels_gets_no_kernel_of_theirs() -> None:
    for operation in TABLE:
        choice = select(operation, target(75), "bfloat16")
        assert not isinstance(choice, Provider) or choice.package is Package.TORCH, operation


def test_the_table_is_well_formed() -> None:
    for name, operation in TABLE.items():
        assert operation.providers, name
        labels = [provider.label for provider in operation.providers]
        assert len(set(labels)) == len(labels), f"{name}: two providers are told apart by nothing: {labels}"
        for provider in operation.providers:
            assert bool(provider.calls) is (provider.package is not Package.TORCH), name
            assert all(
                versions.first is not None or set(versions.exactly) <= set(KNOWN_SMS)
                for versions in provider.lines.values()
            ), name
        torch_last = [provider.package for provider in operation.providers]
        assert Package.TORCH not in torch_last[:-1] or name == "lora.grouped", f"{name}: torch hides what follows it"


def test_choosing_imports_neither_torch_nor_a_wheel() -> None:
    code = (
        "import sys; from sglang_lite.adapters.dispatch import select, Target; "
        "select('norm.rms', Target(90, 'sglang-kernel', True), 'bfloat16'); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'sgl_kernel', 'flashinfer')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_documentation_is_the_table() -> None:
    written = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert written == markdown(), "run: python -m sglang_lite.adapters.dispatch.document > docs/kernels.md"
    for name in TABLE:
        assert f"`{name}`" in written
