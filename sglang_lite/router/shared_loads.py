"""How many requests each worker has from all processes of one router, in memory that they share.

Every process writes a row of its own and reads the others'; the row of one that dies is cleared by its parent. A
worker's column is claimed under a lock the first time that a process meets its address, and stays.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os

COLUMNS = 16384
"""Four times as many as workers that a router may have, so that a free column is near."""


class SharedLoads:
    """The table. Made before the processes are forked.

    Args:
        processes: rows.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._loads = memoryview(mmap.mmap(-1, processes * COLUMNS * 4)).cast("i")
        self._names = memoryview(mmap.mmap(-1, COLUMNS * 8)).cast("Q")
        self._revision = memoryview(mmap.mmap(-1, 8)).cast("Q")
        self._lock = os.memfd_create("columns")

    @property
    def revision(self) -> int:
        """Changes of the set of workers that process 0 has made."""
        return self._revision[0]

    @revision.setter
    def revision(self, value: int) -> None:
        self._revision[0] = value

    def cell(self, process: int, url: str) -> LoadCell:
        """The load of a worker as ``process`` writes it.

        Raises:
            ValueError: more addresses than columns were met.
        """
        column = self._column(url)
        return LoadCell(self._loads, [row * COLUMNS + column for row in range(self.processes)], process)

    def clear(self, process: int) -> None:
        """The process is gone, and its requests with it."""
        for place in range(process * COLUMNS, (process + 1) * COLUMNS):
            self._loads[place] = 0

    def _column(self, url: str) -> int:
        name = int.from_bytes(hashlib.blake2b(url.encode(), digest_size=8).digest(), "big") or 1
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            for step in range(COLUMNS):
                column = (name + step) % COLUMNS
                if self._names[column] == name:
                    return column
                if self._names[column] == 0:
                    self._names[column] = name
                    return column
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)
        raise ValueError(f"more than {COLUMNS} addresses of workers in the life of this router")


class LoadCell:
    """One worker's column."""

    __slots__ = ("_loads", "_own", "_places")

    def __init__(self, loads: memoryview[int], places: list[int], own: int) -> None:
        self._loads = loads
        self._places = places
        self._own = places[own]

    def add(self, change: int) -> None:
        """The process has ``change`` more requests there."""
        self._loads[self._own] += change

    @property
    def total(self) -> int:
        """Requests of all processes."""
        loads = self._loads
        return sum([loads[place] for place in self._places])
