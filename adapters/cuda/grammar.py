"""Grammar masks by ``sgl_kernel``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sglang_lite.adapters.base import OperationInputError
from sglang_lite.adapters.cpu.grammar import check_bitmask
from sglang_lite.adapters.cuda.wheels import Wheels


class CudaGrammar:
    """See ``adapters.grammar.GrammarOperations``. Both kernel lines have the kernel."""

    def __init__(self, wheels: Wheels) -> None:
        self._kernels: Any = wheels.sgl_kernel

    def apply_bitmask(self, logits: Tensor, bitmask: Tensor, rows: Tensor | None = None) -> None:
        """Logits of tokens whose bit is 0 become -inf, in place."""
        check_bitmask(logits, bitmask, rows)
        if not logits.is_contiguous() or not bitmask.is_contiguous():
            raise OperationInputError("the grammar mask is applied to contiguous logits with contiguous bits")
        self._kernels.apply_token_bitmask_inplace_cuda(logits, bitmask, indices=rows)
