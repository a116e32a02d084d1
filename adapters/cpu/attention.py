"""Paged attention on the host: where keys and values are written, and how decode and prefill rows read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sglang_lite.adapters.base import AttentionBatch, KVGeometry, OperationInputError
from sglang_lite.adapters.cpu.decode_workspace import DecodeWorkspace
from sglang_lite.adapters.cpu.general_attention import GeneralAttention
from sglang_lite.adapters.cpu.paged_decode import PagedDecode, plan_paged_decode
from sglang_lite.adapters.cpu.pool_view import PoolReader
from sglang_lite.adapters.cpu.prefill import PrefillGroup, plan_prefill, prefill_attention
from sglang_lite.adapters.cpu.query_tokens import QueryTokens
from sglang_lite.adapters.cpu.workspace_decode import WorkspaceDecode, plan_workspace_decode


class CpuAttentionPlan:
    """Indices of one step.

    Attributes:
        pool_rows: int64[layers, 2, T], vectors of the pool that receive the tokens' keys and values.
        first_written: tokens before this one reach the pool through the workspace, at the end of the step.
        write_rows: of ``pool_rows``, those of the other tokens: for each layer's keys and values in turn.
        num_decode: tokens of the rows that decode or verify.
        decode: how these read, or None without any.
        prefill: the prefill chunks, those behind one prefix together.
        batch: the step itself.
        general: how layers with sinks or capped scores read, made at their first use.
    """

    __slots__ = ("batch", "decode", "first_written", "general", "num_decode", "pool_rows", "prefill", "write_rows")

    def __init__(
        self,
        pool_rows: Tensor,
        batch: AttentionBatch,
        decode: PagedDecode | WorkspaceDecode | None,
        prefill: list[PrefillGroup],
    ) -> None:
        self.pool_rows = pool_rows
        self.num_decode = sum(batch.query_lens[: batch.num_decode + batch.num_verify])
        self.first_written = self.num_decode if isinstance(decode, WorkspaceDecode) and decode.keeps_all else 0
        self.write_rows = pool_rows[:, :, self.first_written :].flatten(0, 1).unbind(0)  # all views in one call
        self.batch = batch
        self.general: GeneralAttention | None = None
        self.decode = decode
        self.prefill = prefill


class CpuAttention:
    """Plans and runs attention steps; owns the scratch memory they share.

    Args:
        workspace_bytes: memory for copies of running sequences (see ``decode_workspace``); 0 for none.
    """

    def __init__(self, workspace_bytes: int) -> None:
        self._workspace_bytes = workspace_bytes
        self._reader: PoolReader | None = None
        self._workspace: DecodeWorkspace | None = None
        self._is_unfinished = False

    def plan(self, batch: AttentionBatch, geometry: KVGeometry) -> CpuAttentionPlan:
        """Work common to the layers of one step.

        Raises:
            OperationInputError: an empty step, or a slot outside the pool.
        """
        check_slots(batch.slot_mapping, geometry)
        reader = self._prepare(geometry)
        num_rows = batch.num_decode + batch.num_verify
        table = batch.page_table.numpy()
        if self._workspace is not None:
            # A page that changes hands is written from its first slot on (or copied as a whole, see pages_copied).
            slots = batch.slot_mapping.numpy()
            self._workspace.drop_rewritten(slots[slots % geometry.page_size == 0] // geometry.page_size)
        prefill = plan_prefill(reader, batch, table) if num_rows < len(batch.kv_lens) else []
        if prefill and batch.rows is not None and self._workspace is not None:
            self._workspace.forget(batch.rows[num_rows:])
        decode = self._plan_decode(reader, batch, table[:num_rows]) if num_rows else None
        self._is_unfinished = True
        return CpuAttentionPlan(reader.slot_rows(batch.slot_mapping), batch, decode, prefill)

    def release(self) -> None:
        """Let go of the copies of running sequences; no step is under way."""
        self._reader = self._workspace = None
        self._is_unfinished = False

    def pages_copied(self, destination: Tensor) -> None:
        """Pages int64[C] were overwritten outside of a step."""
        if self._workspace is not None:
            self._workspace.drop_rewritten(destination.numpy())

    def _prepare(self, geometry: KVGeometry) -> PoolReader:
        if self._reader is None or self._reader.geometry != geometry:
            self._reader = PoolReader(geometry)
            self._workspace = DecodeWorkspace(geometry, self._workspace_bytes) if self._workspace_bytes else None
        elif self._is_unfinished and self._workspace is not None:
            self._workspace.reset()  # the step before failed on its way, so its tokens may not be everywhere
        return self._reader

    def _plan_decode(
        self, reader: PoolReader, batch: AttentionBatch, table: npt.NDArray[np.int64]
    ) -> PagedDecode | WorkspaceDecode:
        num_rows = len(table)
        queries = QueryTokens.of(np.asarray(batch.query_lens[:num_rows]), np.asarray(batch.kv_lens[:num_rows]))
        if self._workspace is None or batch.rows is None:
            return plan_paged_decode(reader, table[queries.row], queries.lengths)
        return plan_workspace_decode(self._workspace, reader, batch.rows[:num_rows], queries, table)

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pool: Tensor,
        layer: int,
        plan: CpuAttentionPlan,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
        logit_cap: float | None = None,
    ) -> Tensor:
        """Append [T, G, D] keys and values, attend with [T, H, D] queries, return [T, H * D]."""
        if self._reader is None:
            raise OperationInputError("attention needs the plan of this step (plan_attention)")
        if query.dtype != pool.dtype:
            query, key, value, wide = *(x.to(pool.dtype) for x in (query, key, value)), query.dtype
            mixed = self.run(query, key, value, pool, layer, plan, scale, window, sinks, logit_cap)
            return mixed.to(wide)
        reader = self._reader
        num_tokens, num_heads, head_dim = query.shape
        if sinks is not None or logit_cap is not None:
            self._write(reader.vectors(pool), plan.pool_rows[layer].unbind(0), key, value)
            if plan.general is None:
                plan.general = GeneralAttention(plan.batch, reader)
            mixed = plan.general.run(query, pool, layer, scale=scale, window=window, sinks=sinks, logit_cap=logit_cap)
            return self._finish(mixed, pool, layer, plan)
        n, first = plan.num_decode, plan.first_written
        if first < num_tokens:
            self._write(reader.vectors(pool), plan.write_rows[2 * layer : 2 * layer + 2], key[first:], value[first:])
        output: Tensor | None = None
        if plan.decode is not None:
            if n == num_tokens:
                mixed = plan.decode.run(reader, query, key, value, pool, layer, scale, window)
                return self._finish(mixed, pool, layer, plan)
            output = plan.decode.run(reader, query[:n], key[:n], value[:n], pool, layer, scale, window)
        if plan.prefill:
            decoded, output = output, query.new_empty(num_tokens, num_heads, head_dim)
            if decoded is not None:
                output[:n] = decoded
            for group in plan.prefill:
                prefill_attention(group, reader, query, key, value, pool, layer, scale, window, output)
        assert output is not None  # a plan has rows
        return self._finish(output, pool, layer, plan)

    @staticmethod
    def _write(vectors: Tensor, rows: Sequence[Tensor], key: Tensor, value: Tensor) -> None:
        vectors.index_copy_(0, rows[0], key.reshape(key.shape[0], -1))
        vectors.index_copy_(0, rows[1], value.reshape(value.shape[0], -1))

    def _finish(self, output: Tensor, pool: Tensor, layer: int, plan: CpuAttentionPlan) -> Tensor:
        reader = self._reader
        assert reader is not None
        self._is_unfinished = layer + 1 < reader.geometry.num_layers
        if not self._is_unfinished and plan.first_written and isinstance(plan.decode, WorkspaceDecode):
            plan.decode.write_pool(reader.vectors(pool), plan.pool_rows[:, :, : plan.num_decode])
        return output.view(output.shape[0], -1)


def check_slots(slot_mapping: Tensor, geometry: KVGeometry) -> None:
    """Raise OperationInputError for an empty slot map or a slot outside the pool, naming its index."""
    if slot_mapping.numel() == 0:
        raise OperationInputError("slot_mapping is empty: a step needs at least one token")
    slots = slot_mapping.numpy()
    capacity = geometry.num_pages * geometry.page_size
    if int(slots.min()) < 0 or int(slots.max()) >= capacity:
        index = int(np.flatnonzero((slots < 0) | (slots >= capacity))[0])
        raise OperationInputError(f"slot_mapping[{index}] is {int(slots[index])}; the pool has {capacity} slots")
