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
        shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
        allowed = (bitmask.unsqueeze(-1) >> shifts & 1).flatten(-2)[:, : logits.shape[1]].bool()
        if rows is not None:
            others = torch.ones(logits.shape[0], 1, dtype=torch.bool, device=logits.device)
            allowed |= others.index_fill_(0, rows.long(), False)
        logits.masked_fill_(~allowed, float("-inf"))


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
