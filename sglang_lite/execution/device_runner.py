"""One step on an accelerator: plan -> one copy of inputs -> forward pass -> sampling -> one copy of tokens back.

Nothing here waits for the device, but for what ``streams`` names; ``launch`` returns while the step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionPlan, KVGeometry
from sglang_lite.adapters.cuda.attention import AttentionPlanner, CudaAttentionPlan
from sglang_lite.adapters.cuda.operations import CudaOperations
from sglang_lite.execution.decode_graphs import DecodeGraphs, GraphLimits
from sglang_lite.execution.device import Device
from sglang_lite.execution.device_inputs import (
    InputBuffers,
    PlanPart,
    StepInputs,
    decode_part,
    prefill_part,
    token_ids,
    whole_plan,
)
from sglang_lite.execution.device_sampler import DeviceSampler
from sglang_lite.execution.draft_model import Drafter
from sglang_lite.execution.embedded_prompts import given_embeddings
from sglang_lite.execution.grammar_masks import NO_GUESSES, ConstrainedStep, GrammarMasks, Guesses, Matchers, advance
from sglang_lite.execution.kv_pool import allocate_kv_pool
from sglang_lite.execution.logprobs import LogprobScorer
from sglang_lite.execution.model_adapters import ModelAdapters
from sglang_lite.execution.recurrent_state import RecurrentStatePool
from sglang_lite.execution.streams import FinishedStep, LaunchedStep, PendingStep, PlanGate, TokenBuffers
from sglang_lite.execution.verification import Verification, verification_of
from sglang_lite.layers.given_embeddings import GivenEmbeddings
from sglang_lite.layers.parallel import SINGLE, ParallelGroup
from sglang_lite.models.base import CausalLanguageModel, RecurrentLanguageModel
from sglang_lite.scheduler.plan import SamplingColumns, ScoredPositions, StepOutput, StepPlan
from sglang_lite.types import Int32Array

FIRST_INPUTS = 1 << 16
"""int32 elements of the input buffers at first; a larger step makes them grow."""

NO_ROWS: Int32Array = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class _Lane:
    """What steps on one stream use one after another."""

    inputs: InputBuffers
    planner: AttentionPlanner
    gate: PlanGate


@dataclass(frozen=True, slots=True)
class _Forwarded:
    """Hidden states [T, hidden] in the plan's order; the last token and the row of each row that samples, int32[S]."""

    hidden: Tensor
    sample_tokens: Tensor
    sample_rows: Tensor


def _forwarded(hidden: Tensor, inputs: StepInputs) -> _Forwarded:
    return _Forwarded(hidden, inputs.sample_tokens.device, inputs.sample_rows.device)


