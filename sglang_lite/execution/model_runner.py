"""One step on the device: plan -> tensors -> forward pass -> tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionPlan, KVGeometry, Operations
from sglang_lite.execution.draft_model import Drafter
from sglang_lite.execution.embedded_prompts import given_embeddings
from sglang_lite.execution.grammar_masks import GrammarMasks, advance, upload_to_host
from sglang_lite.execution.host_batch import attention_batch
from sglang_lite.execution.kv_pool import allocate_kv_pool
from sglang_lite.execution.logprobs import LogprobScorer
from sglang_lite.execution.memory_saver import ReleasedModel
from sglang_lite.execution.model_adapters import ModelAdapters
from sglang_lite.execution.recurrent_state import RecurrentStatePool
from sglang_lite.execution.sampler import Sampler
from sglang_lite.execution.verification import Verification, verification_of
from sglang_lite.layers.parallel import SINGLE, ParallelGroup
from sglang_lite.models.base import CausalLanguageModel, RecurrentLanguageModel
from sglang_lite.scheduler.plan import StepOutput, StepPlan
from sglang_lite.types import Int32Array


class ModelRunner:
    """Runs plans one after another. Owns the KV pool, and the last token and recurrent state of every row.

    Args:
        model: the model, on the device of ``ops``.
        ops: operations of that device.
        geometry: shape of the pool.
        num_rows: rows of the request table.
        seed: of the sampler, for requests without one.
        parallel: the ranks that share the model. Rank 0 draws the tokens, the others take them from it.
        adapters: low-rank adapters of the model; None when it was loaded without.
        draft: makes the guesses that plans leave open; None where no plan does.
    """

    def __init__(
        self,
        model: CausalLanguageModel,
        ops: Operations,
        geometry: KVGeometry,
        *,
        num_rows: int,
        seed: int | None = None,
        parallel: ParallelGroup = SINGLE,
        adapters: ModelAdapters | None = None,
        draft: Drafter | None = None,
    ) -> None:
        self.geometry = geometry
        self.pool = allocate_kv_pool(geometry, ops.device)
        self._model = model
        self._ops = ops
        self._parallel = parallel
        self.adapters = adapters
        self._draft = draft
        self._sampler = Sampler(model.vocab_size, ops.device, seed)
        self._masks = GrammarMasks(ops.grammar, model.vocab_size, upload_to_host)
        self._scorer = LogprobScorer(model.logits, model.vocab_size)
        self._last_token = torch.zeros(num_rows, dtype=torch.int64, device=ops.device)
        self._recurrent: RecurrentStatePool | None = None
        self._new_recurrent: Callable[[], RecurrentStatePool] | None = None
        if isinstance(model, RecurrentLanguageModel):
            dtype = model.activation_dtype
            self._new_recurrent = partial(RecurrentStatePool, model.recurrent, num_rows, dtype, ops)
            self._recurrent = self._new_recurrent()

    def release_pool(self) -> None:
        """Let go of the KV pool and of recurrent states; no step may run before ``restore_pool``."""
        self.pool = self.pool.new_empty(0)
        self._recurrent = None

    def restore_pool(self) -> None:
        """Allocate them again."""
        self.pool = allocate_kv_pool(self.geometry, self._ops.device)
        if self._new_recurrent is not None:
            self._recurrent = self._new_recurrent()

    def release_model(self) -> None:
        """Let go of the weights; no step may run before ``replace_model``."""
        self.replace_model(ReleasedModel(self._model))

    def replace_model(self, model: CausalLanguageModel) -> None:
        """Run another model of the same shapes from the next step on."""
        self._model = model
        self._scorer = LogprobScorer(model.logits, model.vocab_size)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Copy pages, feed the tokens, sample, score."""
        if self._draft is not None:
            plan = self._draft.fill(plan)
        if len(plan.page_copies):
            copies = torch.from_numpy(plan.page_copies).long()
            self._ops.copy_pages(self.pool, copies[:, 0], copies[:, 1])
        attention_plan = self._ops.plan_attention(attention_batch(plan), self.geometry)
        if self.adapters is not None:
            self.adapters.select(plan)
        positions = torch.from_numpy(plan.positions.astype(np.int64))
        hidden = self._forward(plan, positions, attention_plan)
        if self._draft is not None and plan.draft_lens is None:
            self._draft.observe(plan, hidden, np.cumsum(plan.query_lens, dtype=np.int64) - 1)
        if len(plan.sample_index) == 0:
            tokens = np.empty(0, dtype=np.int32)
            return StepOutput(plan.step, tokens, self._scorer.score(plan, hidden, None, tokens))
        if plan.draft_lens is not None:
            return self._verify(plan, hidden, verification_of(plan, plan.draft_lens))
        logits = self._model.logits(self._sampling_hidden(plan, hidden))
        raw_logits = self._scorer.keep_raw(plan, logits)
        tokens = self._sample(plan, logits)
        if plan.matchers:
            advance(plan.matchers, tokens)
        return StepOutput(plan.step, tokens, self._scorer.score(plan, hidden, raw_logits, tokens))

    def _verify(self, plan: StepPlan, hidden: Tensor, draws: Verification) -> StepOutput:
        """Draw a token for each token fed and keep what confirms the guesses."""
        logits = self._model.logits(hidden.index_select(0, torch.from_numpy(draws.tokens)))
        first = torch.from_numpy(draws.starts)  # rows with scores have one draw
        raw_logits = self._scorer.keep_raw(plan, logits.index_select(0, first)) if plan.logprobs else None
        if self._parallel.rank == 0:
            suppressed = self._masks.apply(logits, draws.matchers, draws.suppressed, draws.guesses)
            drawn = self._sampler.sample(logits, draws.columns, draws.rows, draws.generated, suppressed, plan.resumed)
        else:
            drawn = torch.empty(len(draws.tokens), dtype=torch.int64, device=logits.device)
        drawn = self._parallel.broadcast(drawn)
        on_host = drawn.int().cpu().numpy()
        advance(draws.matchers, on_host, draws.guesses)
        tokens, counts = draws.accept(plan, on_host)
        if self._draft is not None:
            self._draft.observe(plan, hidden, draws.newest(plan, counts))
        newest = torch.from_numpy(tokens[np.cumsum(counts) - 1].astype(np.int64))
        rows = torch.from_numpy(plan.rows[plan.sample_index]).long()
        self._last_token.index_copy_(0, rows, newest.clamp(min=0))
        scored = self._scorer.score(plan, hidden, raw_logits, on_host[draws.starts])
        return StepOutput(plan.step, tokens, scored, counts)

    def _forward(self, plan: StepPlan, positions: Tensor, attention_plan: AttentionPlan) -> Tensor:
        ids, given = self._input_ids(plan), given_embeddings(plan, torch.from_numpy)
        if self._recurrent is None:
            return self._model.forward(ids, positions, self.pool, attention_plan, given=given)
        assert isinstance(self._model, RecurrentLanguageModel)  # or there would be no states
        states = self._recurrent.step(plan)
        return self._model.forward(ids, positions, self.pool, attention_plan, states, given=given)

    def _input_ids(self, plan: StepPlan) -> Tensor:
        """int64[T]: a decode row's token comes from the step before, wherever the plan does not name it."""
        ids = torch.from_numpy(plan.input_ids.astype(np.int64))
        if plan.num_decode:
            decode = ids[: plan.num_decode]
            known = self._last_token[torch.from_numpy(plan.rows[: plan.num_decode]).long()]
            torch.where(decode < 0, known, decode, out=decode)
        return ids

    def _sampling_hidden(self, plan: StepPlan, hidden: Tensor) -> Tensor:
        """[S, hidden]: the last token of each row that samples."""
        if plan.num_decode == len(plan.rows) == len(plan.sample_index):
            return hidden
        last = np.cumsum(plan.query_lens, dtype=np.int64)[plan.sample_index] - 1
        return hidden.index_select(0, torch.from_numpy(last))

    def _sample(self, plan: StepPlan, logits: Tensor) -> Int32Array:
        rows = plan.rows[plan.sample_index]
        if self._parallel.rank == 0:
            suppressed = self._masks.apply(logits, plan.matchers, plan.suppressed)
            tokens = self._sampler.sample(logits, plan.sampling, rows, plan.generated, suppressed, plan.resumed)
        else:
            tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        tokens = self._parallel.broadcast(tokens)
        # A row without a token ends; what it would feed next must only be a valid index.
        self._last_token.index_copy_(0, torch.from_numpy(rows).long(), tokens.clamp(min=0))
        return tokens.int().cpu().numpy()
