"""The gated delta rule in torch, for single tokens and for whole chunks of many sequences at once.

A sequence is cut into blocks. Within a block the rule is a triangular system, solved for all blocks of all sequences
at once; only the states between blocks are computed one block after another, all sequences together (the chunkwise
form of arXiv 2412.06464, section 3.3). All tensors are float32 unless said otherwise.

Shapes: N blocks, H heads, L tokens of a block, dk, dv. Decays are logarithms, [N, H, L, 1] for one value a token or
[N, H, L, dk] for one a channel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_DECAY = -80.0
"""Logarithm of the strongest decay over a block whose inverse is still well within the range of float32."""


def decode_step(state: Tensor, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """One token of n sequences. ``state`` [n, H, dk, dv] is updated in place.

    The state is large beside everything else, so that it is read once for both products: q @ (D S + k c^T) is
    (q D) @ S + (q . k) c.

    Args:
        query, key: [n, H, dk], normalised and scaled. value: [n, H, dv]. beta: [n, H].
        log_decay: [n, H, 1] or [n, H, dk].

    Returns:
        [n, H, dv].
    """
    decay = log_decay.exp()
    products = torch.stack([key * decay, query * decay], -2) @ state
    correction = (value - products[..., 0, :]) * beta.unsqueeze(-1)
    overlap = (query * key).sum(-1, keepdim=True)
    state.mul_(decay.unsqueeze(-1)).addcmul_(key.unsqueeze(-1), correction.unsqueeze(-2))
    return torch.addcmul(products[..., 1, :], overlap, correction)


@dataclass(frozen=True, slots=True)
class SolvedBlocks:
    """Blocks with everything that does not depend on the state they start from.

    With S the state before a block, its corrections are ``own_corrections - state_keys @ S``, its outputs
    ``state_queries @ S + mixing @ corrections`` and the state after it ``total_decay * S + carry @ corrections``.

    Attributes:
        own_corrections: [N, H, L, dv]; state_keys, state_queries: [N, H, L, dk]; mixing: [N, H, L, L];
            carry: [N, H, dk, L]; total_decay: [N, H, 1 or dk, 1].
    """

    own_corrections: Tensor
    state_keys: Tensor
    state_queries: Tensor
    mixing: Tensor
    carry: Tensor
    total_decay: Tensor

    def advance(self, part: slice, state: Tensor) -> Tensor:
        """Take the states of n sequences through a block each: ``part`` are n blocks.

        ``state`` [n, H, dk, dv] is updated in place. Returns the blocks' outputs [n, H, L, dv].
        """
        corrections = self.own_corrections[part] - self.state_keys[part] @ state
        outputs = self.state_queries[part] @ state
        outputs += self.mixing[part] @ corrections
        state.mul_(self.total_decay[part])
        state += self.carry[part] @ corrections
        return outputs


def solve_blocks(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> SolvedBlocks:
    """Everything of N blocks that does not need the states before them.

    Args:
        query, key: [N, H, L, dk], normalised and scaled. value: [N, H, L, dv]. beta: [N, H, L].
        log_decay: [N, H, L, 1 or dk]. Places past a sequence's end are 0 in all of them and change nothing.
    """
    # Sums of many strong decays are large, and a difference of two of them keeps float32's share of that size as its
    # error; the exponential makes it the relative error of the result. So they are summed in float64.
    total = log_decay.cumsum(-2, dtype=torch.float64)
    factors = total.float().exp_()
    key_products, query_products = _decayed_products(query, key, total)
    beta = beta.unsqueeze(-1)
    # Two right-hand sides of one system: what the block corrects by itself, and what it corrects of the state.
    sides = torch.cat([value, key * factors], dim=-1) * beta
    system = (beta * key_products).tril_(-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    own, state_keys = solved.split_with_sizes([value.shape[-1], key.shape[-1]], dim=-1)
    last = total[..., -1:, :]
    return SolvedBlocks(
        own_corrections=own,
        state_keys=state_keys,
        state_queries=query * factors,
        mixing=query_products.tril_(),
        carry=(key * (last - total).float().exp_()).transpose(-1, -2),
        total_decay=last.float().exp_().transpose(-1, -2),
    )


def _decayed_products(query: Tensor, key: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """k_i . k_j and q_i . k_j with what has decayed from j to i, for j <= i: [N, H, L, L] each. ``total`` is float64.

    Above the diagonal the values mean nothing. Differences of the logarithms are taken before the exponential where a
    factor exp(-total_j) alone could leave the range of float32.
    """
    if total.shape[-1] == 1:
        decay = (total - total.transpose(-1, -2)).float().clamp_(max=0.0).exp_()
        return (key @ key.transpose(-1, -2)) * decay, (query @ key.transpose(-1, -2)) * decay
    # Looking at the values would make the host wait for an accelerator.
    if total.device.type == "cpu" and float(total.min()) > _MOST_DECAY:
        undone = (key * total.neg().exp_().float()).transpose(-1, -2)
        factors = total.exp().float()
        return (key * factors) @ undone, (query * factors) @ undone
    length = key.shape[-2]
    key_products = key.new_zeros(*key.shape[:-1], length)
    query_products = torch.zeros_like(key_products)
    for column in range(length):  # the pairs of all columns at once would take L times the memory of the keys
        decayed = (total[..., column:, :] - total[..., column : column + 1, :]).float().exp_()
        decayed.mul_(key[..., column : column + 1, :])
        key_products[..., column:, column] = (decayed * key[..., column:, :]).sum(-1)
        query_products[..., column:, column] = decayed.mul_(query[..., column:, :]).sum(-1)
    return key_products, query_products
