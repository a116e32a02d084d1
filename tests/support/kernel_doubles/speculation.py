"""Doubles of verification of drafts, written from the kernels' documentation and not from the adapters."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from tests.support.kernel_doubles.capture import kernel
from tests.support.kernel_doubles.checks import require


@kernel
def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    deterministic: bool = True,
    seed: int | None = None,
    offset: int | None = None,
) -> Tensor:
    """One token at a time; its random numbers are its own."""
    name = "chain_speculative_sampling"
    rows, length, width = draft_probs.shape
    require(draft_probs.dtype == target_probs.dtype == torch.float32, f"{name}: float32 probabilities")
    require(all(t.is_contiguous() for t in (draft_probs, draft_token_ids, target_probs)), f"{name}: contiguous")
    require(draft_token_ids.dtype == torch.int32 and draft_token_ids.shape == (rows, length), f"{name}: ids int32")
    require(target_probs.shape == (rows, length + 1, width), f"{name}: target [b, n + 1, V]")
    require(seed is not None and offset is not None, f"{name}: seed and offset, or the generator moves on the host")
    numbers = random.Random(f"{seed} {offset}")
    output = torch.full((rows, length + 1), -1, dtype=torch.int32)
    for row in range(rows):
        weights = target_probs[row, length].tolist()
        place = length
        for step, token in enumerate(draft_token_ids[row].tolist()):
            target, draft = float(target_probs[row, step, token]), float(draft_probs[row, step, token])
            if numbers.random() * draft >= target:
                weights = (target_probs[row, step] - draft_probs[row, step]).clamp(min=0).tolist()
                place = step
                break
            output[row, step] = token
        output[row, place] = numbers.choices(range(width), weights)[0]
    return output


def _check_tree(name: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        require(tensor.dtype == torch.int64 and tensor.is_contiguous(), f"{name}: contiguous int64, got {tensor.dtype}")


@kernel
def build_tree_kernel_efficient(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Every node climbs to the root by itself, as the threads of the kernel do."""
    name = "build_tree_kernel_efficient"
    _check_tree(name, parent_list, selected_index, verified_seq_len, positions, retrive_index)
    _check_tree(name, retrive_next_token, retrive_next_sibling)
    batch = selected_index.shape[0]
    require(parent_list.shape == (batch, topk * (depth - 1) + 1), f"{name}: parent_list")
    require(selected_index.shape == (batch, draft_token_num - 1), f"{name}: selected_index")
    require(tree_mask_mode == 1, f"{name}: doubled for masks of the drafts alone")
    require(tree_mask.dtype == torch.bool and tree_mask.shape == (batch * draft_token_num**2,), f"{name}: tree_mask")
    require(int(retrive_next_token.max()) == int(retrive_next_sibling.max()) == -1, f"{name}: starts from -1")
    mask = tree_mask.view(batch, draft_token_num, draft_token_num)
    places = positions.view(batch, draft_token_num)
    for row in range(batch):
        selected, start = selected_index[row].tolist(), int(verified_seq_len[row])

        def parent_of(node: int, row: int = row, selected: list[int] = selected) -> int:
            group = selected[node - 1] // topk
            return 0 if group == 0 else selected.index(int(parent_list[row, group])) + 1

        for node in range(draft_token_num):
            retrive_index[row, node] = row * draft_token_num + node
            mask[row, node] = False
            climbing, steps = node, 0
            while climbing:
                mask[row, node, climbing] = True
                climbing, steps = parent_of(climbing), steps + 1
            mask[row, node, 0] = True
            places[row, node] = start + steps
        for node in range(draft_token_num - 1, 0, -1):
            parent = parent_of(node)
            retrive_next_sibling[row, node] = retrive_next_token[row, parent]
            retrive_next_token[row, parent] = node


@kernel
def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    name = "verify_tree_greedy"
    _check_tree(name, candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict)
    batch, nodes = candidates.shape
    for tensor in (predicts, accept_index, accept_token_num):
        require(tensor.dtype == torch.int32 and tensor.is_contiguous(), f"{name}: contiguous int32")
    require(predicts.shape == (batch * nodes,) and accept_token_num.shape == (batch,), f"{name}: shapes")
    flat = target_predict.view(-1)
    for row in range(batch):
        last = int(retrive_index[row, 0])
        accept_index[row, 0] = last
        accepted, current = 0, 0
        for _ in range(1, accept_index.shape[1]):
            current = int(retrive_next_token[row, current])
            while current != -1 and int(candidates[row, current]) != int(flat[last]):
                current = int(retrive_next_sibling[row, current])
            if current == -1:
                break
            predicts[last] = flat[last]
            accepted += 1
            last = int(retrive_index[row, current])
            accept_index[row, accepted] = last
        accept_token_num[row] = accepted
        predicts[last] = flat[last]
