"""Decode attention over the workspace: one call for each slab, one for each shared prefix, joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sglang_lite.adapters.cpu.decode_slab import Slab
from sglang_lite.adapters.cpu.decode_workspace import NOWHERE, Array, DecodeWorkspace, Placement
from sglang_lite.adapters.cpu.paged_decode import PagedDecode, plan_paged_decode
from sglang_lite.adapters.cpu.pool_view import PoolReader
from sglang_lite.adapters.cpu.query_tokens import QueryTokens
from sglang_lite.adapters.cpu.shared_prefix import SharedPrefix
from sglang_lite.adapters.cpu.softmax_attention import MASKED, attend, attend_few, join, length_mask
from sglang_lite.types import Int32Array


class LayerViews(NamedTuple):
    """Keys and values of one layer of a slab.

    Attributes:
        keys, values: [slots, capacity, G, D], all slots.
        read_keys, read_values: [extent, G, width, D], what the step attends to.
        new_key, new_value: [1, G, D], where those of the only row go; None with several rows.
    """

    keys: Tensor
    values: Tensor
    read_keys: Tensor
    read_values: Tensor
    new_key: Tensor | None
    new_value: Tensor | None


@dataclass(slots=True)
class SlabPart:
    """The query tokens of a step whose rows are in one slab.

    Every slot is computed for as many queries as the row with the most of them has; a cell is one of a slot's
    queries, a hole a cell without a token.

    Attributes:
        extent: slots that are computed.
        queries: cells of a slot.
        places: int64[k], the tokens here, or None for all in order.
        order: int64[cells], token whose query each cell gets (any for a hole); None when cell i is token i.
        target: int64[cells], token that each cell's result goes to, T for a hole; None when cell i is token i.
        slots, positions: int64[k], where the tokens' keys and values go.
        lengths: int64[cells], keys that each cell sees, 1 for a hole.
        width: the largest of them.
        masks: window -> mask or None, made at first use.
        views: for each layer the keys and values of all its slots, the vector that takes the only row's new key
            and value included; made at first use, for all layers in a few calls.
    """

    slab: Slab
    extent: int
    queries: int
    places: Tensor | None
    order: Tensor | None
    target: Tensor | None
    slots: Tensor
    positions: Tensor
    lengths: Tensor
    width: int
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)
    views: list[LayerViews] = field(default_factory=list)

    def layer_views(self, layer: int) -> LayerViews:
        """Where the part's keys and values of a layer are."""
        if not self.views:
            self.views = slab_views(self)
        return self.views[layer]

    def mask(self, window: int | None, repeat: int, dtype: torch.dtype) -> Tensor | None:
        """Mask [extent, G, queries * repeat, width] with one query [extent, G, 1, width]; None if nothing is hidden."""
        if window not in self.masks:
            hides = int(self.lengths.min()) < self.width or (window is not None and window < self.width)
            mask = length_mask(self.lengths, self.width, window, dtype) if hides else None
            self.masks[window] = None if mask is None else self._spread(mask, repeat)
        return self.masks[window]

    def _spread(self, mask: Tensor, repeat: int) -> Tensor:
        """A mask [cells, 1, 1, width] for all heads."""
        groups = self.slab.keys.shape[3]
        if self.queries == 1:
            return mask.repeat(1, groups, 1, 1)
        by_query = mask.view(self.extent, 1, self.queries, 1, self.width)
        spread = by_query.expand(-1, groups, -1, repeat, -1)
        return spread.reshape(self.extent, groups, self.queries * repeat, self.width)


@dataclass(slots=True)
class PrefixPart:
    """The query tokens of a step whose sequences start with one shared prefix.

    Attributes:
        places: int64[k], or None for all in order.
        lengths: int64[k], tokens of its sequence that each sees.
    """

    prefix: SharedPrefix
    places: Tensor | None
    lengths: Tensor
    masks: dict[int, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, repeat: int, dtype: torch.dtype) -> Tensor | None:
        """Mask [1, 1, k * repeat, prefix tokens] of a window that ends before some sequences' start, else None."""
        if window is None:
            return None
        if window not in self.masks:
            hidden = torch.arange(self.prefix.num_tokens) < (self.lengths - window).unsqueeze(1)
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, MASKED).repeat_interleave(repeat, 0)
            self.masks[window] = mask.view(1, 1, *mask.shape) if bool(hidden.any()) else None
        return self.masks[window]