class DeviceRunner:
    """Launches plans one after another. Owns the KV pool and the last token of every row.

    Args:
        model: the model, on the device of ``ops``.
        geometry: shape of the pool as the scheduler sees it; one more page is allocated, which the padding of captured
            batches writes to.
        num_rows: rows of the request table.
        batch_sizes: decode batches to capture, rising; empty for none.
        pad_graphs: whether a batch may run in the graph of a larger one.
        context_length: most tokens of a sequence.
        side_by_side: run the decode rows and the prefill chunks of a step on two streams.
        seed: of requests without one.
        parallel: the ranks that share the model. Rank 0 draws the tokens, the others take them from it.
        adapters: low-rank adapters of the model; None when it was loaded without. Steps that use one are not captured.
        draft: makes the guesses that plans leave open; None where no plan does.
    """

    def __init__(
        self,
        model: CausalLanguageModel,
        ops: CudaOperations,
        device: Device,
        geometry: KVGeometry,
        *,
        num_rows: int,
        context_length: int,
        batch_sizes: tuple[int, ...] = (),
        pad_graphs: bool = True,
        side_by_side: bool = False,
        seed: int | None = None,
        parallel: ParallelGroup = SINGLE,
        adapters: ModelAdapters | None = None,
        draft: Drafter | None = None,
    ) -> None:
        self.geometry = geometry
        self._model = model
        self._ops = ops
        self._device = device
        self._parallel = parallel
        self._side_by_side = side_by_side
        self.adapters = adapters
        self._draft = draft
        with device.activate():
            # Page ``num_pages`` is the scratch page; nobody but the padding of captured batches knows of it.
            self._pool = allocate_kv_pool(replace(geometry, num_pages=geometry.num_pages + 1), device.torch_device)
            self.pool = self._pool[: geometry.num_pages]
            self._recurrent = self._recurrent_pool(num_rows)
            self._sampler = DeviceSampler(device, ops.sampling, model.vocab_size, num_rows, seed)
            self._masks = GrammarMasks(ops.grammar, model.vocab_size, device.upload)
            self._constrained: ConstrainedStep | None = None
            self._scorer = LogprobScorer(model.logits, model.vocab_size)
            self._last_token = torch.zeros(num_rows, dtype=torch.int64, device=device.torch_device)
            self._lane = _Lane(InputBuffers(device, FIRST_INPUTS), ops.planner, PlanGate(device))
            self._token_buffers = TokenBuffers(device, num_rows)
            self._graphs = self._decode_graphs(batch_sizes, pad_graphs, context_length)
            if side_by_side:
                self._prefill_lane = _Lane(InputBuffers(device, FIRST_INPUTS), ops.new_planner(), PlanGate(device))
                self._inputs_there, self._prefill_done = device.event(), device.event()

    @property
    def captured_batch_sizes(self) -> tuple[int, ...]:
        """Decode batches with a graph."""
        return self._graphs.batch_sizes

    @torch.inference_mode()
    def capture(self, progress: Callable[[int], None] = lambda size: None) -> None:
        """Capture the decode graphs. Both kinds of steps must have run once."""
        with self._device.activate():
            self._graphs.capture(progress)
            self._device.synchronize()

    def run(self, plan: StepPlan) -> StepOutput:
        """Launch a step and wait for it."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Queue a step behind those launched before; the plan's arrays may change as soon as this returns."""
        with self._device.activate():
            if self._draft is not None:
                plan = self._draft.fill(plan)
            if len(plan.page_copies):
                copies = self._device.upload(np.ascontiguousarray(plan.page_copies.T, dtype=np.int64))
                self._ops.copy_pages(self._pool, copies[0], copies[1])
            forwarded = self._forward(plan)
            if self._draft is not None and plan.draft_lens is None:
                self._draft.observe(plan, forwarded.hidden, np.cumsum(plan.query_lens, dtype=np.int64) - 1)
            if len(plan.sample_index) == 0:
                return self._pending(plan, None, self._scorer.score(plan, forwarded.hidden, None, NO_ROWS))
            if plan.draft_lens is not None:
                return FinishedStep(self._verify(plan, forwarded, verification_of(plan, plan.draft_lens)))
            logits = self._model.logits(self._sampling_hidden(plan, forwarded))
            raw_logits = self._scorer.keep_raw(plan, logits)
            tokens = self._sample(plan, logits, forwarded.sample_rows).int()
            scored = []
            if plan.logprobs:  # rare: waits for the device
                scored = self._scorer.score(plan, forwarded.hidden, raw_logits, tokens.cpu().numpy())
            pending = self._pending(plan, tokens, scored)
            if not plan.matchers:
                return pending
            self._constrained = ConstrainedStep(pending, plan.matchers)
            return self._constrained

    def _verify(self, plan: StepPlan, forwarded: _Forwarded, draws: Verification) -> StepOutput:
        """Draw a token for each token fed and keep what confirms the guesses. The host has to see the draws, because
        the next step's guesses depend on them."""
        upload = self._device.upload
        logits = self._model.logits(forwarded.hidden.index_select(0, upload(draws.tokens)))
        first = upload(draws.starts)  # rows with scores have one draw
        raw_logits = self._scorer.keep_raw(plan, logits.index_select(0, first)) if plan.logprobs else None
        drawn = self._draw(
            logits,
            draws.columns,
            draws.rows,
            upload(draws.rows),
            draws.generated,
            draws.suppressed,
            plan.resumed,
            draws.matchers,
            draws.guesses,
        )
        on_host = drawn.int().cpu().numpy()
        advance(draws.matchers, on_host, draws.guesses)
        tokens, counts = draws.accept(plan, on_host)
        if self._draft is not None:
            self._draft.observe(plan, forwarded.hidden, draws.newest(plan, counts))
        newest = upload(tokens[np.cumsum(counts) - 1].astype(np.int64))
        self._last_token.index_copy_(0, forwarded.sample_rows.long(), newest.clamp(min=0))
        scored = self._scorer.score(plan, forwarded.hidden, raw_logits, on_host[draws.starts])
        return StepOutput(plan.step, tokens, scored, counts)

    def _forward(self, plan: StepPlan) -> _Forwarded:
        if self._recurrent is not None:
            return self._forward_recurrent(plan, self._recurrent)
        if self.adapters is not None:
            self.adapters.select(plan)
        if plan.adapter_slots is not None or plan.embedded:
            return self._forward_together(plan)
        if plan.num_decode == len(plan.rows):
            return self._decode(whole_plan(plan), plan.sample_index)
        if self._side_by_side and plan.num_decode:
            return self._forward_side_by_side(plan)
        return self._forward_together(plan)

    def _forward_together(self, plan: StepPlan) -> _Forwarded:
        """All rows in one pass that is not captured."""
        inputs, attention_plan = self._prepare(self._lane, whole_plan(plan), plan.sample_index)
        given = given_embeddings(plan, self._device.upload)
        return _forwarded(self._run_model(inputs, attention_plan, given), inputs)

    def _decode(self, part: PlanPart, sample_index: Int32Array) -> _Forwarded:
        """A step of decode rows, captured where it can be."""
        if self._graphs.serves(part):
            inputs, hidden = self._graphs.run(part, sample_index)
        else:
            inputs, attention_plan = self._prepare(self._lane, part, sample_index)
            hidden = self._run_model(inputs, attention_plan)
        return _forwarded(hidden, inputs)

    def _forward_side_by_side(self, plan: StepPlan) -> _Forwarded:
        """Prefill on the second stream, decode on the compute stream, joined before sampling."""
        num_decode = plan.num_decode
        first_prefill = int(np.searchsorted(plan.sample_index, num_decode))
        inputs, attention_plan = self._prepare(
            self._prefill_lane, prefill_part(plan), plan.sample_index[first_prefill:] - np.int32(num_decode)
        )
        self._inputs_there.record()
        with self._device.second_stream():
            self._inputs_there.wait()
            prefill = _forwarded(self._run_model(inputs, attention_plan), inputs)
            self._prefill_done.record()
        decode = self._decode(decode_part(plan), plan.sample_index[:first_prefill])
        self._prefill_done.wait()
        self._device.share(prefill.hidden)
        return _Forwarded(
            torch.cat([decode.hidden, prefill.hidden]),
            torch.cat([decode.sample_tokens, prefill.sample_tokens + num_decode]),
            torch.cat([decode.sample_rows, prefill.sample_rows]),
        )

    def _prepare(self, lane: _Lane, part: PlanPart, sample_index: Int32Array) -> tuple[StepInputs, CudaAttentionPlan]:
        """Queue the copies of a step's inputs and plans on the current stream."""
        inputs = lane.inputs.stage(part, self.geometry.page_size, sample_index)
        lane.inputs.upload()
        lane.gate.enter()
        attention_plan = lane.planner.plan(inputs.paged)
        lane.gate.leave()
        return inputs, attention_plan

    def _forward_recurrent(self, plan: StepPlan, states: RecurrentStatePool) -> _Forwarded:
        inputs, attention_plan = self._prepare(self._lane, whole_plan(plan), plan.sample_index)
        model = self._model
        if not isinstance(model, RecurrentLanguageModel):
            raise TypeError(f"{type(model).__name__} has a pool of states and takes none")
        ids = token_ids(inputs, inputs.paged.num_decode, self._last_token)
        positions = inputs.paged.positions.device.long()
        given = given_embeddings(plan, self._device.upload)
        hidden = model.forward(ids, positions, self._pool, attention_plan, states.step(plan), given=given)
        return _forwarded(hidden, inputs)

    def _run_model(
        self, inputs: StepInputs, attention_plan: AttentionPlan, given: GivenEmbeddings | None = None
    ) -> Tensor:
        """Hidden states [T, hidden]. Reads nothing but device memory, so that it can be captured."""
        ids = token_ids(inputs, inputs.paged.num_decode, self._last_token)
        positions = inputs.paged.positions.device.long()
        return self._model.forward(ids, positions, self._pool, attention_plan, given=given)

    def _sampling_hidden(self, plan: StepPlan, forwarded: _Forwarded) -> Tensor:
        """[S, hidden]: the last token of each row that samples."""
        if plan.num_decode == len(plan.rows) == len(plan.sample_index):
            return forwarded.hidden
        return forwarded.hidden.index_select(0, forwarded.sample_tokens)

    def _sample(self, plan: StepPlan, logits: Tensor, rows: Tensor) -> Tensor:
        """int64[S], also kept as what the rows feed next."""
        host_rows = plan.rows[plan.sample_index]
        tokens = self._draw(
            logits, plan.sampling, host_rows, rows, plan.generated, plan.suppressed, plan.resumed, plan.matchers
        )
        # A row without a token ends; what it would feed next must only be a valid index.
        self._last_token.index_copy_(0, rows.long(), tokens.clamp(min=0))
        return tokens

    def _draw(
        self,
        logits: Tensor,
        columns: SamplingColumns,
        rows: Int32Array,
        device_rows: Tensor,
        generated: Int32Array,
        suppressed: dict[int, tuple[int, ...]],
        resumed: dict[int, Int32Array],
        matchers: Matchers,
        guesses: Guesses = NO_GUESSES,
    ) -> Tensor:
        """Tokens int64[S], the same on every rank."""
        if self._parallel.rank == 0:
            if matchers:
                if self._constrained is not None:
                    self._constrained.result()
                    self._constrained = None
                suppressed = self._masks.apply(logits, matchers, suppressed, guesses)
            tokens = self._sampler.sample(logits, columns, rows, device_rows, generated, suppressed, resumed)
        else:
            tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        return self._parallel.broadcast(tokens)

    def _pending(self, plan: StepPlan, tokens: Tensor | None, scored: list[ScoredPositions]) -> PendingStep:
        buffer = self._token_buffers.take()
        count = 0 if tokens is None else len(tokens)
        if tokens is not None:
            buffer[:count].copy_(tokens, non_blocking=True)
        done = self._device.event()
        done.record()
        return PendingStep(plan.step, buffer, count, done, scored, self._token_buffers.give_back)

    def _recurrent_pool(self, num_rows: int) -> RecurrentStatePool | None:
        model = self._model
        if not isinstance(model, RecurrentLanguageModel):
            return None
        return RecurrentStatePool(model.recurrent, num_rows, model.activation_dtype, self._ops)

    def _decode_graphs(self, batch_sizes: tuple[int, ...], pad: bool, context_length: int) -> DecodeGraphs:
        """Recurrent states are addressed by plans made on the host, so that such a model runs without graphs."""
        sizes = () if self._recurrent is not None else batch_sizes
        largest = sizes[-1] if sizes else 0
        longest = -(-context_length // self.geometry.page_size)
        # More only happens when many sequences share long prefixes.
        max_pages = min(largest * longest, 2 * self.geometry.num_pages) + largest
        limits = GraphLimits(sizes, max_pages, self.geometry.num_pages, self.geometry.page_size, pad)
        return DecodeGraphs(self._device, self._ops, self._run_model, limits, self._lane.gate)
