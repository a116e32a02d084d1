"""Copies of running sequences' keys and values in the order in which decode reads them.

Pages lie scattered in the pool and the keys of one layer are a small part of each, so decode attention that reads the
pool copies everything it reads once per step; measured, that copy costs more than the attention. A sequence is copied
once here when it starts to decode, grows by one token a step (which goes to the pool as well), and is then read in
place, by one attention call for all sequences of similar length. The pool stays complete: an entry here can be dropped
at any time and made again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sglang_lite.adapters.base import KVGeometry
from sglang_lite.adapters.cpu.decode_slab import FREE, Slab, capacity_for
from sglang_lite.adapters.cpu.shared_prefix import SharedPrefix, find_shared
from sglang_lite.types import Int32Array

_HEADROOM = 16
"""Tokens a sequence can grow before it needs a larger slot."""

_IDLE_STEPS = 8
"""A sequence that did not decode for this many steps gives up its slot."""

_RETRY_STEPS = 32
"""A sequence that found no memory reads the pool for this many steps before it is looked at again."""

NOWHERE = -1
_LONG_AGO = -_RETRY_STEPS

Array = npt.NDArray[np.int64]


@dataclass(slots=True)
class Load:
    """A sequence to be read from the pool before the step's first attention."""

    slab: Slab
    slot: int
    pages: Array
    num_tokens: int


@dataclass(slots=True)
class Placement:
    """Where the rows of a step are. Places are positions in the step; rows are rows of the request table.

    Attributes:
        slabs: slabs in use.
        slab_of, slot_of, base_of: int64[n] for each place: index in ``slabs`` or ``NOWHERE``, slot, and tokens of
            the sequence that are in its shared prefix.
        prefixes: prefix -> int64[k], places that start with it.
        loads: what to read first.
    """

    slabs: list[Slab]
    slab_of: Array
    slot_of: Array
    base_of: Array
    prefixes: list[tuple[SharedPrefix, Array]]
    loads: list[Load] = field(default_factory=list)


