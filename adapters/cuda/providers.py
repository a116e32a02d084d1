"""Which wheel serves each dense operation in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Wheel = Literal["flashinfer", "sgl_kernel"]


@dataclass(frozen=True, slots=True)
class DenseProviders:
    """A provider an operation; the caller chose them (``adapters.dispatch``), nothing here falls back.

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


def providers_for(compute_capability: tuple[int, int]) -> DenseProviders:
    """What a device gets: Hopper has kernels of its own for prefill and latent attention."""
    hopper = compute_capability[0] == 9
    return DenseProviders(
        prefill_backend="fa3" if hopper else "fa2",
        latent_backend="fa3" if hopper else "fa2",
        enable_pdl=compute_capability >= (9, 0),
    )
