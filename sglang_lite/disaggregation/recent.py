"""What was over a moment ago, so that late messages find out."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The last ``most`` entries by insertion."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: dict[K, V] = {}

    def put(self, key: K, value: V) -> None:
        """Remember, and forget the oldest."""
        self._entries.pop(key, None)
        while len(self._entries) >= self._most:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = value

    def get(self, key: K) -> V | None:
        """What is remembered."""
        return self._entries.get(key)

    def pop(self, key: K) -> V | None:
        """Forget one."""
        return self._entries.pop(key, None)

    def items(self) -> list[tuple[K, V]]:
        """All, the oldest first."""
        return list(self._entries.items())

    def __len__(self) -> int:
        return len(self._entries)
