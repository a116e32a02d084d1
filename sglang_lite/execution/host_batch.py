"""A plan as attention on the host takes it."""

from __future__ import annotations

import numpy as np
import torch

from sglang_lite.adapters.base import AttentionBatch
from sglang_lite.scheduler.plan import StepPlan


def attention_batch(plan: StepPlan) -> AttentionBatch:
    """The columns of a plan that attention needs."""
    return AttentionBatch(
        num_decode=plan.num_decode,
        num_verify=plan.num_verify,
        query_lens=plan.query_lens.tolist(),
        kv_lens=plan.kv_lens.tolist(),
        slot_mapping=torch.from_numpy(plan.slot_mapping),
        page_table=torch.from_numpy(plan.page_table.astype(np.int64)),
        rows=plan.rows,
    )