class WorkspaceDecode:
    """A decode step over the workspace.

    Args:
        paged: places that found no memory in the workspace, and how they read the pool; None without any.

    Attributes:
        keeps_all: every row is in the workspace, so the pool can get the new keys and values of all layers at once.
    """

    def __init__(
        self,
        workspace: DecodeWorkspace,
        placement: Placement,
        parts: list[SlabPart],
        prefixes: list[PrefixPart],
        paged: tuple[Tensor, PagedDecode] | None,
    ) -> None:
        self._workspace = workspace
        self._placement = placement
        self._parts = parts
        self._prefixes = prefixes
        self._paged = paged
        self._is_loaded = False
        self.keeps_all = paged is None
        self._layers: list[int] = []

    def run(
        self,
        reader: PoolReader,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pool: Tensor,
        layer: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """[n, H, D] queries with the new keys and values [n, G, D] -> [n, H, D]."""
        if not self._is_loaded:
            self._workspace.load(self._placement, pool)
            self._is_loaded = True
        self._layers.append(layer)
        num_rows, num_heads, head_dim = query.shape
        groups = reader.geometry.num_kv_heads
        grouped = query.view(num_rows, groups, num_heads // groups, head_dim)
        output: Tensor | None = None
        log_sums: Tensor | None = None
        for part in self._parts:
            mixed, log_sum = _attend_slab(part, grouped, key, value, layer, scale, window, bool(self._prefixes))
            if part.target is None:
                output, log_sums = mixed, log_sum
                continue
            if output is None:
                output = query.new_empty(num_rows + 1, *grouped.shape[1:])
            output.index_copy_(0, part.target, mixed)
            if log_sum is not None:
                if log_sums is None:
                    log_sums = query.new_empty(num_rows + 1, *grouped.shape[1:3], dtype=torch.float32)
                log_sums.index_copy_(0, part.target, log_sum)
        if output is None:
            assert self._paged is not None
            return self._paged[1].run(reader, query, key, value, pool, layer, scale, window)
        output = output[:num_rows]
        if log_sums is not None:
            for prefix in self._prefixes:
                output = _join_prefix(prefix, grouped, output, log_sums[:num_rows], layer, scale, window)
        output = output.reshape(query.shape)
        if self._paged is not None:
            places, paged = self._paged
            rest = paged.run(reader, query.index_select(0, places), key, value, pool, layer, scale, window)
            output.index_copy_(0, places, rest)
        return output

    def write_pool(self, vectors: Tensor, pool_rows: Tensor) -> None:
        """Copy the new tokens' keys and values of the layers that ran here from the slabs into the pool.

        Nobody reads them there before the step after this one: two scatters a step instead of two a layer.

        Args:
            vectors: [N, G * D], the pool.
            pool_rows: int64[layers, 2, n], where the tokens' keys and values go.
        """
        if not self._layers:
            return
        every_layer = len(self._layers) == pool_rows.shape[0]
        layers = slice(None) if every_layer else torch.tensor(self._layers)
        for part in self._parts:
            rows = pool_rows if part.places is None else pool_rows.index_select(2, part.places)
            for side, store in enumerate((part.slab.keys, part.slab.values)):
                new = store[:, part.slots, part.positions][layers]
                vectors.index_copy_(0, rows[layers, side].flatten(), new.reshape(-1, vectors.shape[1]))


def slab_views(part: SlabPart) -> list[LayerViews]:
    """The views of all layers, each kind made for all of them in one call."""
    keys, values = part.slab.keys, part.slab.values
    num_layers = keys.shape[0]
    read_keys, read_values = (
        store[:, : part.extent, : part.width].transpose(2, 3).unbind(0) for store in (keys, values)
    )
    new_keys: Sequence[Tensor | None] = (None,) * num_layers
    new_values: Sequence[Tensor | None] = new_keys
    if len(part.slots) == 1:
        slot, position = int(part.slots[0]), int(part.positions[0])
        new_keys, new_values = (store[:, slot, position : position + 1].unbind(0) for store in (keys, values))
    return [
        LayerViews(*views)
        for views in zip(keys.unbind(0), values.unbind(0), read_keys, read_values, new_keys, new_values, strict=True)
    ]


def _attend_slab(
    part: SlabPart,
    grouped: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    scale: float,
    window: int | None,
    with_log_sum: bool,
) -> tuple[Tensor, Tensor | None]:
    """Append the new tokens and attend: [extent, G, H / G, D], and float32[extent, G, H / G] if wanted."""
    if part.places is not None:
        key, value = key.index_select(0, part.places), value.index_select(0, part.places)
    if part.order is not None:
        grouped = grouped.index_select(0, part.order)
    views = part.layer_views(layer)
    if views.new_key is not None and views.new_value is not None:
        views.new_key.copy_(key)
        views.new_value.copy_(value)
    else:
        where = (part.slots, part.positions)
        views.keys.index_put_(where, key)
        views.values.index_put_(where, value)
    mask = part.mask(window, grouped.shape[2], grouped.dtype)
    keys, values = views.read_keys, views.read_values
    queries = grouped if part.queries == 1 else _heads_first(grouped, part.queries)
    if keys.stride(2) == 1:
        mixed, log_sum = attend_few(queries, keys, values, scale=scale, mask=mask, with_log_sum=with_log_sum)
    else:
        mixed, log_sum = attend(queries, keys, values, scale=scale, mask=mask)
    if part.queries == 1:
        return mixed, log_sum
    if log_sum is not None:
        log_sum = _cells_first(log_sum.unsqueeze(-1), part.queries).squeeze(-1)
    return _cells_first(mixed, part.queries), log_sum


def _heads_first(x: Tensor, queries: int) -> Tensor:
    """[slots * queries, G, R, D] -> [slots, G, queries * R, D]."""
    groups, repeat, size = x.shape[1:]
    return x.view(-1, queries, groups, repeat, size).transpose(1, 2).reshape(-1, groups, queries * repeat, size)


def _cells_first(x: Tensor, queries: int) -> Tensor:
    """[slots, G, queries * R, D] -> [slots * queries, G, R, D]."""
    slots, groups, _, size = x.shape
    return x.view(slots, groups, queries, -1, size).transpose(1, 2).reshape(slots * queries, groups, -1, size)


def _join_prefix(
    part: PrefixPart,
    grouped: Tensor,
    output: Tensor,
    log_sums: Tensor,
    layer: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend to a shared prefix with all queries of its rows at once, and join with what they have so far."""
    if part.places is not None:
        grouped = grouped.index_select(0, part.places)
        behind, behind_log_sum = output.index_select(0, part.places), log_sums.index_select(0, part.places)
    else:
        behind, behind_log_sum = output, log_sums
    rows, groups, repeat, head_dim = grouped.shape
    queries = grouped.transpose(0, 1).reshape(1, groups, rows * repeat, head_dim)
    keys, values = part.prefix.store[:, layer].transpose(1, 2).unsqueeze(1).unbind(0)
    mask = part.mask(window, repeat, grouped.dtype)
    mixed, log_sum = attend(queries, keys, values, scale=scale, mask=mask)
    mixed = mixed.view(groups, rows, repeat, head_dim).transpose(0, 1)
    log_sum = log_sum.reshape(groups, rows, repeat).transpose(0, 1)
    joined = join(behind, behind_log_sum, mixed, log_sum)
    return joined if part.places is None else output.index_copy(0, part.places, joined)


def plan_workspace_decode(
    workspace: DecodeWorkspace, reader: PoolReader, rows: Int32Array, queries: QueryTokens, page_table: Array
) -> WorkspaceDecode:
    """Place the rows that decode or verify and prepare the indices of the layers.

    Args:
        rows: int32[n], rows of the request table. queries: their T tokens. page_table: int64[n, W].
    """
    placement = workspace.place(rows, queries.starts, queries.stops, page_table)
    parts = [_slab_part(placement, index, queries) for index in range(len(placement.slabs))]
    prefixes = []
    for prefix, places in placement.prefixes:
        tokens = np.flatnonzero(np.isin(queries.row, places))
        everyone = len(tokens) == len(queries.row)
        lengths = torch.from_numpy(queries.lengths[tokens])
        prefixes.append(PrefixPart(prefix, None if everyone else torch.from_numpy(tokens), lengths))
    homeless = np.flatnonzero(placement.slab_of[queries.row] == NOWHERE)
    paged = None
    if len(homeless):
        table = page_table[queries.row[homeless]]
        paged = (torch.from_numpy(homeless), plan_paged_decode(reader, table, queries.lengths[homeless]))
    return WorkspaceDecode(workspace, placement, parts, prefixes, paged)


def _slab_part(placement: Placement, index: int, queries: QueryTokens) -> SlabPart:
    num_tokens = len(queries.row)
    places = np.flatnonzero(placement.slab_of[queries.row] == index)
    row = queries.row[places]
    slots = placement.slot_of[row]
    seen = queries.lengths[places] - placement.base_of[row]
    extent, per_slot = int(slots.max()) + 1, int(queries.offset[places].max()) + 1
    cells = slots * per_slot + queries.offset[places]
    order = np.zeros(extent * per_slot, dtype=np.int64)
    target = np.full(extent * per_slot, num_tokens, dtype=np.int64)
    lengths = np.ones(extent * per_slot, dtype=np.int64)
    order[cells] = target[cells] = places
    lengths[cells] = seen
    in_order = len(target) == num_tokens and bool((target == np.arange(num_tokens)).all())
    return SlabPart(
        slab=placement.slabs[index],
        extent=extent,
        queries=per_slot,
        places=None if len(places) == num_tokens else torch.from_numpy(places),
        order=None if in_order else torch.from_numpy(order),
        target=None if in_order else torch.from_numpy(target),
        slots=torch.from_numpy(slots),
        positions=torch.from_numpy(seen - 1),
        lengths=torch.from_numpy(lengths),
        width=int(seen.max()),
    )
