"""The recurrent operations written token by token: the oracle of every adapter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_lite.adapters.recurrent import RecurrentBatch, RecurrentPlan


@dataclass(frozen=True, slots=True)
class ReferenceRecurrentPlan(RecurrentPlan):
    """The step, unprepared."""

    batch: RecurrentBatch

    def spans(self) -> list[tuple[int, bool, range]]:
        """(row of the pool, fresh, tokens) of each row of the step."""
        result = []
        start = 0
        for row, fresh, count in zip(self.batch.rows, self.batch.fresh, self.batch.query_lens, strict=True):
            result.append((row, fresh, range(start, start + count)))
            start += count
        return result


class ReferenceRecurrent:
    """See ``sglang_lite.adapters.recurrent.RecurrentOperations`` for the contracts."""

    def plan(self, batch: RecurrentBatch) -> ReferenceRecurrentPlan:
        return ReferenceRecurrentPlan(batch)

    def causal_conv(self, x: Tensor, weight: Tensor, state: Tensor, plan: RecurrentPlan) -> Tensor:
        assert isinstance(plan, ReferenceRecurrentPlan)
        output = torch.empty_like(x)
        for row, fresh, tokens in plan.spans():
            window = torch.zeros_like(state[row]) if fresh else state[row].clone()
            for token in tokens:
                window = torch.cat([window, x[token, :, None]], dim=1)
                total = (window.float() * weight.float()).sum(1)
                output[token] = (total * torch.sigmoid(total)).to(x.dtype)
                window = window[:, 1:]
            state[row] = window
        return output

    def gated_delta(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        state: Tensor,
        plan: RecurrentPlan,
    ) -> Tensor:
        assert isinstance(plan, ReferenceRecurrentPlan)
        num_heads, repeats = value.shape[1], value.shape[1] // key.shape[1]
        output = torch.empty_like(value)
        for row, fresh, tokens in plan.spans():
            if fresh:
                state[row] = 0.0
            for token in tokens:
                for head in range(num_heads):
                    k, q = (_unit(x[token, head // repeats].float()) for x in (key, query))
                    decay = log_decay[token, head].float().exp().reshape(-1, 1)
                    memory = state[row, head] * decay
                    correction = (value[token, head].float() - k @ memory) * beta[token, head].float()
                    memory = memory + torch.outer(k, correction)
                    output[token, head] = ((q * len(q) ** -0.5) @ memory).to(value.dtype)
                    state[row, head] = memory
        return output


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum() + 1e-6)
