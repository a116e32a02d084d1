"""Paged attention on CUDA: one plan a step, one planned wrapper for each kind of layer.

Which kinds of layers a model has is learned from its first forward pass; later steps plan all of them before the
pass, so that nothing is planned between two layers or inside a captured graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_lite.adapters.base import AttentionPlan, OperationInputError
from sglang_lite.adapters.cuda.paging import PagedStep
from sglang_lite.adapters.cuda.wrappers import (
    AttentionVariant,
    GraphBuffers,
    LatentVariant,
    PagedWrapper,
    PageIndices,
    Variant,
    WrapperSettings,
    make_wrapper,
)


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Query [T, H, D], key and value [T, G, D] of one layer, strided rows allowed, and the sinks float32[H] or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None


class LayerViews:
    """Strided views of the pool by layer, made once: (keys, values), each [pages, page_size, G, D]."""

    def __init__(self) -> None:
        self._pool: Tensor | None = None
        self._views: list[tuple[Tensor, Tensor]] = []

    def of(self, pool: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """The views of a layer; another pool than last time makes them anew."""
        if self._pool is not pool:
            if pool.dim() != 6 or pool.shape[2] != 2 or pool.stride(-1) != 1:
                raise OperationInputError(
                    f"KV pool of shape {list(pool.shape)}: expected [pages, layers, 2, page_size, heads, head_dim], "
                    "contiguous in the last dimension"
                )
            self._views = [(pool[:, index, 0], pool[:, index, 1]) for index in range(pool.shape[1])]
            self._pool = pool
        return self._views[layer]


class AttentionPlanner:
    """The wrappers of one lane. Steps of a lane run one after another; two lanes may run at the same time.

    Args:
        settings: of the wrappers; their workspace belongs to this lane.
        buffers: given for the steps of one captured batch size.
        known: kinds of layers seen so far by any lane of the same model; this planner adds to it.
    """

    def __init__(
        self, settings: WrapperSettings, known: dict[Variant, None], buffers: GraphBuffers | None = None
    ) -> None:
        self._settings = settings
        self._known = known
        self._buffers = buffers
        self._decode: dict[Variant, PagedWrapper] = {}
        self._prefill: dict[Variant, PagedWrapper] = {}

    @property
    def is_fixed(self) -> bool:
        """Whether the wrappers read memory at fixed addresses, for captured graphs."""
        return self._buffers is not None

    def plan(self, step: PagedStep) -> CudaAttentionPlan:
        """Plan every known kind of layer; the step's arena has been uploaded (its copy may still be on its way)."""
        plan = CudaAttentionPlan(self, step)
        for variant in self._known:
            plan.wrappers(variant)
        return plan

    def learn(self, variant: Variant) -> None:
        """A layer of this kind exists.

        Raises:
            OperationInputError: inside a captured graph, where it is too late to plan.
        """
        if variant not in self._known:
            if self.is_fixed:
                raise OperationInputError(
                    f"attention {variant} was not seen before its step was captured: run one step without a graph first"
                )
            self._known[variant] = None

    def wrapper(self, variant: Variant, *, decode: bool) -> PagedWrapper:
        """The wrapper of a kind of layer, made on first use."""
        cached = self._decode if decode else self._prefill
        found = cached.get(variant)
        if found is None:
            found = cached[variant] = make_wrapper(self._settings, variant, decode=decode, buffers=self._buffers)
        return found


class CudaAttentionPlan(AttentionPlan):
    """One step, with the wrappers planned for it.

    Attributes:
        step: the page metadata.
    """

    __slots__ = ("_planned", "_planner", "_segments", "_whole", "step")

    def __init__(self, planner: AttentionPlanner, step: PagedStep) -> None:
        self.step = step
        self._planner = planner
        self._planned: dict[Variant, list[tuple[PagedWrapper, slice]]] = {}
        self._whole = _whole(step)
        self._segments = _segments(step, self._whole)

    def wrappers(self, variant: Variant) -> list[tuple[PagedWrapper, slice]]:
        """The planned wrappers of a kind of layer and the tokens that each serves."""
        found = self._planned.get(variant)
        if found is None:
            self._planner.learn(variant)
            found = []
            segments = self._segments
            if isinstance(variant, LatentVariant):  # one kernel takes rows of both kinds
                segments = [(False, slice(None), self._whole)]
            for decode, tokens, indices in segments:
                wrapper = self._planner.wrapper(variant, decode=decode)
                wrapper.plan(indices)
                found.append((wrapper, tokens))
            self._planned[variant] = found
        return found

    def attend(
        self,
        layer: LayerInput,
        keys: Tensor,
        values: Tensor,
        variant: AttentionVariant,
        append: Callable[..., None],
    ) -> Tensor:
        """Write the tokens' keys and values, then attend. Returns [T, H * D] of the query's type."""
        step = self.step
        query, key, value = layer.query, layer.key, layer.value
        if query.shape[0] != step.num_tokens:
            raise OperationInputError(
                f"attention: {query.shape[0]} query tokens, and the plan is for {step.num_tokens}"
            )
        wrappers = self.wrappers(variant)
        if key.dtype != keys.dtype:
            key, value = key.to(keys.dtype), value.to(keys.dtype)
        append(
            key,
            value,
            step.batch_indices.device,
            step.positions.device,
            (keys, values),
            step.kv_indices.device,
            step.kv_indptr.device,
            step.last_page_len.device,
            kv_layout="NHD",
        )
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for wrapper, tokens in wrappers:
            wrapper.run(query[tokens], keys, values, out[tokens], layer.sinks)
        return out.view(query.shape[0], -1)


def _whole(step: PagedStep) -> PageIndices:
    return PageIndices(
        step.qo_indptr.host,
        step.kv_indptr.host,
        step.last_page_len.host,
        step.kv_lens.host,
        step.kv_indices.device,
        step.page_size,
    )


def _segments(step: PagedStep, whole: PageIndices) -> list[tuple[bool, slice, PageIndices]]:
    """Decode rows and prefill rows, each with index pointers that start at 0: (is decode, tokens, indices)."""
    num_decode, num_rows = step.num_decode, step.num_rows
    if num_decode in (0, num_rows):
        return [(num_decode > 0, slice(None), whole)]
    pages = int(step.kv_indptr.array[num_decode])
    tokens = int(step.qo_indptr.array[num_decode])
    decode = PageIndices(
        whole.qo_indptr[: num_decode + 1],
        whole.kv_indptr[: num_decode + 1],
        whole.last_page_len[:num_decode],
        whole.kv_lens[:num_decode],
        whole.kv_indices[:pages],
        step.page_size,
    )
    prefill = PageIndices(
        whole.qo_indptr[num_decode:] - tokens,
        whole.kv_indptr[num_decode:] - pages,
        whole.last_page_len[num_decode:],
        whole.kv_lens[num_decode:],
        whole.kv_indices[pages:],
        step.page_size,
    )
    return [(True, slice(0, tokens), decode), (False, slice(tokens, None), prefill)]
