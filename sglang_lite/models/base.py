"""What the model runner expects of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sglang_lite.adapters.base import AttentionPlan


class CausalLanguageModel(Protocol):
    """A decoder-only language model over a paged KV pool."""

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def forward(self, token_ids: Tensor, positions: Tensor, pool: Tensor, plan: AttentionPlan) -> Tensor:
        """int64[T] ids and positions -> [T, hidden], after the final norm. Writes the tokens' KV into the pool."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> float32[S, vocab]."""
