"""The operations of ``adapters.sampling`` through FlashInfer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_lite.adapters.cuda.wheels import Wheels


class CudaSampling:
    """See ``adapters.sampling.SamplingOperations``. Nothing here waits for the device."""

    def __init__(self, wheels: Wheels, *, enable_pdl: bool) -> None:
        self._sampling: Any = wheels.flashinfer.sampling
        self._enable_pdl = enable_pdl

    def softmax(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """In float32."""
        result: Tensor = self._sampling.softmax(logits, temperature=temperature, enable_pdl=self._enable_pdl)
        return result

    def keep_top_k(self, probabilities: Tensor, top_k: Tensor) -> Tensor:
        """By a threshold a row."""
        result: Tensor = self._sampling.top_k_renorm_probs(probabilities, top_k)
        return result

    def keep_top_p(self, probabilities: Tensor, top_p: Tensor) -> Tensor:
        """By a threshold a row."""
        result: Tensor = self._sampling.top_p_renorm_probs(probabilities, top_p)
        return result

    def draw(self, probabilities: Tensor, seed: int, offset: int) -> Tensor:
        """Seed and offset are given, so that no generator of the host is moved on."""
        result: Tensor = self._sampling.sampling_from_probs(
            probabilities, deterministic=True, check_nan=False, seed=seed, offset=offset
        )
        return result
