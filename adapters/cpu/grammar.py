"""Grammar masks in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.grammar import bitmask_width


class CpuGrammar:
    """See ``adapters.grammar.GrammarOperations``."""

    def apply_bitmask(self, logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> None:
        """Logits of tokens whose bit is 0 become -inf, in place."""
        check_bitmask(logits, bitmask, rows)
        if rows is None:
            logits.masked_fill_(_forbidden(bitmask, logits.shape[1]), float("-inf"))
            return
        chosen = rows.long()
        masked = logits.index_select(0, chosen)
        masked.masked_fill_(_forbidden(bitmask.index_select(0, chosen), logits.shape[1]), float("-inf"))
        logits.index_copy_(0, chosen, masked)


def _forbidden(bitmask: Tensor, vocab_size: int) -> Tensor:
    """bool[R, V] of int32 [R, W]."""
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    return (bitmask.unsqueeze(-1) >> shifts & 1).flatten(-2)[:, :vocab_size] == 0


def check_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor | None) -> None:
    """Raise OperationInputError unless the three fit together."""
    shape = (logits.shape[0], bitmask_width(logits.shape[1]))
    if bitmask.dtype != torch.int32 or bitmask.shape != shape:
        raise OperationInputError(
            f"the bit mask must be int32 {list(shape)} for {logits.shape[0]} rows of {logits.shape[1]} tokens, "
            f"got {bitmask.dtype} {list(bitmask.shape)}"
        )
    if rows is not None and (rows.dtype != torch.int32 or rows.dim() != 1):
        raise OperationInputError(f"rows must be an int32 vector, got {rows.dtype} {list(rows.shape)}")
