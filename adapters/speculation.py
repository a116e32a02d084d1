"""Protocol of speculative decoding: accept what was drafted as far as the model agrees.

Shapes use B rows, n drafted tokens a row, V tokens of the vocabulary, N = n + 1 nodes of a tree of drafts, whose node 0
is the token that the model is sure of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChainDraft:
    """A chain of drafted tokens for each row, and what both models think of it.

    Attributes:
        tokens: int32[B, n].
        draft_probabilities: float32[B, n, V], what each token was drawn from; a token that was looked up and not drawn
            has probability 1.
        target_probabilities: float32[B, n + 1, V], of the model, after each prefix of the chain.
    """

    tokens: Tensor
    draft_probabilities: Tensor
    target_probabilities: Tensor


@dataclass(frozen=True, slots=True)
class TreeSelection:
    """Which candidates of a beam search over ``depth`` levels of ``top_k`` branches were kept as drafts.

    Candidates are numbered through all levels: the first level's ``top_k`` children of the root are 0..top_k-1, and
    every later level adds ``top_k`` children of each of its ``top_k`` expanded candidates.

    Attributes:
        parents: int64[B, top_k * (depth - 1) + 1]; entry 0 is -1 (the root), the others are the candidates that were
            expanded, in order: candidate c descends from entry c // top_k.
        selected: int64[B, n], candidates kept, ascending, so that a parent comes before its children.
        top_k, depth: of the search.
    """

    parents: Tensor
    selected: Tensor
    top_k: int
    depth: int


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A tree of drafts laid out for one step of the model.

    Attributes:
        mask: bool[B, N, N], whether a node (row) sees another (column): its ancestors and itself.
        positions: int64[B, N], of the tokens in their sequences.
        next_token: int64[B, N], a node's first child, -1 without any.
        next_sibling: int64[B, N], a child's next sibling, -1 for the last one.
    """

    mask: Tensor
    positions: Tensor
    next_token: Tensor
    next_sibling: Tensor


@dataclass(frozen=True, slots=True)
class TreeAcceptance:
    """The path of a tree that greedy decoding agrees with.

    Attributes:
        nodes: int32[B, S], nodes of the path from the root, -1 behind it.
        num_accepted: int32[B], drafts on the path, the root not counted.
        tokens: int32[B, S], what the model says after each node of the path, -1 behind it: the tokens of the step.
    """

    nodes: Tensor
    num_accepted: Tensor
    tokens: Tensor


class SpeculationOperations(Protocol):
    """Verification of drafts on one device."""

    def verify_chain(self, draft: ChainDraft, *, seed: int, offset: int) -> Tensor:
        """Accept a prefix of each chain and draw one more token, so that tokens are distributed as the model's own.

        Token i is accepted with probability min(1, target / draft); the first one that is not is drawn from what the
        target has more than the draft, and after a whole chain one more from the target (arXiv 2211.17192).
        ``seed`` and ``offset`` give the random numbers: the same pair, the same tokens on the same device.

        Returns int32[B, n + 1]: tokens in order, -1 behind the drawn one.
        """

    def build_tree(self, selection: TreeSelection, sequence_lens: Tensor) -> DraftTree:
        """Lay out trees. ``sequence_lens`` int64[B]: position of the root, tokens before it.

        Raises:
            OperationInputError: this device has no kernel for trees.
        """

    def verify_tree(self, tree: DraftTree, tokens: Tensor, target_tokens: Tensor, max_path: int) -> TreeAcceptance:
        """Follow each tree from the root as long as a child is what the model says.

        tokens int64[B, N], of the nodes; target_tokens int64[B, N], the model's choice after each node;
        ``max_path``: S, nodes of the longest path. Of equal siblings the first one is taken.

        Raises:
            OperationInputError: as ``build_tree``.
        """
