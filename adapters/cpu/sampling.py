"""The operations of ``adapters.sampling`` in torch: what the kernels are compared with."""

from __future__ import annotations

import torch
from torch import Tensor


class CpuSampling:
    """See ``adapters.sampling.SamplingOperations``. Runs on any device, sorting whole rows."""

    def softmax(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """In float32."""
        return (logits / temperature.unsqueeze(1)).softmax(-1)

    def keep_top_k(self, probabilities: Tensor, top_k: Tensor) -> Tensor:
        """Ties with the last one kept are kept."""
        ordered = probabilities.sort(-1, descending=True).values
        last = (top_k.long().clamp(max=probabilities.shape[1]) - 1).unsqueeze(1)
        return _normalized(probabilities * (probabilities >= ordered.gather(1, last)))

    def keep_top_p(self, probabilities: Tensor, top_p: Tensor) -> Tensor:
        """A token is kept when those before it do not reach ``top_p``; so are its ties."""
        ordered = probabilities.sort(-1, descending=True).values
        before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        count = (before < top_p.double().unsqueeze(1)).sum(-1, keepdim=True).clamp(min=1)
        return _normalized(probabilities * (probabilities >= ordered.gather(1, count - 1)))

    def draw(self, probabilities: Tensor, seed: int, offset: int) -> Tensor:
        """By inverting the cumulative sum."""
        generator = torch.Generator(probabilities.device).manual_seed((seed * 1_000_003 + offset) % 2**63)
        shares = torch.rand(
            len(probabilities), 1, generator=generator, dtype=torch.float64, device=probabilities.device
        )
        cumulative = probabilities.cumsum(-1, dtype=torch.float64)
        places = torch.searchsorted(cumulative, shares * cumulative[:, -1:], right=True)
        last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
        return torch.minimum(places, last).squeeze(1).int()


def _normalized(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)