class DecodeWorkspace:
    """Keeps track of which sequence is where.

    Args:
        geometry: of the pool.
        budget: bytes that slots and shared prefixes may take together.
    """

    def __init__(self, geometry: KVGeometry, budget: int) -> None:
        self._geometry = geometry
        self._budget = budget
        self._slabs: dict[int, Slab] = {}
        self._prefixes: list[SharedPrefix] = []
        self._in_prefix = np.zeros(geometry.num_pages, dtype=np.bool_)
        self._step = 0
        self._resize(0)

    def _resize(self, num_rows: int) -> None:
        """Columns by row of the request table."""
        self._capacity = np.full(num_rows, NOWHERE, dtype=np.int64)
        self._slot = np.zeros(num_rows, dtype=np.int64)
        self._length = np.zeros(num_rows, dtype=np.int64)
        self._base = np.zeros(num_rows, dtype=np.int64)
        self._prefix = np.full(num_rows, NOWHERE, dtype=np.int64)
        self._last_step = np.zeros(num_rows, dtype=np.int64)
        self._refused = np.full(num_rows, _LONG_AGO, dtype=np.int64)

    def reset(self) -> None:
        """Drop everything, memory included: after a step that did not come to its end."""
        self._slabs.clear()
        self._prefixes.clear()
        self._in_prefix.fill(False)
        self._resize(len(self._slot))

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return sum(slab.num_bytes for slab in self._slabs.values()) + sum(p.num_bytes for p in self._prefixes)

    def forget(self, rows: Int32Array) -> None:
        """Sequences that are not what they were: their rows were seen in a prefill chunk."""
        self._reserve(rows)
        self._refused[rows] = _LONG_AGO
        for row in rows[self._capacity[rows] != NOWHERE].tolist():
            self._release(row)

    def drop_rewritten(self, pages: Array) -> None:
        """Drop the prefixes with any of these pages (int64[k]): they have new owners, and get new contents.

        The rows behind such a prefix have ended, though nobody has said so yet.
        """
        if not self._in_prefix[pages].any():
            return
        for index, prefix in enumerate(self._prefixes):
            if np.isin(prefix.pages, pages).any():
                for row in np.flatnonzero(self._prefix == index).tolist():
                    self._release(row)
        self._drop_unused_prefixes()

    def place(self, rows: Int32Array, starts: Array, lengths: Array, page_table: Array) -> Placement:
        """Find or make a place for each row of a decode step.

        What a slot holds behind a row's start was taken back and is written anew.

        Args:
            rows: int32[n]. starts, lengths: int64[n], tokens before and after this step. page_table: int64[n, W].

        Returns:
            The placement; rows that no memory was left for are ``NOWHERE``.
        """
        self._reserve(rows)
        self._step += 1
        self._last_step[rows] = self._step
        self._close_gaps(rows)
        loads: list[Load] = []
        kept = (self._capacity[rows] >= lengths - self._base[rows]) & (self._length[rows] >= starts)
        if not (kept | self._is_refused(rows)).all():
            for row in rows[~kept & (self._capacity[rows] != NOWHERE)].tolist():
                self._release(row)
            self._release_idle()
            self._share_prefixes(rows, starts, page_table)
            entering = self._entering(rows)
            for index, place in enumerate(entering):
                expected = len(entering) - index
                load = self._enter(
                    int(rows[place]), int(starts[place]), int(lengths[place]), page_table[place], expected
                )
                if load is not None:
                    loads.append(load)
        self._length[rows] = lengths
        return self._placement(rows, loads)

    def _placement(self, rows: Int32Array, loads: list[Load]) -> Placement:
        capacities = self._capacity[rows]
        slabs = [slab for capacity, slab in sorted(self._slabs.items()) if (capacities == capacity).any()]
        slab_of = np.full(len(rows), NOWHERE, dtype=np.int64)
        for index, slab in enumerate(slabs):
            slab_of[capacities == slab.capacity] = index
        prefix_of = np.where(slab_of == NOWHERE, NOWHERE, self._prefix[rows])
        prefixes = [
            (prefix, np.flatnonzero(prefix_of == index))
            for index, prefix in enumerate(self._prefixes)
            if (prefix_of == index).any()
        ]
        return Placement(slabs, slab_of, self._slot[rows], self._base[rows], prefixes, loads)

    def _is_refused(self, rows: Int32Array) -> npt.NDArray[np.bool_]:
        """bool[n]: there was no memory for the row a short time ago."""
        refused: npt.NDArray[np.bool_] = self._refused[rows] > self._step - _RETRY_STEPS
        return refused

    def _entering(self, rows: Int32Array) -> list[int]:
        """Places of the rows to find memory for."""
        places: list[int] = np.flatnonzero((self._capacity[rows] == NOWHERE) & ~self._is_refused(rows)).tolist()
        return places

    def _reserve(self, rows: Int32Array) -> None:
        """Make the columns long enough for these rows."""
        missing = int(rows.max(initial=-1)) + 1 - len(self._slot)
        if missing > 0:
            missing = max(missing, len(self._slot))
            self._capacity = np.append(self._capacity, np.full(missing, NOWHERE))
            self._prefix = np.append(self._prefix, np.full(missing, NOWHERE))
            self._refused = np.append(self._refused, np.full(missing, _LONG_AGO))
            nothing = np.zeros(missing, dtype=np.int64)
            self._slot, self._length, self._base, self._last_step = (
                np.append(column, nothing) for column in (self._slot, self._length, self._base, self._last_step)
            )

    def _share_prefixes(self, rows: Int32Array, starts: Array, page_table: Array) -> None:
        """Give rows without a place the longest kept prefix they start with, or keep a new one for several rows."""
        page_size = self._geometry.page_size
        whole_pages = starts // page_size
        for place in self._entering(rows):
            row = int(rows[place])
            if self._prefix[row] != NOWHERE:
                continue
            index = self._longest_prefix(page_table[place], int(whole_pages[place]))
            if index != NOWHERE:
                self._attach(row, index)
                continue
            found = find_shared(page_table, whole_pages, place, page_size)
            if found is None:
                continue
            num_pages, places = found
            members = rows[places][self._prefix[rows[places]] == NOWHERE]
            prefix = SharedPrefix.allocate(page_table[place, :num_pages], self._geometry)
            if len(members) < 2 or self.num_bytes + prefix.num_bytes > self._budget:
                continue
            self._prefixes.append(prefix)
            self._in_prefix[prefix.pages] = True
            for member in members.tolist():
                self._release(member)  # it held the prefix too; what is behind it is read again
                self._attach(member, len(self._prefixes) - 1)

    def _longest_prefix(self, table_row: Array, num_pages: int) -> int:
        fitting = [i for i, prefix in enumerate(self._prefixes) if prefix.starts(table_row, num_pages)]
        return max(fitting, key=lambda i: self._prefixes[i].num_tokens, default=NOWHERE)

    def _attach(self, row: int, index: int) -> None:
        self._prefix[row] = index
        self._refused[row] = _LONG_AGO  # it needs less memory now
        self._base[row] = self._prefixes[index].num_tokens

    def _enter(self, row: int, start: int, length: int, table_row: Array, expected: int) -> Load | None:
        """Take a slot for a row and say what to read into it; None when there is no memory for one.

        ``start``, ``length``: tokens of the sequence before and after this step.
        ``expected``: rows that enter in this step from this one on.
        """
        base = int(self._base[row])
        slab = self._slab_with_room(capacity_for(length - base + _HEADROOM), expected)
        if slab is None:
            self._release(row)
            self._refused[row] = self._step
            return None
        slot = slab.free_slot()
        assert slot is not None
        slab.rows[slot] = row
        self._capacity[row], self._slot[row] = slab.capacity, slot
        page_size = self._geometry.page_size
        return Load(slab, slot, table_row[base // page_size : -(-start // page_size)], start - base)

    def _slab_with_room(self, capacity: int, expected: int) -> Slab | None:
        slab = self._slabs.setdefault(capacity, Slab(self._geometry, capacity))
        if slab.free_slot() is not None:
            return slab
        for unused in [c for c, other in self._slabs.items() if other.extent == 0 and c != capacity]:
            if self.num_bytes + slab.slot_bytes > self._budget:
                del self._slabs[unused]
        # Growing copies the slab, so it grows by half at least. Memory that is not written yet costs nothing.
        room = max(0, self._budget - self.num_bytes) // slab.slot_bytes
        wanted = max(4, len(slab.rows) // 2, expected)
        if room < 1:
            return None
        slab.grow(min(wanted, room))
        return slab

    def _release(self, row: int) -> None:
        """Take back a row's slot and its part in a prefix."""
        capacity = int(self._capacity[row])
        if capacity != NOWHERE:
            self._slabs[capacity].rows[self._slot[row]] = FREE
        self._capacity[row] = self._prefix[row] = NOWHERE
        self._base[row] = self._length[row] = 0

    def _close_gaps(self, rows: Int32Array) -> None:
        """Move rows out of slabs of which they are a small part, since attention computes the gaps as well."""
        for capacity, slab in self._slabs.items():
            held = rows[self._capacity[rows] == capacity]
            if not len(held) or int(self._slot[held].max()) < 2 * len(held) + 4:
                continue
            for row in slab.rows[slab.rows != FREE].tolist():
                if self._last_step[row] < self._step or self._slot[row] >= len(held):
                    self._release(row)  # a row of this step enters again, at the front

    def _release_idle(self) -> None:
        """Slots of sequences that ended (nobody says so: they just do not come again), then prefixes without rows."""
        held = self._capacity != NOWHERE
        for row in np.flatnonzero(held & (self._last_step < self._step - _IDLE_STEPS)).tolist():
            self._release(row)
        self._drop_unused_prefixes()

    def _drop_unused_prefixes(self) -> None:
        in_use = np.bincount(self._prefix[self._prefix != NOWHERE], minlength=len(self._prefixes)) > 0
        if not in_use.all():
            new_index = np.append(np.cumsum(in_use) - 1, NOWHERE)  # the last entry serves NOWHERE itself
            self._prefix = new_index[self._prefix]
            self._prefixes = [prefix for prefix, used in zip(self._prefixes, in_use, strict=True) if used]
            self._in_prefix.fill(False)
            for prefix in self._prefixes:
                self._in_prefix[prefix.pages] = True

    def load(self, placement: Placement, pool: Tensor) -> None:
        """Read what a placement needs from the pool."""
        for prefix, _ in placement.prefixes:
            if not prefix.is_loaded:
                prefix.load(pool)
        for load in placement.loads:
            load.slab.load(load.slot, pool, torch.from_numpy(load.pages), load.num_tokens)
        placement.loads.clear()
