"""Speculative decoding on CUDA: chains by FlashInfer, trees by the older kernel line."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_lite.adapters.cpu.speculation import CpuSpeculation, check_chain, check_tree
from sglang_lite.adapters.cuda.selection import Selection
from sglang_lite.adapters.cuda.wheels import Wheels
from sglang_lite.adapters.dispatch import Package
from sglang_lite.adapters.speculation import ChainDraft, DraftTree, TreeAcceptance, TreeSelection

_QUERY_ONLY = 1
"""Mode in which the mask kernel writes the columns of the drafts and not those of the tokens before them."""


class CudaSpeculation:
    """See ``adapters.speculation.SpeculationOperations``."""

    def __init__(self, wheels: Wheels, selection: Selection) -> None:
        self._wheels = wheels
        self._selection = selection

    def verify_chain(self, draft: ChainDraft, *, seed: int, offset: int) -> Tensor:
        """int32[B, n + 1], -1 behind the drawn token."""
        check_chain(draft)
        if self._selection.provider("speculation.chain_verify", torch.float32).package is Package.TORCH:
            return CpuSpeculation().verify_chain(draft, seed=seed, offset=offset)
        tokens: Tensor = self._wheels.flashinfer.sampling.chain_speculative_sampling(
            draft_probs=draft.draft_probabilities.contiguous(),
            draft_token_ids=draft.tokens.contiguous(),
            target_probs=draft.target_probabilities.contiguous(),
            deterministic=True,
            seed=seed,
            offset=offset,
        )
        return tokens

    def build_tree(self, selection: TreeSelection, sequence_lens: Tensor) -> DraftTree:
        """Lay out trees by kernel."""
        self._selection.provider("speculation.tree_build", torch.float32)
        check_tree(selection, sequence_lens)
        num_rows, num_nodes = selection.selected.shape[0], selection.selected.shape[1] + 1
        integers = sequence_lens.new_full
        tree = DraftTree(
            mask=torch.zeros(num_rows, num_nodes, num_nodes, dtype=torch.bool, device=sequence_lens.device),
            positions=integers((num_rows, num_nodes), 0),
            next_token=integers((num_rows, num_nodes), -1),
            next_sibling=integers((num_rows, num_nodes), -1),
        )
        kernels: Any = self._wheels.sgl_kernel
        kernels.build_tree_kernel_efficient(
            parent_list=selection.parents.contiguous(),
            selected_index=selection.selected.contiguous(),
            verified_seq_len=sequence_lens,
            tree_mask=tree.mask.view(-1),
            positions=tree.positions.view(-1),
            retrive_index=integers((num_rows, num_nodes), -1),
            retrive_next_token=tree.next_token,
            retrive_next_sibling=tree.next_sibling,
            topk=selection.top_k,
            depth=selection.depth,
            draft_token_num=num_nodes,
            tree_mask_mode=_QUERY_ONLY,
        )
        return tree

    def verify_tree(self, tree: DraftTree, tokens: Tensor, target_tokens: Tensor, max_path: int) -> TreeAcceptance:
        """Follow each tree by kernel. The kernel numbers nodes through all rows; the result counts within each."""
        self._selection.provider("speculation.tree_verify", torch.float32)
        num_rows, num_nodes = tokens.shape
        device = tokens.device
        numbers = torch.arange(num_rows * num_nodes, dtype=torch.int64, device=device).view(num_rows, num_nodes)
        predicted = torch.full((num_rows * num_nodes,), -1, dtype=torch.int32, device=device)
        path = torch.full((num_rows, max_path), -1, dtype=torch.int32, device=device)
        num_accepted = torch.zeros(num_rows, dtype=torch.int32, device=device)
        kernels: Any = self._wheels.sgl_kernel
        kernels.verify_tree_greedy(
            predicts=predicted,
            accept_index=path,
            accept_token_num=num_accepted,
            candidates=tokens,
            retrive_index=numbers,
            retrive_next_token=tree.next_token,
            retrive_next_sibling=tree.next_sibling,
            target_predict=target_tokens,
        )
        outside = path < 0
        answers = predicted[path.clamp(min=0).long()].masked_fill(outside, -1)
        nodes = (path - numbers[:, :1].to(torch.int32)).masked_fill(outside, -1)
        return TreeAcceptance(nodes, num_accepted, answers)
