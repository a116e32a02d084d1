"""The dense operations through the kernel wheels' doubles against the host's, for both kernel lines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sglang_lite.adapters.base import KVGeometry, OperationInputError
from sglang_lite.adapters.cuda.operations import CudaOperations
from sglang_lite.adapters.cuda.providers import DenseProviders, dense_providers
from sglang_lite.adapters.cuda.selection import Selection
from sglang_lite.adapters.dispatch import Target
from sglang_lite.types import StartupError
from tests.support.kernel_doubles import HOPPER, installed_kernels
from tests.support.reference_operations import ReferenceOperations

PROVIDERS = {
    "flashinfer": DenseProviders(norm="flashinfer", activation="flashinfer"),
    "sgl_kernel": DenseProviders(norm="sgl_kernel", activation="sgl_kernel", enable_pdl=True),
}
REFERENCE = ReferenceOperations()


@pytest.fixture(params=["sglang-kernel", "sgl-kernel"], autouse=True)
def line(request: pytest.FixtureRequest) -> Iterator[str]:
    with installed_kernels(request.param):
        yield request.param


@pytest.fixture(params=sorted(PROVIDERS))
def ops(request: pytest.FixtureRequest) -> CudaOperations:
    return CudaOperations(torch.device("cpu"), HOPPER, providers=PROVIDERS[request.param], workspace_bytes=64)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def test_norms(ops: CudaOperations) -> None:
    x, residual, weight = random(5, 48), random(5, 48), random(48)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    expected = REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(ops.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5), expected)


def test_norm_of_heads_inside_a_merged_projection(ops: CudaOperations) -> None:
    heads = random(5, 7, 16)[:, 2:5]
    weight = random(16)
    torch.testing.assert_close(ops.rms_norm(heads, weight, 1e-6), REFERENCE.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("activation", ["silu_and_mul", "gelu_and_mul"])
def test_gated_activations(ops: CudaOperations, activation: str) -> None:
    x = random(3, 64)
    got, expected = getattr(ops, activation)(x), getattr(REFERENCE, activation)(x)
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
    with pytest.raises(OperationInputError, match="no multiple of 16 bytes"):
        getattr(ops, activation)(random(3, 20))


@pytest.mark.parametrize("kind", ["rotary_neox", "rotary_interleaved"])
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotary(ops: CudaOperations, kind: str, rotary_dim: int) -> None:
    heads = random(5, 6, 16)
    query, key = heads[:, :4], heads[:, 4:6]
    table = torch.randn(5, rotary_dim)
    cos, sin = table[:, : rotary_dim // 2], table[:, rotary_dim // 2 :]
    expected = getattr(REFERENCE, kind)(query, key, cos, sin)
    apart = getattr(ops, kind)(query.clone(), key.clone(), cos.clone(), sin.clone())
    torch.testing.assert_close(apart, expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(getattr(ops, kind)(query, key, cos, sin), expected, atol=2e-2, rtol=2e-2)


def test_linear_and_embedding(ops: CudaOperations) -> None:
    weight, bias, x = random(8, 16), random(8), random(3, 16)
    linear = ops.pack_linear(weight, bias)
    assert (linear.in_features, linear.out_features) == (16, 8)
    torch.testing.assert_close(linear(x), x @ weight.T + bias, atol=5e-2, rtol=5e-2)
    ids = torch.tensor([3, 0, 3], dtype=torch.int32)
    torch.testing.assert_close(ops.embedding(ids, weight), weight[ids.long()])


def test_pages_are_copied_whole(ops: CudaOperations) -> None:
    geometry = KVGeometry(6, 4, 3, 2, 8, torch.bfloat16)
    pool = random(*geometry.pool_shape)
    before = pool.clone()
    ops.copy_pages(pool, torch.tensor([1, 4]), torch.tensor([3, 0]))
    torch.testing.assert_close(pool[[3, 0]], before[[1, 4]], atol=0, rtol=0)
    torch.testing.assert_close(pool[[1, 2, 4, 5]], before[[1, 2, 4, 5]], atol=0, rtol=0)


@pytest.mark.parametrize(("sm", "backend"), [(80, "fa2"), (89, "fa2"), (90, "fa3"), (100, "fa2")])
def test_providers_come_from_the_dispatch_table(sm: int, backend: str) -> None:
    selection = Selection(Target(sm, "sglang-kernel", has_flashinfer=True), enable_pdl=sm >= 90)
    chosen = dense_providers(selection, torch.bfloat16)
    assert chosen == DenseProviders(
        prefill_backend=backend,
        latent_backend=backend,
        enable_pdl=sm >= 90,  # type: ignore[arg-type]
    )
    with pytest.raises(OperationInputError, match="float32"):
        dense_providers(selection, torch.float32)


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(StartupError, match=r"cannot import flashinfer.*check-env"):
        CudaOperations(torch.device("cpu"), HOPPER)
