"""Speculative decoding in torch and NumPy: the reference for every other device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.speculation import ChainDraft, DraftTree, TreeAcceptance, TreeSelection
from sglang_lite.types import Int64Array


class CpuSpeculation:
    """See ``adapters.speculation.SpeculationOperations``."""

    def verify_chain(self, draft: ChainDraft, *, seed: int, offset: int) -> Tensor:
        """int32[B, n + 1], -1 behind the drawn token."""
        check_chain(draft)
        num_rows, length = draft.tokens.shape
        index = draft.tokens.long().unsqueeze(-1)
        device = draft.tokens.device
        # Draws on the host, so that a pair of numbers means the same tokens wherever the probabilities are.
        generator = torch.Generator().manual_seed((seed << 20) ^ offset)
        uniform = torch.rand(num_rows, length, generator=generator).to(device)
        race = torch.empty(num_rows, draft.target_probabilities.shape[-1]).exponential_(generator=generator).to(device)
        target = draft.target_probabilities[:, :length].gather(-1, index).squeeze(-1)
        drafted = draft.draft_probabilities.gather(-1, index).squeeze(-1)
        accepted = (uniform * drafted < target).to(torch.int32).cumprod(1)
        num_accepted = accepted.sum(1)
        # Behind the chain there is no draft: the token is drawn from the target itself.
        nothing = torch.zeros_like(draft.target_probabilities[:, :1])
        draft_or_none = torch.cat([draft.draft_probabilities, nothing], 1)
        rows = torch.arange(num_rows, device=device)
        rest = (draft.target_probabilities - draft_or_none)[rows, num_accepted].clamp_(min=0)
        drawn = (rest / race).argmax(-1).to(torch.int32)
        places = torch.arange(length + 1, device=device)
        chain = torch.cat([draft.tokens, draft.tokens.new_full((num_rows, 1), -1)], 1)
        chain = chain.masked_fill(places >= num_accepted.unsqueeze(1), -1)
        return chain.scatter_(1, num_accepted.unsqueeze(1), drawn.unsqueeze(1))

    def build_tree(self, selection: TreeSelection, sequence_lens: Tensor) -> DraftTree:
        """One row after another, in NumPy: trees have tens of nodes."""
        check_tree(selection, sequence_lens)
        num_rows, num_drafts = selection.selected.shape
        parents = np.zeros((num_rows, num_drafts + 1), dtype=np.int64)
        selected, expanded = selection.selected.numpy(), selection.parents.numpy()
        for row in range(num_rows):
            node_of = {int(candidate): node for node, candidate in enumerate(selected[row], start=1)}
            for candidate, node in node_of.items():
                group = candidate // selection.top_k
                parent = node_of.get(int(expanded[row, group])) if group else 0
                if parent is None or parent >= node:
                    raise OperationInputError(
                        f"row {row} keeps candidate {candidate} without candidate {int(expanded[row, group])} before "
                        "it, from which it descends"
                    )
                parents[row, node] = parent
        return _lay_out(parents, sequence_lens.numpy())

    def verify_tree(self, tree: DraftTree, tokens: Tensor, target_tokens: Tensor, max_path: int) -> TreeAcceptance:
        """One row after another."""
        num_rows = tokens.shape[0]
        nodes = np.full((num_rows, max_path), -1, dtype=np.int32)
        answers = np.full((num_rows, max_path), -1, dtype=np.int32)
        num_accepted = np.zeros(num_rows, dtype=np.int32)
        for row in range(num_rows):
            node = 0
            for step in range(max_path):
                answer = int(target_tokens[row, node])
                nodes[row, step], answers[row, step], num_accepted[row] = node, answer, step
                child = int(tree.next_token[row, node])
                while child != -1 and int(tokens[row, child]) != answer:
                    child = int(tree.next_sibling[row, child])
                if child == -1:
                    break
                node = child
        return TreeAcceptance(torch.from_numpy(nodes), torch.from_numpy(num_accepted), torch.from_numpy(answers))


def check_chain(draft: ChainDraft) -> None:
    """Raise OperationInputError unless the chain and its probabilities fit together."""
    rows, length = draft.tokens.shape
    width = draft.target_probabilities.shape[-1]
    for name, tensor, shape, dtype in (
        ("tokens", draft.tokens, (rows, length), torch.int32),
        ("draft_probabilities", draft.draft_probabilities, (rows, length, width), torch.float32),
        ("target_probabilities", draft.target_probabilities, (rows, length + 1, width), torch.float32),
    ):
        if tensor.shape != shape or tensor.dtype != dtype:
            raise OperationInputError(f"{name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")


def check_tree(selection: TreeSelection, sequence_lens: Tensor) -> None:
    """Raise OperationInputError unless a selection is one of a search of its size."""
    rows = selection.selected.shape[0]
    expected = (rows, selection.top_k * (selection.depth - 1) + 1)
    for name, tensor, shape in (
        ("parents", selection.parents, expected),
        ("selected", selection.selected, tuple(selection.selected.shape)),
        ("sequence_lens", sequence_lens, (rows,)),
    ):
        if tensor.shape != shape or tensor.dtype != torch.int64:
            raise OperationInputError(f"{name} must be int64 {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")


def _lay_out(parents: Int64Array, sequence_lens: Int64Array) -> DraftTree:
    """``parents`` [B, N]: the node that each node descends from; node 0 is the root."""
    num_rows, num_nodes = parents.shape
    mask = np.zeros((num_rows, num_nodes, num_nodes), dtype=bool)
    mask[:, 0, 0] = True
    next_token = np.full((num_rows, num_nodes), -1, dtype=np.int64)
    next_sibling = np.full((num_rows, num_nodes), -1, dtype=np.int64)
    rows = np.arange(num_rows)
    for node in range(1, num_nodes):  # parents come first, so that their masks are complete
        mask[rows, node] = mask[rows, parents[:, node]]
        mask[:, node, node] = True
    for node in range(num_nodes - 1, 0, -1):  # from the last child to the first, which is then the parent's
        next_sibling[:, node] = next_token[rows, parents[:, node]]
        next_token[rows, parents[:, node]] = node
    positions = mask.sum(-1) - 1 + sequence_lens[:, None]
    return DraftTree(
        torch.from_numpy(mask),
        torch.from_numpy(positions),
        torch.from_numpy(next_token),
        torch.from_numpy(next_sibling),
    )
