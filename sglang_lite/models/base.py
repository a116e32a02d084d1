"""What the model runner expects of a model."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionPlan
from sglang_lite.layers.given_embeddings import GivenEmbeddings
from sglang_lite.layers.recurrent_step import RecurrentStep
from sglang_lite.models.model_description import RecurrentDescription


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

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        pool: Tensor,
        plan: AttentionPlan,
        *,
        given: GivenEmbeddings | None = None,
    ) -> Tensor:
        """int64[T] ids and positions -> [T, hidden], after the final norm. Writes the tokens' KV into the pool.

        ``given`` takes the place of what the embedding makes of some tokens.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> float32[S, vocab]."""


@runtime_checkable
class RecurrentLanguageModel(Protocol):
    """What a ``CausalLanguageModel`` offers beside that when some of its layers carry a state from token to token."""

    @property
    def recurrent(self) -> RecurrentDescription:
        """Shapes of the state, for one sequence."""

    @property
    def activation_dtype(self) -> torch.dtype: ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        pool: Tensor,
        plan: AttentionPlan,
        recurrent: RecurrentStep | None = None,
        *,
        given: GivenEmbeddings | None = None,
    ) -> Tensor:
        """As ``CausalLanguageModel.forward``; ``recurrent`` is needed, and the states in it are moved on."""
