"""Which wheel serves each dense operation in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from sglang_lite.adapters.cuda.selection import Selection
from sglang_lite.adapters.dispatch import Package, Provider

Wheel = Literal["flashinfer", "sgl_kernel"]


@dataclass(frozen=True, slots=True)
class DenseProviders:
    """A provider an operation; chosen by ``adapters.dispatch``.

    Attributes:
        norm, activation: RMS norms; gated activations.
        prefill_backend: of FlashInfer's prefill and sink wrappers, ``fa2`` or ``fa3``.
        latent_backend: of FlashInfer's latent wrapper, ``fa2`` or ``fa3``.
        enable_pdl: programmatic dependent launch, from compute capability 9.0 on.
    """

    norm: Wheel = "flashinfer"
    activation: Wheel = "sgl_kernel"
    prefill_backend: Literal["fa2", "fa3"] = "fa2"
    latent_backend: Literal["fa2", "fa3"] = "fa2"
    enable_pdl: bool = False


def dense_providers(selection: Selection, dtype: torch.dtype) -> DenseProviders:
    """What the dispatch table chooses.

    Raises:
        OperationInputError: nothing serves an operation; says why.
    """
    return DenseProviders(
        norm=_wheel(selection.provider("norm.rms", dtype)),
        activation=_wheel(selection.provider("activation.silu_and_mul", dtype)),
        prefill_backend=_backend(selection.provider("attention.prefill", dtype)),
        latent_backend=_backend(selection.provider("latent.attention", dtype)),
        enable_pdl=selection.enable_pdl,
    )


def _wheel(provider: Provider) -> Wheel:
    return "flashinfer" if provider.package == Package.FLASHINFER else "sgl_kernel"


def _backend(provider: Provider) -> Literal["fa2", "fa3"]:
    return "fa3" if provider.name == "fa3" else "fa2"
